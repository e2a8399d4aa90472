"""How 8-bit and 4-bit weights are stored and multiplied: scales, and what stays in bfloat16."""

from dataclasses import dataclass, replace
from enum import StrEnum

FP8_BLOCKS = "f8e4m3fn_block128"
MXFP4 = "f4e2m1fn"  # in all matrices of layers
MXFP4_EXPERTS = "f4e2m1fn_experts"
FP8_MXFP4 = "f8e4m3fn_block128_f4e2m1fn_experts"  # DeepSeek-V4: experts in mxfp4, the rest in fp8
INT8_W8A8 = "s8_w8a8"  # weights and activations in int8
FP8_W8A8 = "f8e4m3fn_w8a8"
# Int4 by the number of inputs that share a scale; None for all of a channel.
INT4_OF_GROUP: dict[int | None, str] = {
    128: "s4",
    64: "s4_group64",
    32: "s4_group32",
    None: "s4_channel",
}
# The same in the experts only, by the format of all matrices.
INT4_EXPERTS = {name: f"{name}_experts" for name in INT4_OF_GROUP.values()}
INT8_EXPERTS = "s8_experts"  # 8 bits in the experts only
FP8_EXPERTS = "f8e4m3fn_experts"
FP8_MLPS = "f8e4m3fn_mlps"  # fp8 in MLPs and experts, not in attention
WEIGHT_DTYPES = (
    *("bf16", "f16", "f32", "s8", "f8e4m3fn", "f8e5m2"),
    *(FP8_BLOCKS, INT8_W8A8, FP8_W8A8, INT8_EXPERTS, FP8_EXPERTS, FP8_MLPS),
    *INT4_OF_GROUP.values(),
    *INT4_EXPERTS.values(),
    *(MXFP4, MXFP4_EXPERTS, FP8_MXFP4),
)
UNQUANTIZED_DTYPE = "bf16"  # norms, biases and routers of quantized checkpoints


class Coverage(StrEnum):
    """The matrices that a format quantizes; the others stay in bfloat16."""

    ALL = "all"
    LAYERS = "layers"  # without embedding and head
    MLPS = "mlps"  # those of MLPs and of routed experts
    EXPERTS = "experts"  # those of routed experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Scales of a quantized matrix: one per output channel, or per `block` inputs of a channel.

    With `has_square_blocks`, a scale is that of `block` inputs and `block` outputs. `values_dtype` is set
    if the format is not itself XLA's name of a dtype. With `codes_dtype`, arrays have that dtype and hold the
    bits of values for which chips have no type. With `activation_dtype`, products take activations in
    that dtype, with a scale for each token that is computed as it comes.
    """

    scale_dtype: str
    block: int | None = None
    has_square_blocks: bool = False
    coverage: Coverage = Coverage.ALL
    experts: "Quantization | None" = None  # format of experts, if another
    values_dtype: str | None = None
    codes_dtype: str | None = None
    activation_dtype: str | None = None

    @property
    def has_groups(self) -> bool:
        """Whether groups of inputs share a scale, for each output."""
        return self.block is not None and not self.has_square_blocks

    @property
    def square_block(self) -> int | None:
        """The inputs and outputs that share a scale; None for other scales."""
        return self.block if self.has_square_blocks else None


_PER_CHANNEL = Quantization(scale_dtype="f32")


def _w8a8(dtype: str) -> Quantization:
    return replace(
        _PER_CHANNEL, coverage=Coverage.LAYERS, values_dtype=dtype, activation_dtype=dtype
    )


_FP8_BLOCKS = Quantization(
    scale_dtype="f32",
    block=128,
    has_square_blocks=True,
    coverage=Coverage.LAYERS,
    values_dtype="f8e4m3fn",
)
_MXFP4 = Quantization(
    scale_dtype="u8",
    block=32,
    coverage=Coverage.LAYERS,
    values_dtype="f4e2m1fn",
    codes_dtype="s4",
)
_MXFP4_EXPERTS = replace(_MXFP4, coverage=Coverage.EXPERTS)


def _int4(group: int | None) -> Quantization:
    return Quantization(
        scale_dtype="bf16", block=group, coverage=Coverage.LAYERS, values_dtype="s4"
    )


# Square blocks: weight_block_size and weight_scale_inv of DeepSeek-V3 (deepseek-ai/DeepSeek-V3,
# README_WEIGHTS.md). Per channel: jax-ml/jax-llm-examples (int8) and the strategy "channel" of compressed-tensors (int8,
# fp8). Int4: groups of 128, 64 or 32, or channels (AWQ, GPTQ), which leave embedding and head as they are; Kimi K2.5 and K2.6 have them in routed experts only. MXFP4: OCP Microscaling
# Formats 1.0, section 5.3, with exponents of two as scales: all linear layers but the head (MXFP4A16 of compressed-tensors), or only the experts (gpt-oss, quantization_config of its config.json).
# FP8 in MLPs only: Llama-3.1-405B-Instruct-FP8 (arXiv 2407.21783, section 6.2, which also leaves out the first and the last layer).
# W8A8: int8 and fp8 with a dynamic scale per token (strategy "token" of compressed-tensors); head left out.
_QUANTIZATIONS = {
    "s8": _PER_CHANNEL,
    "f8e4m3fn": _PER_CHANNEL,
    "f8e5m2": _PER_CHANNEL,
    FP8_BLOCKS: _FP8_BLOCKS,
    FP8_MXFP4: replace(_FP8_BLOCKS, experts=_MXFP4_EXPERTS),
    **{name: _int4(group) for group, name in INT4_OF_GROUP.items()},
    **{
        INT4_EXPERTS[name]: replace(_int4(group), coverage=Coverage.EXPERTS)
        for group, name in INT4_OF_GROUP.items()
    },
    MXFP4: _MXFP4,
    MXFP4_EXPERTS: _MXFP4_EXPERTS,
    INT8_W8A8: _w8a8("s8"),
    FP8_W8A8: _w8a8("f8e4m3fn"),
    INT8_EXPERTS: replace(_PER_CHANNEL, coverage=Coverage.EXPERTS, values_dtype="s8"),
    FP8_EXPERTS: replace(_PER_CHANNEL, coverage=Coverage.EXPERTS, values_dtype="f8e4m3fn"),
    FP8_MLPS: replace(_PER_CHANNEL, coverage=Coverage.MLPS, values_dtype="f8e4m3fn"),
}


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
    """The dtype in which products with weights stored in `dtype` take activations; None for their own."""
    quantization = quantization_of(dtype)
    return None if quantization is None else quantization.activation_dtype


def ragged_dtype_of(dtype: str) -> str:
    """The dtype of both operands of a ragged dot with 8-bit activations, else the format of the weights."""
    return activation_dtype_of(dtype) or dtype


def is_four_bit(dtype: str) -> bool:
    """Whether matrices stored in `dtype`, or those of experts, are in a format of 4 bits."""
    quantization = experts_quantization(dtype)
    return quantization is not None and "s4" in {
        quantization.values_dtype,
        quantization.codes_dtype,
    }
