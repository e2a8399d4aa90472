"""How 8-bit and 4-bit weights are stored: their scales and the weights that stay in bfloat16."""

from dataclasses import dataclass

from meshscope.errors import SpecError

PROGRAM_DTYPES = ("bf16", "f16", "f32", "s8", "f8e4m3fn", "f8e5m2")  # of weights in programs
UNQUANTIZED_DTYPE = "bf16"  # norms, biases and routers of quantized checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Scales of a quantized matrix: one per output channel, or per `block` inputs of a channel."""

    scale_dtype: str
    block: int | None = None


_PER_CHANNEL = Quantization(scale_dtype="f32")

# Per channel: jax-ml/jax-llm-examples (int8) and the strategy "channel" of compressed-tensors (int8,
# fp8). Int4: groups of 128 (AWQ, GPTQ). MXFP4: OCP Microscaling Formats 1.0, section 5.3.
_QUANTIZATIONS = {
    "s8": _PER_CHANNEL,
    "f8e4m3fn": _PER_CHANNEL,
    "f8e5m2": _PER_CHANNEL,
    "s4": Quantization(scale_dtype="bf16", block=128),
    "f4e2m1fn": Quantization(scale_dtype="f8e8m0fnu", block=32),
}


def quantization_of(dtype: str) -> Quantization | None:
    """The scales of matrices stored in `dtype`; None if they have none."""
    return _QUANTIZATIONS.get(dtype)


def check_program_dtype(weight_dtype: str) -> None:
    """SpecError if programs cannot be built with weights of this dtype."""
    if weight_dtype not in PROGRAM_DTYPES:
        raise SpecError(
            f"--weight-dtype {weight_dtype}: programs are built with {', '.join(PROGRAM_DTYPES)}. "
            "Use one of these, or predict, which counts the bytes of any dtype."
        )
