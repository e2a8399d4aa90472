"""How a checkpoint stores its weights, read from `quantization_config` and `dtype` of its config.

A reader of `_READERS` turns the config of a tool into the scheme of each module. Sources: transformers
(utils/quantization_config.py), compressed-tensors (quantization/quant_args.py), ModelOpt (export/quant_utils.py),
GPTQModel (quantization/config.py), AutoRound, and vLLM (model_executor/layers/quantization). Configs of other
tools are read for `bits` alone, and the nearest format is named.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations

from meshscope.errors import SpecError
from meshscope.files import own_table
from meshscope.model.families import Family, LayerRule
from meshscope.model.layers import Layer
from meshscope.model.model import Model
from meshscope.model.quantization import (
    FP8_BLOCKS,
    FP8_BLOCKS_32,
    FP8_W8A8,
    INT4_OF_GROUP,
    INT8_W8A8,
    MXFP4,
    NVFP4,
    UNQUANTIZED_DTYPE,
    WEIGHT_DTYPES,
    WITH_EXPERTS,
    Coverage,
    activation_dtype_of,
    format_with,
    quantization_of,
    wide_format,
)
from meshscope.model.reader import Config, ConfigReader, NestedConfig
from meshscope.units import DTYPE_ALIASES, dtype_name

INT4_GROUP = 128  # the group of a config that names none
MXFP4_GROUP = 32
BLOCK, BLOCK_32 = [128, 128], [32, 32]
WIDE_BITS = 16
PLAIN_DTYPES = ("bfloat16", "float16", "float32")
FP8 = "f8e4m3fn"


class MatrixGroup(StrEnum):
    """Matrices that recipes quantize or leave out together."""

    ATTENTION = "attention"
    LINEAR = "linear attention"
    MLPS = "the MLPs"  # dense layers and shared experts
    EXPERTS = "the experts"  # routed ones


Modules = Mapping[MatrixGroup, tuple[str, ...]]
_TABLES = own_table("model/stored_formats.toml")


def module_names(family: Family, layers: Sequence[Layer]) -> Modules:
    """The modules of each group with matrices, from `layers` on, with the first expert for all of a layer."""
    row = family.traits
    has_gates = row.hidden_act not in {"relu2", "xielu"}

    def of(tensors: Mapping[str, str]) -> list[str]:
        used = (name for role, name in tensors.items() if role != "gate" or has_gates)
        return renamed(name.removesuffix(".weight").format(expert=0) for name in used)

    def renamed(names: Iterable[str]) -> list[str]:
        return [
            next((n + m[len(o) :] for o, n in row.names.items() if f"{m}.".startswith(f"{o}.")), m)
            for m in names
        ]

    inputs = ("in_proj_qkvz",) if row.is_fused else ("in_proj_qkv", "in_proj_z")
    linear = [f"linear_attn.{name}" for name in (*inputs, "out_proj")]
    attention, dense = _TABLES["attention"][row.mechanism], of(row.tensors("mlp"))
    if row.is_fused and row.layers is not LayerRule.HYBRID:
        attention = ["self_attn.qkv_proj", "self_attn.o_proj"]
    attention = renamed(attention)
    if row.layers is LayerRule.KIMI:
        gates = ("f", "g") if row.variant == "ling3" else ("f_a", "f_b", "g_a", "g_b")
        linear = renamed(f"self_attn.{name}_proj" for name in ("q", "k", "v", *gates, "o"))
    if row.variant == "blocks":  # each layer is a mixer of one kind
        attention = [name.replace("self_attn", "mixer") for name in attention]
        linear = ["mixer.in_proj", "mixer.out_proj"]
    if row.is_fused_mlp:
        dense = ["mlp.gate_up_proj", "mlp.down_proj"]
    shared = of(row.tensors("shared")) if row.has_shared_experts else []
    fused = row.fused_experts
    experts = [fused.base.rstrip(".")] if fused else of(row.tensors("expert"))
    modules: dict[MatrixGroup, list[str]] = {}
    for index, layer in enumerate(layers):
        is_linear = layer.attention.is_linear
        group = MatrixGroup.LINEAR if is_linear else MatrixGroup.ATTENTION
        mlps = [*(dense if layer.has_mlp else ()), *(shared if layer.has_experts else ())]
        mixer = linear if is_linear else attention if layer.has_attention else []
        of_layer = {group: mixer, MatrixGroup.MLPS: mlps}
        of_layer[MatrixGroup.EXPERTS] = experts if layer.has_experts else []
        for of_group, short in of_layer.items():
            modules.setdefault(of_group, []).extend(f"layers.{index}.{name}" for name in short)
    return {group: tuple(names) for group, names in modules.items() if names}


# Starts of names before `layers`, in checkpoints of text models and of models with a text part.
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|text_model|backbone)\.)+(?=layers\.)")
_PLAIN = re.compile(r"[\w.\-]+")
# The time of a failing match grows with the power of its repeats, and exponentially if a group is repeated.
MAX_REPEATS = 4
SHOWN = 100  # characters of an expression in a message
_ONE_CHARACTER = re.compile(r"\\.|\[[^\]]*\]")  # escaped, or of a set
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = re.compile(r"[*+{]|(?<![(*+])\?")


class ModulePatterns:
    """Modules that the entries of a config select.

    An entry is a regular expression for the start of a name (`re:.*self_attn.*`), a pattern with `*`, or a part of
    a name between dots: `self_attn` and `model.layers.0` select all modules below them. Others select nothing.
    """

    def __init__(self, entries: object, source: str = "quantization_config") -> None:
        """Sort the entries by their kind; SpecError for an invalid regular expression."""
        self._names, self._regexes = set[str](), list[re.Pattern[str]]()
        for entry in entries if isinstance(entries, list | tuple) else ():
            if not isinstance(entry, str):
                continue
            if _PLAIN.fullmatch(entry):
                self._names.add(_BEFORE_LAYERS.sub("", entry.strip(".")))
            elif entry.startswith("re:"):
                self._regexes.append(_compiled(entry.removeprefix("re:"), source))
            else:
                globs = map(fnmatch.translate, (entry, f"{entry}.*"))
                self._regexes.append(re.compile("|".join(globs)))

    def __contains__(self, name: str) -> bool:
        """Whether the entries select this module, whose name starts at `layers`."""
        parts = name.split(".")
        spans = combinations(range(len(parts) + 1), 2)
        if self._names and any(".".join(parts[i:j]) in self._names for i, j in spans):
            return True
        return any(regex.match(prefix + name) for regex in self._regexes for prefix in _PREFIXES)


def _compiled(text: str, source: str) -> re.Pattern[str]:
    bare = _ONE_CHARACTER.sub("x", text)
    if _REPEATED_GROUP.search(bare) or len(_REPEATS.findall(bare)) > MAX_REPEATS:
        raise SpecError(
            f"{source}: 're:{text[:SHOWN]}' repeats a group, or has more than {MAX_REPEATS} repeats, and may "
            "take too long to match. Name the modules, or simplify it."
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise SpecError(
            f"{source}: 're:{text[:SHOWN]}' is not a regular expression ({error}). Correct the config."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Values and scales of some matrices, as the tool names them."""

    text: str
    dtype: str | None = None  # with these values and scales, in all matrices of layers
    nearest: str | None = None  # with the most similar bytes, if there is no such dtype


Rule = tuple[ModulePatterns, Scheme | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRecipe:
    """The scheme of each module, from the first rule that selects it, else `scheme`; None is 16 bits."""

    text: str
    scheme: Scheme | None
    rules: tuple[Rule, ...] = ()


def _of(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _keeping(scheme: Scheme, *lists: object) -> QuantizationRecipe:
    rules = tuple((ModulePatterns(one), None) for one in lists)
    return QuantizationRecipe(text=scheme.text, scheme=scheme, rules=rules)


def _scheme(
    text: str, bits: object, group: object, kind: str = "int", *, has_narrow_inputs: bool = False
) -> Scheme:
    """Values of this many bits, 4 if the tool names none, with a scale for each group of inputs; -1 is a channel.

    8-bit integers count as if each channel had one scale. Inputs of 8 bits count if their scales are computed in each
    step; programs have no fixed ones.
    """
    is_int, is_mx = kind == "int", group == MXFP4_GROUP if kind == "float" else kind[:2] == "mx"
    if bits == 8 and is_mx and not is_int:
        return Scheme(text=text + (", mxfp8" if kind == "float" else ""), nearest=FP8)
    if bits == 8:
        narrow, wide = (INT8_W8A8, "s8") if is_int else (FP8_W8A8, FP8)
        return Scheme(text=text, dtype=narrow if has_narrow_inputs else wide)
    if is_int:
        return _int4(text, group) if bits in (4, None) else _wide(text, bits)
    if bits not in (4, None):
        return Scheme(text=text)
    is_nvfp4 = kind == "float" and not is_mx
    return Scheme(text=text + (", nvfp4" if is_nvfp4 else ""), dtype=MXFP4 if is_mx else NVFP4)


def _int4(text: str, group: object) -> Scheme:
    if group in (-1, 0):
        return Scheme(text=f"{text} with a scale a channel", dtype=INT4_OF_GROUP[None])
    size = INT4_GROUP if group is None else group
    named = text if size == INT4_GROUP else f"{text} with scales of {size} inputs"
    if not isinstance(size, int):
        return Scheme(text=named, nearest=INT4_OF_GROUP[INT4_GROUP])
    near = min(filter(None, INT4_OF_GROUP), key=lambda one: abs(one - size))
    dtype = INT4_OF_GROUP[near]
    return Scheme(text=named, dtype=dtype) if near == size else Scheme(text=named, nearest=dtype)


def _wide(text: str, bits: object) -> Scheme:
    n = bits if isinstance(bits, int | float) else 0
    if n > 8:
        return Scheme(text=text)
    return Scheme(text=text, nearest="s8" if n > 4 else INT4_OF_GROUP[INT4_GROUP])


def _fp8_blocks(text: str, block: object, scales: object = None) -> Scheme:
    rows = " x ".join(map(str, block)) if isinstance(block, list) else str(block)
    text = f"{text} with scales of {rows} blocks"
    if block == BLOCK_32 and scales == "ue8m0":
        return Scheme(text=text, dtype=FP8_BLOCKS_32)
    return Scheme(text=text, dtype=FP8_BLOCKS) if block == BLOCK else Scheme(text=text, nearest=FP8)


def _unlike(scheme: Scheme, what: str) -> Scheme:
    """A scheme that differs from this one, its nearest, in what no dtype has."""
    nearest = scheme.dtype or scheme.nearest
    return replace(scheme, text=scheme.text + what, dtype=None, nearest=nearest)


def _fp8(config: Config, method: str) -> QuantizationRecipe:
    is_dynamic = config.get("activation_scheme") == "dynamic"
    scheme = _scheme(method, 8, None, "float", has_narrow_inputs=is_dynamic)
    if (block := config.get("weight_block_size")) is not None:
        scheme = _fp8_blocks(method, block, config.get("scale_fmt"))
    if "e4m3" not in (values := str(config.get("fmt") or "e4m3")):
        scheme = _unlike(scheme, f" in {values}")
    return _keeping(scheme, config.get("modules_to_not_convert"), config.get("ignored_layers"))


def _mxfp4(config: Config, _: str) -> QuantizationRecipe:
    """Experts only, whatever else the config leaves out (transformers, Mxfp4HfQuantizer)."""
    config.get("modules_to_not_convert")
    return QuantizationRecipe(text="mxfp4", scheme=None, rules=(_MXFP4_EXPERTS,))


_MXFP4_EXPERTS = (ModulePatterns(["experts"]), Scheme(text="mxfp4", dtype=MXFP4))
_KEYS_OF_BITS = (("bits", "w_bit"), ("group_size", "q_group_size"), ("data_type",))


def _by_bits(config: Config, method: str) -> QuantizationRecipe:
    """AWQ, GPTQ and AutoRound, whose floats are `mx_fp`, `nv_fp` and `fp`.

    `dynamic` of GPTQModel leaves out modules (`-:`) or has other bits for them (`+:`), and so has `extra_config` of
    AutoRound by name or regular expression.
    """

    def scheme(values: Config) -> Scheme | None:
        bits, group, kind = (
            next((of[key] for of in (values, config) for key in keys if key in of), None)
            for keys in _KEYS_OF_BITS
        )
        text, kind = method if bits is None else f"{bits}-bit {method}", str(kind or "int")
        if isinstance(bits, int) and bits >= WIDE_BITS:
            return None
        is_int = kind.startswith("int")
        return _scheme(
            text if is_int else f"{text} ({kind})", bits, group, "int" if is_int else kind
        )

    default, named = scheme({}), list[object]()
    heads = [config.get(key) for key in ("lm_head", "quant_lm_head")]
    if default is not None and True in heads:
        default = _unlike(default, ", head included")
    inside = config.get("modules_in_block_to_quantize")
    for names in inside if isinstance(inside, list) else []:
        named += names if isinstance(names, list) else []
    modules = {
        f"re:{pattern.removeprefix('+:').removeprefix('-:')}": None
        if pattern.startswith("-:")
        else scheme(_of(values))
        for pattern, values in _of(config.get("dynamic")).items()
    }
    for name, values in _of(config.get("extra_config")).items():
        modules[f"re:{name}" if "*" in name else name] = scheme(_of(values))
    rules: list[Rule] = [(ModulePatterns(config.get("modules_to_not_convert")), None)]
    rules += [(ModulePatterns([name]), of) for name, of in modules.items()]
    if named:
        rules.append((ModulePatterns(named), default))
    return QuantizationRecipe(
        text=method if default is None else default.text,
        scheme=None if named else default,
        rules=tuple(rules),
    )


def _bitsandbytes(config: Config, method: str) -> QuantizationRecipe:
    if config.get("load_in_8bit") is True:
        scheme = Scheme(text=f"8-bit {method}", dtype="s8")
    else:
        kind = config.get("bnb_4bit_quant_type", "4 bits")
        scheme = Scheme(text=f"{method} {kind}", nearest=INT4_OF_GROUP[64])
    return _keeping(scheme, config.get("llm_int8_skip_modules"))


_EXPERTS_CLASS = re.compile(r"[A-Z]\w*(Experts|MoE|MoeBlock)")  # such as Qwen3MoeExperts, FusedMoE


def _of_groups(config: Config, method: str) -> QuantizationRecipe:
    kept, groups = config.get("ignore"), map(_of, _of(config.get("config_groups")).values())
    schemes = [(group, _group_scheme(method, group)) for group in groups]
    sparse = dict(_of(config.get("sparsity_config"))).get("format", "dense")
    if sparse != "dense":
        schemes = [(group, scheme and _unlike(scheme, f", {sparse}")) for group, scheme in schemes]
    if all(scheme is None for _, scheme in schemes):
        return QuantizationRecipe(text=method, scheme=Scheme(text=method))
    rules: list[Rule] = [(ModulePatterns(kept), None)]
    defaults: list[Scheme] = []
    for group, scheme in schemes:
        targets = group.get("targets")
        if not isinstance(targets, list) or any(t in ("Linear", "nn.Linear") for t in targets):
            if scheme is not None and scheme not in defaults:
                defaults.append(scheme)
        else:
            names = ["experts" if _EXPERTS_CLASS.fullmatch(str(t)) else t for t in targets]
            rules.append((ModulePatterns(names), scheme))
    default = next(iter(defaults), None)
    if len(defaults) > 1:  # of the same modules: which of them counts is unknown
        default = Scheme(text=" or ".join(sorted(scheme.text for scheme in defaults)))
    return QuantizationRecipe(text=method, scheme=default, rules=tuple(rules))


def _group_scheme(method: str, group: Config) -> Scheme | None:
    """The scheme of a group of compressed-tensors; None if its weights have 16 bits."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return None
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits", 8)
    strategy = weights.get("strategy")
    inputs = inputs if isinstance(inputs, Mapping) else {"num_bits": WIDE_BITS}
    text = f"{method} W{bits}A{inputs.get('num_bits')} ({kind})"
    if bits == 8 and kind == "float" and strategy == "block":
        return _fp8_blocks(text, weights.get("block_structure"))
    has_narrow_inputs = inputs.get("num_bits") == 8 and inputs.get("dynamic") is True
    size = -1 if kind == "int" and strategy == "channel" else weights.get("group_size")
    return _scheme(text, bits, size, kind, has_narrow_inputs=has_narrow_inputs)


def _modelopt(config: Config, method: str) -> QuantizationRecipe:
    """`quant_algo` of all layers, or of each in `quantized_layers`; an fp8 checkpoint keeps its blocks elsewhere."""
    of_layers, algorithm = config.get("quantized_layers"), config.get("quant_algo")
    kept = (config.get("exclude_modules"), config.get("ignore"))
    if isinstance(of_layers, Mapping):
        by_scheme: dict[Scheme, list[str]] = {}
        size = {"group_size": config.get("group_size")}  # of layers that name none
        for name, values in of_layers.items():
            by_scheme.setdefault(_modelopt_scheme({**size, **_of(values)}), []).append(name)
        default = _fp8(config, "fp8").scheme if config.get("quant_method") == "fp8" else None
        rules = tuple((ModulePatterns(names), scheme) for scheme, names in by_scheme.items())
        return QuantizationRecipe(text="modelopt MIXED_PRECISION", scheme=default, rules=rules)
    if algorithm in {None, "MIXED_PRECISION"} and isinstance(config.get("config_groups"), Mapping):
        return _of_groups(config, method)
    return _keeping(_modelopt_scheme(config), *kept)


def _modelopt_scheme(values: Config) -> Scheme:
    algorithm, group = values.get("quant_algo"), values.get("group_size")
    text, name = "modelopt" if algorithm is None else f"modelopt {algorithm}", str(algorithm)
    if name in {"W4A16", "W4A16_AWQ", "W4A8_AWQ"}:
        return _scheme(text, 4, group)
    dtype = NVFP4 if "NVFP4" in name else _TABLES["modelopt"].get(name)
    return Scheme(text=text, dtype=dtype, nearest=FP8 if name == "MXFP8" else None)


_READERS: Mapping[str, Callable[[Config, str], QuantizationRecipe]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8"), _fp8),
    "mxfp4": _mxfp4,
    **dict.fromkeys(("awq", "gptq", "auto-round"), _by_bits),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _of_groups,
    "modelopt": _modelopt,
}


def _method(config: Config) -> str:
    """The tool; ModelOpt wrote no method at first, MLX writes none."""
    known = {"quant_algo": "modelopt", "bits": "mlx"}
    unnamed = next((known[key] for key in known if key in config), "an unnamed quantization")
    method = str(config.get("quant_method") or unnamed)
    method = _TABLES["same_method"].get(method, method)
    is_mixed = method == "fp8" and isinstance(config.get("quantized_layers"), Mapping)
    return "modelopt" if is_mixed else method


# The groups that each coverage quantizes, and how a text ends that names it. Coverages that quantize the same groups
# of a model are named by the first.
_GROUPS = {
    Coverage.LAYERS: (frozenset(MatrixGroup), ""),
    Coverage.EXPERTS: (frozenset({MatrixGroup.EXPERTS}), " in the experts"),
    Coverage.MLPS: (frozenset({MatrixGroup.MLPS, MatrixGroup.EXPERTS}), " in the MLPs"),
    Coverage.NOT_LINEAR: (
        frozenset(MatrixGroup) - {MatrixGroup.LINEAR},
        " except in linear attention",
    ),
}

IN_NO_LAYER = ", in none of its layers"


# The modules of each layer with another weight dtype than the checkpoint's, and which one.
Formats = Mapping[int, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format as the config states it, and the weight dtype that counts its bytes."""

    text: str
    weight_dtype: str | None = None  # None if no weight dtype is its equal
    nearest: str | None = None  # then the one that comes nearest, if any
    cache: str | None = None  # of the KV cache for which the checkpoint has scales
    special: Formats = field(default_factory=dict[int, tuple[tuple[str, str], ...]])


def stored_format(reader: ConfigReader, modules: Modules) -> StoredFormat | None:
    """The format of the checkpoint of a model with these modules; None if the config does not state it."""
    config, keys = reader.config, ("quantization_config", "compression_config")
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is not None:
        if not isinstance(config[key], Mapping):
            raise SpecError(
                f"{reader.source}: '{key}' must be an object with a quant_method, got {config[key]!r}. Correct the config, or remove it "
                "and name --weight-dtype."
            )
        method, quantization = _method(config[key]), NestedConfig(config[key], key, reader.used)
        if method not in _READERS:  # its keys are not read, so that none is missed
            bits = config[key].get("bits")
            nearest = None if bits is None else _wide(method, bits)
            recipe = QuantizationRecipe(text=method, scheme=nearest or Scheme(text=method))
            return _quantized(recipe, modules)
        recipe = _READERS[method](quantization, method)
        if (experts := quantization.get("moe_quant_algo")) is not None:
            values = {"quant_algo": experts, "group_size": quantization.get("group_size")}
            of_experts = (ModulePatterns(["experts"]), _modelopt_scheme(values))
            recipe = replace(recipe, rules=(*recipe.rules, of_experts))
        is_fp8 = recipe.scheme is not None and recipe.scheme.dtype in {FP8_BLOCKS, FP8_BLOCKS_32}
        if is_fp8 and quantization.get("expert_dtype", config.get("expert_dtype")) == "fp4":
            recipe = replace(recipe, rules=(*recipe.rules, _MXFP4_EXPERTS))
        return replace(_quantized(recipe, modules), cache=_stored_cache(quantization))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return None
    if dtype in PLAIN_DTYPES:
        return StoredFormat(text=dtype, weight_dtype=DTYPE_ALIASES[dtype])
    bits = re.search(r"\d+", dtype)
    wide = UNQUANTIZED_DTYPE if bits is None or int(bits[0]) <= WIDE_BITS else "f32"
    alias = DTYPE_ALIASES.get(dtype, wide)
    near = alias if alias in WEIGHT_DTYPES else wide
    text = f"{dtype} without scales" if quantization_of(near) else dtype
    return StoredFormat(text=text, nearest=near)


def _stored_cache(config: Config) -> str | None:
    scheme = config.get("kv_cache_scheme", config.get("kv_cache_quant_algo"))
    if isinstance(scheme, str):
        return {"FP8": "fp8", "INT8": "int8"}.get(scheme)
    if _of(scheme).get("num_bits") != 8:
        return None
    return "fp8" if _of(scheme).get("type") == "float" else "int8"


def _quantized(recipe: QuantizationRecipe, modules: Modules) -> StoredFormat:
    """The format of a recipe: one scheme in some groups of matrices, or several.

    A group has the scheme of most of its modules; the text counts the others, which have formats of their own. Among pairs, fp8 with experts in mxfp4 or nvfp4 has an equal.
    """
    schemes = {
        group: [
            next((of for patterns, of in recipe.rules if module in patterns), recipe.scheme)
            for module in modules[group]
        ]
        for group in MatrixGroup
        if group in modules
    }
    most = {group: Counter(of).most_common(1)[0] for group, of in schemes.items()}
    of_group = {group: scheme for group, (scheme, _) in most.items() if scheme is not None}
    if not of_group:
        if any(scheme is not None for of in schemes.values() for scheme in of):
            return StoredFormat(text=f"{recipe.text} in the minority of its matrices")
        return StoredFormat(text=f"{recipe.text}{IN_NO_LAYER}", weight_dtype=UNQUANTIZED_DTYPE)
    by_scheme: dict[Scheme, list[MatrixGroup]] = {}
    for group, one in of_group.items():
        by_scheme.setdefault(one, []).append(group)
    n = sum(map(len, schemes.values()))
    n_apart = n - sum(n_alike for _, n_alike in most.values())
    apart = f", but not in {n_apart:,} of {n:,} matrices" if n_apart else ""
    covered = {of: groups.intersection(modules) for of, (groups, _) in _GROUPS.items()}
    text = ", ".join(f"{scheme.text} in {_named(of)}" for scheme, of in by_scheme.items())
    experts = of_group.get(MatrixGroup.EXPERTS)
    scheme = experts or of_group.get(MatrixGroup.MLPS) or next(iter(by_scheme))
    equal, nearest = None, None
    if len(by_scheme) > 1:
        others = {one.dtype for group, one in of_group.items() if group != MatrixGroup.EXPERTS}
        parts = (*others, experts and experts.dtype)
        if of_group.keys() == modules.keys():
            equal = next((name for name, of in WITH_EXPERTS.items() if of == parts), None)
    elif (of := next((of for of in covered if covered[of] == of_group.keys()), None)) is not None:
        text = f"{scheme.text}{_GROUPS[of][1]}"
        equal = scheme.dtype and format_with(scheme.dtype, of)
    if equal is None:  # the nearest: the most matrices that a weight dtype can quantize of these
        dtype, groups = scheme.dtype or scheme.nearest, set(by_scheme[scheme])
        fitting = [of for of in covered if covered[of] and covered[of] <= groups]
        if dtype is not None and fitting:
            largest = max(fitting, key=lambda of: len(covered[of]))
            nearest = format_with(dtype, largest)
            of_group = dict.fromkeys(covered[largest], scheme)
    special = _own_formats(schemes, modules, of_group) if equal or nearest else {}
    return StoredFormat(text=f"{text}{apart}", weight_dtype=equal, nearest=nearest, special=special)


def _own_formats(
    schemes: Mapping[MatrixGroup, Sequence[Scheme | None]],
    modules: Modules,
    counted: Mapping[MatrixGroup, Scheme],
) -> Formats:
    """The formats of modules whose scheme is not what is `counted` in their group; unknown ones are left out."""
    special: dict[int, tuple[tuple[str, str], ...]] = {}
    for group, of_modules in schemes.items():
        for module, one in zip(modules[group], of_modules, strict=True):
            dtype = UNQUANTIZED_DTYPE if one is None else one.dtype or one.nearest
            if one != counted.get(group) and dtype is not None:
                _, layer, name = module.split(".", 2)
                dtype = dtype if activation_dtype_of(dtype) is None else wide_format(dtype)
                special[int(layer)] = (*special.get(int(layer), ()), (name, dtype))
    return special


def _named(groups: Iterable[MatrixGroup]) -> str:
    *first, last = groups
    return f"{', '.join(first)} and {last}" if first else last.value


def weight_dtype_of(model: Model, name: str) -> str:
    """The weight dtype of an option: `auto`, a dtype, or vLLM's name of a quantization, such as `gptq` if that is stored."""
    method = name.lower()
    stored = (model.stored_as or "") if model.stored_dtype is not None else ""
    is_stored = method in _READERS and method in {stored, stored.split(" ")[0].rstrip(",")}
    if method == "auto" or is_stored:
        return model.default_weight_dtype
    if method == "compressed-tensors":
        raise SpecError(
            f"--quantization {name}: the config of {model.name} states "
            f"{model.stored_as or 'no quantization'}. Give a config.json with this quantization, or name the "
            "dtype: int8, fp8 or int4."
        )
    return dtype_name(name, WEIGHT_DTYPES)
