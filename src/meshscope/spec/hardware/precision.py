"""Which dtypes the matrix units of TPUs multiply, and what the programs do with the others."""

from collections.abc import Iterator

from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.quantization import quantization_of
from meshscope.spec.workload import Workload

# Dtypes with a published peak, beside bf16: cloud.google.com/tpu/docs, "Peak compute per chip" of v4 (bf16
# or int8), v5e, v5p and v6e (bf16, int8) and tpu7x (bf16, fp8).
NARROW_DTYPES = {
    "v4": ("s8",),
    "v5e": ("s8",),
    "v5p": ("s8",),
    "v6e": ("s8",),
    "tpu7x": ("f8e4m3fn", "f8e5m2"),
}


def precision_notes(workload: Workload, chip: Chip) -> Iterator[str]:
    """How products of dtypes other than bf16 are computed and timed on a TPU."""
    if chip.kind is not ChipKind.TPU:
        return
    weights, activations = workload.weight_dtype, workload.activation_dtype
    native = NARROW_DTYPES.get(chip.name, ())
    if quantization_of(weights) is not None:
        lack = "" if weights in native else f" has no {weights} unit and"
        units = ", ".join(("bf16", *native))
        yield (
            f"{chip.name}{lack} multiplies {weights} weights as {activations}: bytes count as stored, "
            "products at the bf16 peak, and conversions only in the compiler's own cycles (matrix "
            f"units: {units})"
        )
    if activations == "f32":
        yield "f32 products run as one bf16 pass, JAX's default precision on TPUs"
    elif activations == "f16":
        yield f"{chip.name} has no f16 unit; products are timed at the bf16 peak, the nearest"
