"""How a checkpoint stores its weights, read from `quantization_config` and `dtype` of its config.

A reader of `_READERS` turns the config of a tool into the scheme of each module. Sources: transformers
(utils/quantization_config.py), compressed-tensors (quantization/quant_args.py), ModelOpt (export/quant_utils.py),
GPTQModel (quantization/config.py), AutoRound, and vLLM (model_executor/layers/quantization). Other tools have
no reader: the nearest format is named for them.
"""

import fnmatch
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from math import ceil
from pathlib import Path

from meshscope.errors import SpecError
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer
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
    format_with,
)
from meshscope.model.reader import Config, ConfigReader, NestedConfig
from meshscope.units import DTYPE_ALIASES, dtype_name

INT4_GROUP = 128  # the group of a config that names none
MXFP4_GROUP = 32
BLOCK, BLOCK_32 = [128, 128], [32, 32]
WIDE_BITS = 16
MAX_BITS = 32
PLAIN_DTYPES = ("bfloat16", "float16", "float32")
FP8 = "f8e4m3fn"


class MatrixGroup(StrEnum):
    """Matrices that recipes quantize or leave out together."""

    ATTENTION = "attention"
    LINEAR = "linear attention"
    MLPS = "the MLPs"  # dense layers and shared experts
    EXPERTS = "the experts"  # routed ones


Modules = Mapping[MatrixGroup, tuple[str, ...]]
_TABLES = tomllib.loads(Path(__file__).with_name("stored_formats.toml").read_text(encoding="utf-8"))


def module_names(family: Family, layers: Sequence[Layer]) -> Modules:
    """The modules of each group with matrices, from `layers` on, with the first expert for all of a layer."""
    row = family.traits

    def of(tensors: Mapping[str, str]) -> list[str]:
        return [name.removesuffix(".weight").format(expert=0) for name in tensors.values()]

    inputs = ("in_proj_qkvz",) if row.is_fused else ("in_proj_qkv", "in_proj_z")
    linear = [f"linear_attn.{name}" for name in (*inputs, "out_proj")]
    attention, dense = _TABLES["attention"][row.mechanism], of(row.tensors("mlp"))
    if row.is_fused_mlp:
        attention = ["self_attn.qkv_proj", "self_attn.o_proj"]
        dense = ["mlp.gate_up_proj", "mlp.down_proj"]
    shared = of(row.tensors("shared")) if row.has_shared_experts else []
    fused = row.fused_experts
    experts = [fused.base.rstrip(".")] if fused else of(row.tensors("expert"))
    modules: dict[MatrixGroup, list[str]] = {}
    for index, layer in enumerate(layers):
        is_linear = layer.attention is AttentionKind.LINEAR
        group = MatrixGroup.LINEAR if is_linear else MatrixGroup.ATTENTION
        mlps = dense * layer.has_mlp + shared * layer.has_experts
        of_layer = {group: linear if is_linear else attention, MatrixGroup.MLPS: mlps}
        of_layer[MatrixGroup.EXPERTS] = experts * layer.has_experts
        for of_group, short in of_layer.items():
            modules.setdefault(of_group, []).extend(f"layers.{index}.{name}" for name in short)
    return {group: tuple(names) for group, names in modules.items() if names}


# Starts of names before `layers`, in checkpoints of text models and of models with a text part.
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|text_model)\.)+(?=layers\.)")
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

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of this module."""
        return next((scheme for patterns, scheme in self.rules if module in patterns), self.scheme)


def _of(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _keeping(scheme: Scheme | None, *lists: object, text: str = "") -> QuantizationRecipe:
    rules = tuple((ModulePatterns(one), None) for one in lists)
    return QuantizationRecipe(text=scheme.text if scheme else text, scheme=scheme, rules=rules)


def _int(text: str, bits: object, group: object, *, is_channel: bool = False) -> Scheme:
    """Integers of this many bits, 4 if the tool names none, with a scale for each group of inputs; -1 is a channel.

    8-bit integers count as if each channel had one scale.
    """
    if bits not in (4, None):
        return Scheme(text=text, dtype="s8") if bits == 8 else _wide(text, bits)
    if is_channel or group in (-1, 0):
        return Scheme(text=f"{text} with a scale a channel", dtype=INT4_OF_GROUP[None])
    size = INT4_GROUP if group is None else group
    named = text if size == INT4_GROUP else f"{text} with scales of {size} inputs"
    if isinstance(size, int) and size in INT4_OF_GROUP:
        return Scheme(text=named, dtype=INT4_OF_GROUP[size])
    sizes = [one for one in INT4_OF_GROUP if one is not None]
    near = min(sizes, key=lambda one: abs(one - size)) if isinstance(size, int) else INT4_GROUP
    return Scheme(text=named, nearest=INT4_OF_GROUP[near])


def _wide(text: str, bits: object) -> Scheme:
    if isinstance(bits, int) and bits > 8:
        return Scheme(text=text)
    is_wide = isinstance(bits, int) and bits > 4
    return Scheme(text=text, nearest="s8" if is_wide else INT4_OF_GROUP[INT4_GROUP])


def _fp8_blocks(text: str, block: object, scales: object = None) -> Scheme:
    rows = " x ".join(map(str, block)) if isinstance(block, list) else str(block)
    text = f"{text} with scales of {rows} blocks"
    if block == BLOCK_32 and scales == "ue8m0":
        return Scheme(text=text, dtype=FP8_BLOCKS_32)
    return Scheme(text=text, dtype=FP8_BLOCKS) if block == BLOCK else Scheme(text=text, nearest=FP8)


def _fp8(config: Config) -> QuantizationRecipe:
    method, block = str(config["quant_method"]), config.get("weight_block_size")
    of_blocks = _fp8_blocks(method, block, config.get("scale_fmt"))
    scheme = Scheme(text=method, dtype=FP8) if block is None else of_blocks
    return _keeping(scheme, config.get("modules_to_not_convert"), config.get("ignored_layers"))


def _mxfp4(config: Config) -> QuantizationRecipe:
    """Experts only, whatever else the config leaves out (transformers, Mxfp4HfQuantizer)."""
    config.get("modules_to_not_convert")
    return QuantizationRecipe(text="mxfp4", scheme=None, rules=(_MXFP4_EXPERTS,))


_MXFP4_EXPERTS = (ModulePatterns(["experts"]), Scheme(text="mxfp4", dtype=MXFP4))


def _awq(config: Config) -> QuantizationRecipe:
    bits = config.get("bits", config.get("w_bit"))
    text = "awq" if bits is None else f"awq of {bits} bits"
    scheme = _int(text, bits, config.get("group_size", config.get("q_group_size")))
    return _keeping(scheme, config.get("modules_to_not_convert"))


def _gptq(config: Config) -> QuantizationRecipe:
    """`dynamic` leaves out modules (`-:`) or has other bits for them (`+:`), as GPTQModel writes it."""

    def scheme(values: Config) -> Scheme:
        bits, size = (values.get(key, config.get(key)) for key in ("bits", "group_size"))
        return _int("gptq" if bits is None else f"gptq of {bits} bits", bits, size)

    rules: list[Rule] = [
        (
            ModulePatterns([f"re:{pattern.removeprefix('+:').removeprefix('-:')}"]),
            None if pattern.startswith("-:") else scheme(_of(values)),
        )
        for pattern, values in _of(config.get("dynamic")).items()
    ]
    inside, default = config.get("modules_in_block_to_quantize"), scheme({})
    lists = inside if isinstance(inside, list) else []
    named = [name for names in lists if isinstance(names, list) for name in names]
    rules += [(ModulePatterns(named), default)] * bool(named)
    scheme_elsewhere = None if named else default
    return QuantizationRecipe(text=default.text, scheme=scheme_elsewhere, rules=tuple(rules))


def _bitsandbytes(config: Config) -> QuantizationRecipe:
    if config.get("load_in_8bit") is True:
        scheme = Scheme(text="bitsandbytes of 8 bits", dtype="s8")
    else:
        kind = config.get("bnb_4bit_quant_type", "4 bits")
        scheme = Scheme(text=f"bitsandbytes {kind}", nearest=INT4_OF_GROUP[64])
    return _keeping(scheme, config.get("llm_int8_skip_modules"))


_EXPERTS_CLASS = re.compile(r"[A-Z]\w*(Experts|MoE|MoeBlock)")  # such as Qwen3MoeExperts, FusedMoE


def _of_groups(config: Config, method: str = "compressed-tensors") -> QuantizationRecipe:
    kept, groups = config.get("ignore"), map(_of, _of(config.get("config_groups")).values())
    schemes = [(group, _group_scheme(method, group)) for group in groups]
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
    """The scheme of a group of compressed-tensors; None if its weights have 16 bits.

    Activations count if their scales are computed in each step; programs have no fixed ones.
    """
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return None
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits", 8)
    inputs = inputs if isinstance(inputs, Mapping) else {"num_bits": WIDE_BITS}
    text = f"{method} W{bits}A{inputs.get('num_bits')} ({kind})"
    if bits == 8:
        return _eight_bits(text, weights, inputs)
    if bits != 4 or type(bits) is not int:
        return _wide(text, bits) if kind == "int" else Scheme(text=text)
    if kind == "int":
        is_channel = weights.get("strategy") == "channel"
        return _int(text, bits, weights.get("group_size"), is_channel=is_channel)
    if weights.get("group_size") == MXFP4_GROUP:
        return Scheme(text=text, dtype=MXFP4)
    return Scheme(text=f"{text}, nvfp4", dtype=NVFP4)


def _eight_bits(text: str, weights: Config, inputs: Config) -> Scheme:
    is_float = weights.get("type", "int") == "float"
    if is_float and weights.get("strategy") == "block":
        return _fp8_blocks(text, weights.get("block_structure"))
    if is_float and weights.get("group_size") == MXFP4_GROUP:
        return Scheme(text=f"{text}, mxfp8", nearest=FP8)
    if inputs.get("num_bits") == 8 and inputs.get("dynamic") is True:
        return Scheme(text=text, dtype=FP8_W8A8 if is_float else INT8_W8A8)
    return Scheme(text=text, dtype=FP8 if is_float else "s8")


def _modelopt(config: Config) -> QuantizationRecipe:
    """`quant_algo` of all layers, or of each in `quantized_layers`; an fp8 checkpoint keeps its blocks elsewhere."""
    of_layers, algorithm = config.get("quantized_layers"), config.get("quant_algo")
    kept = (config.get("exclude_modules"), config.get("ignore"))
    if isinstance(of_layers, Mapping):
        by_scheme: dict[Scheme, list[str]] = {}
        for name, values in of_layers.items():
            by_scheme.setdefault(_modelopt_scheme(_of(values)), []).append(name)
        default = _fp8(config).scheme if config.get("quant_method") == "fp8" else None
        rules = tuple((ModulePatterns(names), scheme) for scheme, names in by_scheme.items())
        return QuantizationRecipe(text="modelopt MIXED_PRECISION", scheme=default, rules=rules)
    if algorithm in {None, "MIXED_PRECISION"} and isinstance(config.get("config_groups"), Mapping):
        return _of_groups(config, "modelopt")
    return _keeping(_modelopt_scheme(config), *kept)


def _modelopt_scheme(values: Config) -> Scheme:
    algorithm, group = values.get("quant_algo"), values.get("group_size")
    text, name = "modelopt" if algorithm is None else f"modelopt {algorithm}", str(algorithm)
    if name in {"W4A16", "W4A16_AWQ", "W4A8_AWQ"}:
        return _int(text, 4, group)
    dtype = NVFP4 if "NVFP4" in name else _TABLES["modelopt"].get(name)
    return Scheme(text=text, dtype=dtype, nearest=FP8 if name == "MXFP8" else None)


def _auto_round(config: Config) -> QuantizationRecipe:
    """`extra_config` has other bits for modules by name or regular expression; floats are `mx_fp`, `nv_fp` and `fp`."""

    def scheme(values: Config) -> Scheme | None:
        defaults = {"bits": 4, "group_size": None, "data_type": "int"}
        bits, group, kind = (values.get(k, config.get(k, one)) for k, one in defaults.items())
        if isinstance(bits, int) and bits >= WIDE_BITS:
            return None
        text, kind = f"auto-round of {bits} bits", str(kind)
        if kind.startswith("int"):
            return _int(text, bits, group)
        text, is_mx = f"{text} ({kind})", kind.startswith("mx")
        if bits == 4:
            return Scheme(text=text, dtype=MXFP4 if kind.startswith("mx_fp") else NVFP4)
        return Scheme(text=text, dtype=None if is_mx else FP8, nearest=FP8 if is_mx else None)

    rules = tuple(
        (ModulePatterns([name if "*" not in name else f"re:{name}"]), scheme(_of(values)))
        for name, values in _of(config.get("extra_config")).items()
    )
    return replace(_keeping(scheme({}), text="auto-round"), rules=rules)


_READERS: Mapping[str, Callable[[Config], QuantizationRecipe]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8"), _fp8),
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _of_groups,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
}
_BITS_KEY = re.compile(r"(n|num_|w_?|weight_)?bits?")
_BITS_WORD = re.compile(r"(int|float|fp|nf)([2-8])(?!\d)", re.IGNORECASE)  # int8wo, qint4, fp8_e4m3


def _named_bits(values: object, key: str = "") -> Iterator[tuple[float, bool | None]]:
    """Bits that a tool names, and whether of floats, if it says so; the fewest are those of its weights."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _named_bits(value, name)
    elif isinstance(values, list):
        for value in values:
            yield from _named_bits(value, key)
    elif isinstance(values, int | float) and _BITS_KEY.fullmatch(key):
        yield values, None
    elif isinstance(values, str):
        yield from (
            (int(n), kind.lower() in {"float", "fp"}) for kind, n in _BITS_WORD.findall(values)
        )


def _negative_groups(values: object, key: str = "") -> Iterator[float]:
    """Sizes of groups that are below -1, which tools write for a whole channel."""
    if isinstance(values, Mapping | list):
        pairs = values.items() if isinstance(values, Mapping) else ((key, one) for one in values)
        for name, value in pairs:
            yield from _negative_groups(value, str(name))
    elif isinstance(values, int | float) and key.endswith(("group_size", "block_size")):
        yield from (values for _ in range(values < -1))


def recipe_of(config: Config, expert_dtype: object = None) -> QuantizationRecipe:
    """What the `quantization_config` says (ModelOpt wrote no method at first, MLX writes none) and DeepSeek-V4's `expert_dtype`."""
    method = config.get("quant_method")
    if method is None:
        known = {"quant_algo": "modelopt", "bits": "mlx"}
        method = next((known[key] for key in known if key in config), "an unnamed quantization")
    method = _TABLES["same_method"].get(str(method), str(method))
    if method == "fp8" and isinstance(config.get("quantized_layers"), Mapping):
        method = "modelopt"
    read = _READERS.get(method)
    if read is None:
        # This reads all keys: only the nearest format is named.
        named = {(ceil(n), is_float) for n, is_float in _named_bits(config) if n < WIDE_BITS}
        bits, usual = min((n for n, _ in named), default=None), _TABLES["nearest"].get(method)
        is_usual = bits is None or (bits == 4 and usual in {MXFP4, *INT4_OF_GROUP.values()})
        scheme = Scheme(text=method, nearest=usual) if is_usual else _wide(method, bits)
        if bits == 8 and (8, True) in named and (8, False) not in named:
            scheme = Scheme(text=method, nearest=FP8)
        return QuantizationRecipe(text=method, scheme=scheme)
    recipe = read(config)
    is_fp8 = recipe.scheme is not None and recipe.scheme.dtype in {FP8_BLOCKS, FP8_BLOCKS_32}
    if is_fp8 and config.get("expert_dtype", expert_dtype) == "fp4":
        return replace(recipe, rules=(*recipe.rules, _MXFP4_EXPERTS))
    return recipe


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format as the config states it, and the weight dtype that counts its bytes."""

    text: str
    weight_dtype: str | None = None  # None if no weight dtype is its equal
    nearest: str | None = None  # then the one that comes nearest, if any
    cache: str | None = None  # of the KV cache for which the checkpoint has scales


def stored_format(reader: ConfigReader, modules: Modules) -> StoredFormat | None:
    """The format of the checkpoint of a model with these modules; None if the config does not state it."""
    config = reader.config
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key)
        if quantization is not None and not isinstance(quantization, Mapping):
            raise SpecError(
                f"{reader.source}: '{key}' must be an object with a quant_method, got {quantization!r}. Correct the config, or remove it "
                "and name --weight-dtype."
            )
        if quantization is not None:
            wrong = next((n for n, _ in _named_bits(quantization) if not 0 < n <= MAX_BITS), None)
            if wrong is not None:
                raise SpecError(
                    f"{reader.source}: '{key}' names weights of {wrong} bits. Bits are from 1 to {MAX_BITS}: correct the "
                    "config, or remove the object and name --weight-dtype."
                )
            if (size := next(_negative_groups(quantization), None)) is not None:
                raise SpecError(
                    f"{reader.source}: '{key}' names groups of {size} weights. A group has at least 1, and -1 is a whole "
                    "channel: correct the config, or remove the object and name --weight-dtype."
                )
            quantization = NestedConfig(quantization, key, reader.used)
            recipe = recipe_of(quantization, config.get("expert_dtype"))
            return replace(_quantized(recipe, modules), cache=_stored_cache(quantization))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return None
    if dtype in PLAIN_DTYPES:
        return StoredFormat(text=dtype, weight_dtype=DTYPE_ALIASES[dtype])
    bits = re.search(r"\d+", dtype)
    wide = UNQUANTIZED_DTYPE if bits is None or int(bits[0]) <= WIDE_BITS else "f32"
    alias = DTYPE_ALIASES.get(dtype, wide)
    return StoredFormat(text=dtype, nearest=alias if alias in WEIGHT_DTYPES else wide)


def _stored_cache(config: Config) -> str | None:
    scheme = config.get("kv_cache_scheme", config.get("kv_cache_quant_algo"))
    if isinstance(scheme, str):
        return {"FP8": "fp8", "INT8": "int8"}.get(scheme)
    if _of(scheme).get("num_bits") != 8:
        return None
    return "fp8" if _of(scheme).get("type") == "float" else "int8"


def _quantized(recipe: QuantizationRecipe, modules: Modules) -> StoredFormat:
    """The format of a recipe: one scheme in some groups of matrices, or several.

    A group has the scheme of most of its modules. Among pairs, fp8 with experts in mxfp4 or nvfp4 has an equal.
    """
    by_scheme: dict[Scheme, list[MatrixGroup]] = {}
    for group in filter(modules.__contains__, MatrixGroup):
        scheme = Counter(map(recipe.scheme_of, modules[group])).most_common(1)[0][0]
        if scheme is not None:
            by_scheme.setdefault(scheme, []).append(group)
    of_group = {group: scheme for scheme, groups in by_scheme.items() for group in groups}
    if not by_scheme:
        return StoredFormat(text=f"{recipe.text}{IN_NO_LAYER}", weight_dtype=UNQUANTIZED_DTYPE)
    covered = {of: groups.intersection(modules) for of, (groups, _) in _GROUPS.items()}
    text = ", ".join(f"{scheme.text} in {_named(of)}" for scheme, of in by_scheme.items())
    experts = of_group.get(MatrixGroup.EXPERTS)
    scheme = experts or of_group.get(MatrixGroup.MLPS) or next(iter(by_scheme))
    if len(by_scheme) > 1:
        others = {one.dtype for group, one in of_group.items() if group != MatrixGroup.EXPERTS}
        parts = (*others, experts and experts.dtype)
        equal = next((name for name, of in WITH_EXPERTS.items() if of == parts), None)
        if equal is not None and of_group.keys() == modules.keys():
            return StoredFormat(text=text, weight_dtype=equal)
    elif (of := next((of for of in covered if covered[of] == of_group.keys()), None)) is not None:
        text = f"{scheme.text}{_GROUPS[of][1]}"
        if scheme.dtype is not None:
            return StoredFormat(text=text, weight_dtype=format_with(scheme.dtype, of))
    # The nearest: the most matrices that a weight dtype can quantize of these.
    dtype, groups = scheme.dtype or scheme.nearest, set(by_scheme[scheme])
    fitting = [of for of in covered if covered[of] and covered[of] <= groups]
    most = max(fitting, key=lambda of: len(covered[of]), default=None)
    nearest = None if dtype is None or most is None else format_with(dtype, most)
    return StoredFormat(text=text, nearest=nearest)


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
