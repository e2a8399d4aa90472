"""Which dtypes the matrix units of TPUs multiply, and what the programs do with the others."""

from collections.abc import Iterator

from meshscope.hardware.chips import Chip, ChipKind
from meshscope.model.quantization import (
    Coverage,
    Quantization,
    activation_dtype_of,
    quantization_of,
    values_dtype,
)
from meshscope.units import DTYPE_BITS, format_dtype

# Dtypes with a published peak, beside bf16: cloud.google.com/tpu/docs, "Peak compute per chip" of v4 (bf16
# or int8), v5e, v5p and v6e (bf16, int8) and tpu7x (bf16, fp8).
NARROW_DTYPES = {
    "v4": ("s8",),
    "v5e": ("s8",),
    "v5p": ("s8",),
    "v6e": ("s8",),
    "tpu7x": ("f8e4m3fn", "f8e5m2"),
}

# Their peak over that of bf16, same pages: v4 has 275 TFLOP/s in both, the others twice as many in 8 bits.
NARROW_SPEEDUP = {"v4": 1.0, "v5e": 2.0, "v5p": 2.0, "v6e": 2.0, "tpu7x": 2.0}


def product_speedup(weight_dtype: str, chip: Chip) -> float:
    """Peak of products with weights in this format over the bf16 peak: above 1 for 8-bit operands only.

    A chip without the type converts both operands, at the bf16 peak.
    """
    return 1.0 if peak_dtype(weight_dtype, chip) == "bf16" else NARROW_SPEEDUP[chip.name]


def peak_dtype(weight_dtype: str, chip: Chip) -> str:
    """The dtype whose peak bounds products with weights in this format."""
    dtype = activation_dtype_of(weight_dtype)
    return "bf16" if dtype is None or dtype not in NARROW_DTYPES.get(chip.name, ()) else dtype


def precision_notes(weights: str, activations: str, chip: Chip) -> Iterator[str]:
    """How products of dtypes other than bf16 are computed and timed on a TPU."""
    if chip.kind is not ChipKind.TPU:
        return
    native = NARROW_DTYPES.get(chip.name, ())
    narrow = activation_dtype_of(weights)
    if narrow is not None:
        yield _narrow_note(narrow, activations, chip)
    elif quantization_of(weights) is not None:
        values = values_dtype(weights)
        lack = "" if values in native else f" has no {format_dtype(values)} unit and"
        units = ", ".join(("bf16", *map(format_dtype, native)))
        of_experts = " and, of experts, in the bundles of their kernel" * (DTYPE_BITS[values] == 4)
        yield (
            f"{chip.name}{lack} multiplies {format_dtype(values)} weights as {activations}: bytes count as stored, "
            f"products at the bf16 peak, and conversions only in the compiler's own cycles{of_experts} (matrix "
            f"units: {units})"
        )
        yield from _code_notes(quantization_of(weights))
    if activations == "f32":
        yield "f32 products run as one bf16 pass, JAX's default precision on TPUs"
    elif activations == "f16":
        yield f"{chip.name} has no f16 unit; products are timed at the bf16 peak, the nearest"


def _code_notes(quantization: Quantization | None) -> Iterator[str]:
    """What the prediction lacks for dense matrices whose codes no chip converts by itself."""
    if quantization is None or quantization.coverage is Coverage.EXPERTS:
        return
    if quantization.codes_dtype is not None:
        yield (
            "the codes of dense mxfp4 matrices are converted in a pass before each product, which the prediction "
            "lacks: compile, or see docs/formats.md"
        )


def _narrow_note(dtype: str, activations: str, chip: Chip) -> str:
    """How a chip multiplies 8-bit activations and weights."""
    rounded = (
        f"activations are rounded to {format_dtype(dtype)} with a scale for each token of a device"
    )
    kept = f"collectives, cache, embedding and head stay in their own dtypes ({activations} activations)"
    if dtype not in NARROW_DTYPES.get(chip.name, ()):
        return (
            f"{rounded}; {chip.name} has no {format_dtype(dtype)} unit and emulates it: products at the bf16 peak, after "
            f"conversions that only the compiler's own cycles count; {kept}"
        )
    speedup = NARROW_SPEEDUP[chip.name]
    return f"{rounded}; {chip.name} multiplies {format_dtype(dtype)} at {speedup:g} x its bf16 peak; {kept}"
