"""How 8-bit and 4-bit weights are stored and multiplied: scales, and what stays in bfloat16."""

from dataclasses import dataclass, replace
from enum import StrEnum

from meshscope.files import own_table
from meshscope.serialize import from_plain

FP8_BLOCKS = "f8e4m3fn_block128"
FP8_BLOCKS_32 = "f8e4m3fn_block32"
MXFP4 = "f4e2m1fn"  # in all matrices of layers
NVFP4 = "f4e2m1fn_group16"  # in all matrices of layers
FP8_MXFP4 = "f8e4m3fn_block128_f4e2m1fn_experts"  # DeepSeek-V4: experts in mxfp4, the rest in fp8
FP8_NVFP4 = "f8e4m3fn_block128_f4e2m1fn_group16_experts"  # DeepSeek-V4-NVFP4
FP8_32_MXFP4 = "f8e4m3fn_block32_f4e2m1fn_experts"  # DeepSeek-V4.1
# Formats whose experts have another one.
WITH_EXPERTS = {
    FP8_MXFP4: (FP8_BLOCKS, MXFP4),
    FP8_NVFP4: (FP8_BLOCKS, NVFP4),
    FP8_32_MXFP4: (FP8_BLOCKS_32, MXFP4),
}
INT8_W8A8 = "s8_w8a8"  # weights and activations in int8
FP8_W8A8 = "f8e4m3fn_w8a8"
# Int4 by the number of inputs that share a scale; None for all of a channel.
INT4_OF_GROUP: dict[int | None, str] = {
    128: "s4",
    64: "s4_group64",
    32: "s4_group32",
    None: "s4_channel",
}
UNQUANTIZED_DTYPE = "bf16"  # norms, biases and routers of quantized checkpoints


class Coverage(StrEnum):
    """The matrices that a format quantizes; the others stay in bfloat16. Names of formats end in it."""

    ALL = "all"
    LAYERS = "layers"  # without embedding and head
    NOT_LINEAR = "not_linear"  # in layers, without linear attention
    MLPS = "mlps"  # of MLPs and routed experts
    EXPERTS = "experts"  # of routed experts


PARTIAL_COVERAGES = (Coverage.NOT_LINEAR, Coverage.MLPS, Coverage.EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Scales of a quantized matrix: one per output channel, or per `block` inputs of a channel."""

    scale_dtype: str
    block: int | None = None
    has_square_blocks: bool = False  # a scale covers `block` inputs and `block` outputs
    coverage: Coverage = Coverage.ALL
    experts: "Quantization | None" = None  # format of experts, if another
    values_dtype: str | None = None  # if the format is not itself XLA's name of a dtype
    codes_dtype: str | None = None  # of arrays with the bits of values for which chips have no type
    activation_dtype: str | None = None  # activations with a scale for each token

    @property
    def has_groups(self) -> bool:
        """Whether groups of inputs share a scale, for each output."""
        return self.block is not None and not self.has_square_blocks

    @property
    def square_block(self) -> int | None:
        """The inputs and outputs that share a scale; None for other scales."""
        return self.block if self.has_square_blocks else None


_BASES = {
    name: from_plain(Quantization, values, name)
    for name, values in own_table("model/formats.toml").items()
}
# A scale a channel in all layers: the strategy "channel" of compressed-tensors (int8, fp8).
_OF_CHANNELS = {name: replace(_BASES[name], values_dtype=name) for name in ("s8", "f8e4m3fn")}
# Only some matrices: experts in Kimi K2.5 (int4) and gpt-oss (mxfp4); MLPs in Llama-3.1-405B-Instruct-FP8 (arXiv
# 2407.21783, section 6.2, which also leaves out the first and the last layer); everything outside linear attention
# in recipes of llm-compressor for Qwen3-Next and Qwen3.5.
_PARTLY = {FP8_BLOCKS, FP8_BLOCKS_32, *INT4_OF_GROUP.values(), MXFP4, NVFP4}
_QUANTIZATIONS = {
    **_BASES,
    **{
        f"{name}_{coverage}": replace(quantization, coverage=coverage)
        for name, quantization in (_BASES | _OF_CHANNELS).items()
        for coverage in PARTIAL_COVERAGES
        if name in _PARTLY or name in _OF_CHANNELS
    },
    **{
        f"{name}_{Coverage.LAYERS}": replace(quantization, coverage=Coverage.LAYERS)
        for name, quantization in _OF_CHANNELS.items()
    },
    **{
        name: replace(_BASES[fp8], experts=replace(_BASES[of], coverage=Coverage.EXPERTS))
        for name, (fp8, of) in WITH_EXPERTS.items()
    },
}
WEIGHT_DTYPES = ("bf16", "f16", "f32", *_QUANTIZATIONS)
# Of tables of n-grams, whatever the format of the other weights: fp8 with a scale for 32 numbers of a row.
TABLE_QUANTIZATION = Quantization(scale_dtype="u8", block=32, values_dtype="f8e4m3fn")


def format_with(dtype: str, coverage: Coverage) -> str:
    """The format with the values and scales of `dtype`, which covers all matrices of layers, in some of them.

    Formats that cover only some matrices have 16-bit activations, even if `dtype` has 8-bit ones.
    """
    name = f"{dtype}_{coverage}"
    if coverage is Coverage.LAYERS:
        return name if name in _QUANTIZATIONS else dtype
    return name if activation_dtype_of(dtype) is None else f"{values_dtype(dtype)}_{coverage}"


def wide_format(dtype: str) -> str:
    """The format of 8-bit weights with a scale a channel in all layers, for activations of 16 bits."""
    return format_with(values_dtype(dtype), Coverage.LAYERS)


def quantization_of(dtype: str) -> Quantization | None:
    """The scales of matrices stored in `dtype`; None if they have none."""
    return _QUANTIZATIONS.get(dtype)


def values_dtype(dtype: str) -> str:
    """XLA's name of the dtype of values stored in this format."""
    quantization = quantization_of(dtype)
    return dtype if quantization is None else quantization.values_dtype or dtype


def experts_quantization(dtype: str) -> Quantization | None:
    """The scales of experts stored in `dtype`; None if they have none."""
    quantization = quantization_of(dtype)
    return quantization if quantization is None else quantization.experts or quantization


def activation_dtype_of(dtype: str) -> str | None:
    """The dtype in which products with weights stored in `dtype` take activations; None if unchanged."""
    quantization = quantization_of(dtype)
    return None if quantization is None else quantization.activation_dtype


def ragged_dtype_of(dtype: str) -> str:
    """The dtype that a ragged dot reads: 8-bit operands if there is a scale per channel, else the format."""
    quantization = experts_quantization(dtype)
    has_channels = quantization is not None and quantization.block is None
    return values_dtype(dtype) if has_channels else dtype


def is_four_bit(dtype: str) -> bool:
    """Whether matrices, or at least experts, stored in `dtype` have 4 bits."""
    quantization = experts_quantization(dtype)
    values = () if quantization is None else (quantization.values_dtype, quantization.codes_dtype)
    return "s4" in values


def has_program(dtype: str) -> bool:
    """Whether programs multiply weights stored in `dtype`: none reads scales of nvfp4."""
    of_experts = experts_quantization(dtype)
    return of_experts is None or of_experts.scale_dtype != _BASES[NVFP4].scale_dtype
