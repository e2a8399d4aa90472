"""How a checkpoint stores its weights, read from `quantization_config` and `dtype` of its config.

Sources: the quantization configs of transformers (utils/quantization_config.py) and the schemes of
compressed-tensors (quantization/quant_args.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.errors import SpecError
from meshscope.spec.model.model import Model
from meshscope.spec.quantization import (
    FP8_BLOCKS,
    FP8_EXPERTS,
    FP8_MLPS,
    FP8_MXFP4,
    FP8_W8A8,
    INT4_EXPERTS,
    INT4_OF_GROUP,
    INT8_EXPERTS,
    INT8_W8A8,
    MXFP4,
    MXFP4_EXPERTS,
)
from meshscope.units import DTYPE_ALIASES, dtype_name

BLOCK = [128, 128]
_LAYER = re.compile(r"layers[.\\]+(\d+)")
_DIGIT = re.compile(r"\d")
PLAIN_DTYPES = ("bfloat16", "float16", "float32")
METHODS = frozenset({"fp8", "fbgemm_fp8", "mxfp4", "awq", "gptq", "compressed-tensors", "modelopt"})
_OF_BITS = {("float", 8): "f8e4m3fn", ("int", 8): "s8", ("int", 4): "s4"}
_FOUR_BIT_FLOAT, MXFP4_GROUP = ("float", 4), 32  # nvfp4 has groups of 16
NARROW_BITS = 8
INT4, INT4_GROUP = "s4", 128  # the group of a config that names none
_NARROW = {("float", 8): FP8_W8A8, ("int", 8): INT8_W8A8}  # with activations of 8 bits
_IN_EXPERTS = {
    **INT4_EXPERTS,
    MXFP4: MXFP4_EXPERTS,
    **dict.fromkeys(("s8", INT8_W8A8), INT8_EXPERTS),
    **dict.fromkeys(("f8e4m3fn", FP8_W8A8), FP8_EXPERTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format as the config states it, and the weight dtype that counts its bytes.

    `weight_dtype` is None if no weight dtype is its equal.
    """

    text: str
    weight_dtype: str | None = None


def stored_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """The format of the checkpoint; None if the config does not state it."""
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key)
        if isinstance(quantization, Mapping):
            return _quantized(quantization, config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return None
    return StoredFormat(
        text=dtype, weight_dtype=DTYPE_ALIASES[dtype] if dtype in PLAIN_DTYPES else None
    )


def _quantized(config: Mapping[str, Any], of_model: Mapping[str, Any]) -> StoredFormat:
    method = str(config.get("quant_method", "an unnamed quantization"))
    text, dtype = method, None
    method = "modelopt" if method.startswith("an ") and "quant_algo" in config else method
    match method:
        case "fp8" | "fbgemm_fp8":
            return _fp8(method, config, of_model)
        case "compressed-tensors":
            return _compressed(config)
        case "mxfp4":
            text, dtype = "mxfp4 in the experts", MXFP4_EXPERTS
        case "awq" | "gptq":
            bits = config.get("bits", config.get("w_bit"))
            text = method if bits is None else f"{method} of {bits} bits"
            dtype = _OF_BITS.get(("int", 4 if bits is None else bits))
            if dtype == INT4:
                return _int4(text, config.get("group_size", config.get("q_group_size")))
        case "bitsandbytes" if config.get("load_in_8bit") is True:
            text, dtype = "bitsandbytes of 8 bits", "s8"
        case "modelopt" if config.get("quant_algo") == "FP8":
            text, dtype = "modelopt of fp8", "f8e4m3fn"
        case "modelopt" if isinstance(config.get("quant_algo"), str):
            text = f"modelopt {config['quant_algo']}"
        case _:
            pass
    return StoredFormat(text=text, weight_dtype=dtype)


def _fp8(method: str, config: Mapping[str, Any], of_model: Mapping[str, Any]) -> StoredFormat:
    block = config.get("weight_block_size")
    if block is None:
        kept, n_layers = config.get("modules_to_not_convert"), of_model.get("num_hidden_layers")
        if _leaves_attention(kept, n_layers):
            return StoredFormat(text=f"{method} in the MLPs", weight_dtype=FP8_MLPS)
        return StoredFormat(text=method, weight_dtype="f8e4m3fn")
    rows = " x ".join(map(str, block)) if isinstance(block, list) else str(block)
    dtype = FP8_BLOCKS if block == BLOCK else None
    text = f"{method} with scales of {rows} blocks"
    if of_model.get("expert_dtype") == "fp4" and dtype is not None:  # DeepSeek-V4
        return StoredFormat(text=f"{text} and mxfp4 in the experts", weight_dtype=FP8_MXFP4)
    return StoredFormat(text=text, weight_dtype=dtype)


def _compressed(config: Mapping[str, Any]) -> StoredFormat:
    """The format of the first group of layers; groups of one checkpoint rarely differ.

    Activations count if their scales are computed in each step; programs have no fixed ones.
    """
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    group = first if isinstance(first, Mapping) else {}
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return StoredFormat(text="compressed-tensors")
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits", 8)
    activations = group.get("input_activations")
    activations = activations if isinstance(activations, Mapping) else {"num_bits": 16}
    wide = activations.get("num_bits")
    text = f"compressed-tensors W{bits}A{wide} ({kind})"
    if (kind, bits) == ("float", 8) and weights.get("strategy") == "block":
        dtype = FP8_BLOCKS if weights.get("block_structure") == BLOCK else None
    elif (kind, bits) == _FOUR_BIT_FLOAT:
        dtype = MXFP4 if weights.get("group_size") == MXFP4_GROUP else None
    elif type(bits) is not int:
        dtype = None
    else:
        is_narrow = wide == NARROW_BITS and activations.get("dynamic") is True
        dtypes = _OF_BITS | _NARROW if is_narrow else _OF_BITS
        dtype = dtypes.get((kind, bits))
        if dtype == INT4:
            is_channel = weights.get("strategy") == "channel"
            stored = _int4(
                text, None if is_channel else weights.get("group_size"), is_channel=is_channel
            )
            return _in_experts(stored) if _leaves_experts(config.get("ignore")) else stored
    stored = StoredFormat(text=text, weight_dtype=dtype)
    return _in_experts(stored) if _leaves_experts(config.get("ignore")) else stored


def _leaves_attention(kept: object, n_layers: object) -> bool:
    """Whether attention is left out in all layers: by its name alone, or in each layer's own name."""
    entries = kept if isinstance(kept, list) else []
    names = [entry for entry in entries if isinstance(entry, str) and "self_attn" in entry]
    layers = {match[1] for name in names if (match := _LAYER.search(name))}
    is_of_all = any(_DIGIT.search(name) is None for name in names)
    return is_of_all or (isinstance(n_layers, int) and len(layers) == n_layers > 0)


def _leaves_experts(ignored: object) -> bool:
    """Whether patterns for all layers leave out attention and shared experts, as in Kimi K2.5.

    Names of single layers count for nothing. The first layers' MLPs are left out, too, where this holds.
    """
    entries = ignored if isinstance(ignored, list) else []
    patterns = [
        entry
        for entry in entries
        if isinstance(entry, str) and entry.startswith("re:") and not _DIGIT.search(entry)
    ]
    return all(any(name in entry for entry in patterns) for name in ("self_attn", "shared_expert"))


def _in_experts(stored: StoredFormat) -> StoredFormat:
    """The same format, only in the experts; activations of 8 bits have no such format."""
    dtype = None if stored.weight_dtype is None else _IN_EXPERTS.get(stored.weight_dtype)
    return StoredFormat(text=f"{stored.text} in the experts", weight_dtype=dtype)


def _int4(text: str, group: object, *, is_channel: bool = False) -> StoredFormat:
    """Int4 with a scale for each group of inputs; -1 stands for a whole channel."""
    if is_channel or group == -1:
        return StoredFormat(text=f"{text} with a scale a channel", weight_dtype=INT4_OF_GROUP[None])
    size = INT4_GROUP if group is None else group
    dtype = INT4_OF_GROUP.get(size) if isinstance(size, int) else None
    named = "" if size == INT4_GROUP else f" with scales of {size} inputs"
    return StoredFormat(text=f"{text}{named}", weight_dtype=dtype)


def weight_dtype_of(model: Model, name: str) -> str:
    """The weight dtype of an option's value: `auto`, a dtype, or vLLM's name of a quantization.

    A method such as `fp8`, `mxfp4` or `gptq` is the checkpoint's own format if that is what it stores.
    """
    method = name.lower()
    if method == "auto":
        return model.default_weight_dtype
    stored = None if model.stored_dtype is None else model.stored_as
    if stored is not None and method in METHODS and method in {stored, stored.split()[0]}:
        return model.default_weight_dtype
    if method == "compressed-tensors":
        raise SpecError(
            f"--quantization {name}: the config of {model.name} states "
            f"{model.stored_as or 'no quantization'}. Give a config.json with this quantization, or name the "
            "dtype: int8, fp8 or int4."
        )
    return dtype_name(name)
