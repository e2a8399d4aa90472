"""Which scheme a `quantization_config` gives to which modules, by the tool that wrote it.

Sources: transformers (utils/quantization_config.py), compressed-tensors (quantization/quant_args.py), ModelOpt
(export/quant_utils.py), GPTQModel (quantization/config.py), AutoRound, and vLLM (model_executor/layers/quantization).
Other tools have no reader: the nearest format is named for them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from meshscope.model.modules import ModulePatterns
from meshscope.model.quantization import (
    FP8_BLOCKS,
    FP8_W8A8,
    INT4_OF_GROUP,
    INT8_W8A8,
    MXFP4,
    NVFP4,
)

INT4_GROUP = 128  # the group of a config that names none
MXFP4_GROUP = 32
BLOCK = [128, 128]
NARROW_BITS = 8
WIDE_BITS = 16
EVERY_LINEAR = ("Linear", "nn.Linear")
_EXPERTS_CLASS = re.compile(r"[A-Z]\w*(Experts|MoE|MoeBlock)")
_NARROW = {"f8e4m3fn": FP8_W8A8, "s8": INT8_W8A8}
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Values and scales of some matrices, as the tool names them.

    `dtype` is the weight dtype with these values and scales, in all matrices of layers; None if there is none.
    `nearest` is then the one with the most similar bytes.
    """

    text: str
    dtype: str | None = None
    nearest: str | None = None


Rule = tuple[ModulePatterns, Scheme | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRecipe:
    """The scheme of each module: that of the first rule that selects it, else `scheme`; None is 16 bits."""

    text: str
    scheme: Scheme | None
    rules: tuple[Rule, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of this module."""
        return next((scheme for patterns, scheme in self.rules if module in patterns), self.scheme)


def recipe_of(config: Mapping[str, Any], expert_dtype: object = None) -> QuantizationRecipe:
    """What the `quantization_config` says; `expert_dtype` is a key of DeepSeek-V4 beside it."""
    method = _method(config)
    read = _READERS.get(method)
    if read is None:
        dict(config)  # keys of other tools count as read: only the nearest format is named
        bits = config.get("bits")
        nearest = _NEAREST.get(method) if bits is None else _nearest_int(bits)
        return QuantizationRecipe(text=method, scheme=Scheme(text=method, nearest=nearest))
    recipe = read(config)
    if expert_dtype == "fp4" and recipe.scheme is not None and recipe.scheme.dtype == FP8_BLOCKS:
        of_experts = (ModulePatterns(["experts"]), Scheme(text="mxfp4", dtype=MXFP4))
        return replace(recipe, rules=(*recipe.rules, of_experts))
    return recipe


def _method(config: Mapping[str, Any]) -> str:
    """The tool or method; ModelOpt wrote none at first, and MLX writes none."""
    named = config.get("quant_method")
    if named is None and "quant_algo" in config:
        return "modelopt"
    if named is None and "bits" in config:
        return "mlx"
    method = "an unnamed quantization" if named is None else str(named)
    is_mixed = method == "fp8" and isinstance(config.get("quantized_layers"), Mapping)
    return "modelopt" if is_mixed else _SAME_METHOD.get(method, method)


_SAME_METHOD = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
}


def _of(value: object) -> Mapping[str, Any]:
    """A part of the config, empty if it is not an object."""
    return value if isinstance(value, Mapping) else _EMPTY


def _keeping(scheme: Scheme, *lists: object) -> QuantizationRecipe:
    """The scheme in all modules but those of these lists."""
    rules = tuple((ModulePatterns(one), None) for one in lists)
    return QuantizationRecipe(text=scheme.text, scheme=scheme, rules=rules)


# Schemes by their numbers.


def _int4(text: str, group: object, *, is_channel: bool = False) -> Scheme:
    """Int4 with a scale for each group of inputs; -1 stands for a whole channel."""
    if is_channel or group in (-1, 0):
        return Scheme(text=f"{text} with a scale a channel", dtype=INT4_OF_GROUP[None])
    size = INT4_GROUP if group is None else group
    named = "" if size == INT4_GROUP else f" with scales of {size} inputs"
    sizes = [one for one in INT4_OF_GROUP if one is not None]
    near = min(sizes, key=lambda one: abs(one - size)) if isinstance(size, int) else INT4_GROUP
    is_equal = near == size
    dtype = INT4_OF_GROUP[near]
    return Scheme(
        text=f"{text}{named}",
        dtype=dtype if is_equal else None,
        nearest=None if is_equal else dtype,
    )


def _int(text: str, bits: object, group: object) -> Scheme:
    """Integers of this many bits; those of 8 bits count as if each channel had one scale."""
    if bits == 4:
        return _int4(text, group)
    if bits == NARROW_BITS:
        return Scheme(text=text, dtype="s8")
    return Scheme(text=text, nearest=_nearest_int(bits))


def _nearest_int(bits: object) -> str:
    """The smallest format that integers of this many bits fit in."""
    return "s8" if isinstance(bits, int) and bits > 4 else INT4_OF_GROUP[INT4_GROUP]


def _nvfp4(text: str) -> Scheme:
    """4-bit floats with an fp8 scale for 16 inputs."""
    return Scheme(text=text, dtype=NVFP4)


def _fp8_blocks(text: str, block: object) -> Scheme:
    rows = " x ".join(map(str, block)) if isinstance(block, list) else str(block)
    text = f"{text} with scales of {rows} blocks"
    return (
        Scheme(text=text, dtype=FP8_BLOCKS)
        if block == BLOCK
        else Scheme(text=text, nearest="f8e4m3fn")
    )


# Recipes by method.


def _fp8(config: Mapping[str, Any]) -> QuantizationRecipe:
    method, block = str(config["quant_method"]), config.get("weight_block_size")
    scheme = Scheme(text=method, dtype="f8e4m3fn") if block is None else _fp8_blocks(method, block)
    return _keeping(scheme, config.get("modules_to_not_convert"), config.get("ignored_layers"))


def _mxfp4(config: Mapping[str, Any]) -> QuantizationRecipe:
    """Experts only, whatever else the config leaves out (transformers, Mxfp4HfQuantizer)."""
    config.get("modules_to_not_convert")
    experts = (ModulePatterns(["experts"]), Scheme(text="mxfp4", dtype=MXFP4))
    return QuantizationRecipe(text="mxfp4", scheme=None, rules=(experts,))


def _awq(config: Mapping[str, Any]) -> QuantizationRecipe:
    bits = config.get("bits", config.get("w_bit"))
    text = "awq" if bits is None else f"awq of {bits} bits"
    group = config.get("group_size", config.get("q_group_size"))
    return _keeping(
        _int(text, 4 if bits is None else bits, group), config.get("modules_to_not_convert")
    )


def _gptq(config: Mapping[str, Any]) -> QuantizationRecipe:
    """`dynamic` leaves out modules (`-:`) or has other bits for them (`+:`), as GPTQModel writes it."""
    bits, group = config.get("bits"), config.get("group_size")

    def scheme(values: Mapping[str, Any]) -> Scheme:
        of, size = values.get("bits", bits), values.get("group_size", group)
        text = "gptq" if of is None else f"gptq of {of} bits"
        return _int(text, 4 if of is None else of, size)

    rules = [
        (
            ModulePatterns([f"re:{pattern.removeprefix('+:').removeprefix('-:')}"]),
            None if pattern.startswith("-:") else scheme(_of(values)),
        )
        for pattern, values in _of(config.get("dynamic")).items()
    ]
    inside = config.get("modules_in_block_to_quantize")
    lists = inside if isinstance(inside, list) else []
    named = [name for names in lists if isinstance(names, list) for name in names]
    default = scheme(_EMPTY)
    if named:
        rules.append((ModulePatterns(named), default))
    return QuantizationRecipe(
        text=default.text, scheme=None if named else default, rules=tuple(rules)
    )


def _bitsandbytes(config: Mapping[str, Any]) -> QuantizationRecipe:
    if config.get("load_in_8bit") is True:
        scheme = Scheme(text="bitsandbytes of 8 bits", dtype="s8")
    else:
        kind = config.get("bnb_4bit_quant_type", "4 bits")
        scheme = Scheme(text=f"bitsandbytes {kind}", nearest=INT4_OF_GROUP[64])
    return _keeping(scheme, config.get("llm_int8_skip_modules"))


def _compressed(config: Mapping[str, Any]) -> QuantizationRecipe:
    """Activations count if their scales are computed in each step; programs have no fixed ones."""
    return _of_groups("compressed-tensors", config, config.get("ignore"))


def _of_groups(method: str, config: Mapping[str, Any], kept: object) -> QuantizationRecipe:
    """One or more groups of modules, each with a scheme."""
    groups = [_of(group) for group in _of(config.get("config_groups")).values()]
    schemes = [_group_scheme(method, group) for group in groups]
    if not groups or all(scheme is None for scheme in schemes):
        return QuantizationRecipe(text=method, scheme=Scheme(text=method))
    rules: list[Rule] = [(ModulePatterns(kept), None)]
    default: Scheme | None = None
    for group, scheme in zip(groups, schemes, strict=True):
        targets = group.get("targets")
        if not isinstance(targets, list) or any(target in EVERY_LINEAR for target in targets):
            default = default or scheme
        else:
            rules.append((ModulePatterns([*_class_names(targets)]), scheme))
    return QuantizationRecipe(text=method, scheme=default, rules=tuple(rules))


def _class_names(targets: Iterable[Any]) -> Iterator[Any]:
    """The entries, with the modules of a class such as `Qwen3MoeExperts` or `FusedMoE`."""
    for target in targets:
        yield "experts" if _EXPERTS_CLASS.fullmatch(str(target)) else target


def _group_scheme(method: str, group: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a group of compressed-tensors; None if its weights have 16 bits."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return None
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits", 8)
    activations = group.get("input_activations")
    inputs = activations if isinstance(activations, Mapping) else {"num_bits": 16}
    wide = inputs.get("num_bits")
    text = f"{method} W{bits}A{wide} ({kind})"
    if bits == NARROW_BITS:
        is_narrow = wide == NARROW_BITS and inputs.get("dynamic") is True
        return _eight_bits(text, kind, weights, is_narrow=is_narrow)
    if bits != 4 or type(bits) is not int:
        return Scheme(text=text, nearest=_nearest_int(bits) if kind == "int" else None)
    size = weights.get("group_size")
    if kind == "int":
        return _int4(text, size, is_channel=weights.get("strategy") == "channel")
    return Scheme(text=text, dtype=MXFP4) if size == MXFP4_GROUP else _nvfp4(f"{text}, nvfp4")


def _eight_bits(text: str, kind: str, weights: Mapping[str, Any], *, is_narrow: bool) -> Scheme:
    """Weights of 8 bits with scales of blocks or channels; mxfp8 has one for 32 inputs."""
    dtype = "f8e4m3fn" if kind == "float" else "s8"
    if dtype == "f8e4m3fn" and weights.get("strategy") == "block":
        return _fp8_blocks(text, weights.get("block_structure"))
    if dtype == "f8e4m3fn" and weights.get("group_size") == MXFP4_GROUP:
        return Scheme(text=f"{text}, mxfp8", nearest=dtype)
    return Scheme(text=text, dtype=_NARROW[dtype] if is_narrow else dtype)


def _modelopt(config: Mapping[str, Any]) -> QuantizationRecipe:
    """`quant_algo` of all layers, or of each in `quantized_layers`."""
    of_layers = config.get("quantized_layers")
    kept = (config.get("exclude_modules"), config.get("ignore"))
    if isinstance(of_layers, Mapping):
        return _of_modelopt_layers(config, of_layers)
    algorithm = config.get("quant_algo")
    if algorithm in {None, "MIXED_PRECISION"} and isinstance(config.get("config_groups"), Mapping):
        return _of_groups("modelopt", config, config.get("ignore"))
    return _keeping(_modelopt_scheme(algorithm, config.get("group_size")), *kept)


def _of_modelopt_layers(
    config: Mapping[str, Any], of_layers: Mapping[str, Any]
) -> QuantizationRecipe:
    """A scheme for each named module; those of an fp8 checkpoint keep its blocks elsewhere."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, values in of_layers.items():
        scheme = _modelopt_scheme(_of(values).get("quant_algo"), _of(values).get("group_size"))
        by_scheme.setdefault(scheme, []).append(name)
    rules = tuple((ModulePatterns(names), scheme) for scheme, names in by_scheme.items())
    is_fp8 = config.get("quant_method") == "fp8"
    default = _fp8(config).scheme if is_fp8 else None
    return QuantizationRecipe(text="modelopt MIXED_PRECISION", scheme=default, rules=rules)


_MODELOPT = {
    "FP8": "f8e4m3fn",
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_W8A8,
    **dict.fromkeys(("FP8_PB_WO", "FP8_PB_REAL"), FP8_BLOCKS),
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": INT8_W8A8,
    **dict.fromkeys(("W8A16", "W8A8_SQ_PER_CHANNEL"), "s8"),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8", "W4A16_MXFP4"), MXFP4),
}


def _modelopt_scheme(algorithm: object, group: object) -> Scheme:
    text = "modelopt" if algorithm is None else f"modelopt {algorithm}"
    name = str(algorithm)
    if name in {"W4A16", "W4A16_AWQ", "W4A8_AWQ"}:
        return _int4(text, group)
    if "NVFP4" in name:
        return _nvfp4(text)
    return Scheme(
        text=text, dtype=_MODELOPT.get(name), nearest="f8e4m3fn" if name == "MXFP8" else None
    )


def _auto_round(config: Mapping[str, Any]) -> QuantizationRecipe:
    """`extra_config` has other bits for modules by name or regular expression."""

    def scheme(values: Mapping[str, Any]) -> Scheme | None:
        bits = values.get("bits", config.get("bits", 4))
        group, kind = (
            values.get(key, config.get(key, "int" if key == "data_type" else None))
            for key in ("group_size", "data_type")
        )
        if isinstance(bits, int) and bits >= WIDE_BITS:
            return None
        text = f"auto-round of {bits} bits"
        if not str(kind).startswith("int"):
            return _float_scheme(f"{text} ({kind})", str(kind), bits)
        return _int(text, bits, group)

    rules = tuple(
        (ModulePatterns([name if "*" not in name else f"re:{name}"]), scheme(_of(values)))
        for name, values in _of(config.get("extra_config")).items()
    )
    default = scheme(_EMPTY)
    text = "auto-round" if default is None else default.text
    return QuantizationRecipe(text=text, scheme=default, rules=rules)


def _float_scheme(text: str, kind: str, bits: object) -> Scheme:
    """Floats of AutoRound: `mx_fp`, `nv_fp` and `fp`."""
    if bits == 4:
        return Scheme(text=text, dtype=MXFP4) if kind.startswith("mx_fp") else _nvfp4(text)
    if kind.startswith("mx"):
        return Scheme(text=text, nearest="f8e4m3fn")
    return Scheme(text=text, dtype="f8e4m3fn")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationRecipe]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8"), _fp8),
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
}
METHODS = frozenset(_READERS)
# Tools without a reader, with the format that is nearest to what they usually write.
_NEAREST = {
    **dict.fromkeys(("hqq", "quanto"), INT4_OF_GROUP[64]),
    **dict.fromkeys(("quark", "fp_quant"), MXFP4),
    "torchao": INT4_OF_GROUP[INT4_GROUP],
    "eetq": "s8",
}


def stored_cache(config: Mapping[str, Any]) -> str | None:
    """The dtype of the KV cache for which the checkpoint has scales, as options name it; None without."""
    scheme = config.get("kv_cache_scheme", config.get("kv_cache_quant_algo"))
    if isinstance(scheme, str):
        return {"FP8": "fp8", "INT8": "int8"}.get(scheme)
    bits = _of(scheme).get("num_bits")
    if bits != NARROW_BITS:
        return None
    return "fp8" if _of(scheme).get("type") == "float" else "int8"
