"""Published peak figures of chips, each with its source, from `chips.json`.

Achieved rates are measurements; runs and profiles hold them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshscope.errors import SpecError, nearest
from meshscope.files import own_table
from meshscope.model.quantization import (
    Coverage,
    activation_dtype_of,
    quantization_of,
    values_dtype,
)
from meshscope.serialize import from_plain
from meshscope.units import DTYPE_BITS, format_dtype

GIB = 2**30


class ChipKind(StrEnum):
    """The type of accelerator."""

    TPU = "tpu"
    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Published peaks of one chip, and its names; None if no figure is published."""

    name: str
    kind: ChipKind
    devices_per_chip: int  # as listed by JAX
    n_grid_dims: int  # 2: a 2D torus, 3: a 3D torus, 1: no torus
    chips_per_host: int
    hbm_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None  # one link, ONE direction
    # Between the host and one chip, one direction: the scaling book, part 2 (1.5e10, v6e 3.2e10), and half of what
    # NVIDIA's data sheets state for both directions of PCIe 4 and 5.
    pcie_bytes_per_s: float | None = None
    # An axis wraps around if its size is a multiple of this. A 3D torus wraps only if all three
    # sizes are: optical switches connect whole cubes (same page).
    wraps_from: int | None = None
    source: str
    pod_chips: int | None = None  # chips of a pod, the most that ICI connects
    clock_hz: float | None = None  # clock of the cycles in the compiler's estimates
    mxu_dim: int | None = None  # rows and columns of one matrix unit
    compiler_config: str | None = None  # libtpu's chip configuration, if not its default
    die_bytes_per_s: float | None = None  # between the two cores of a chip, one direction

    # `device_kind`, lower case. Source: jax/_src/cloud_tpu_init.py and pallas/mosaic/core.py of JAX 0.10, and
    # the kinds that libtpu 0.0.42.1 gives to described devices.
    device_kinds: tuple[str, ...] = ()
    # Dtypes with a published peak other than bf16, and this peak over the peak of bf16:
    # cloud.google.com/tpu/docs, "Peak compute per chip" of v4 (bf16 or int8), v5e, v5p and v6e (bf16, int8)
    # and tpu7x (bf16, fp8).
    narrow_dtypes: tuple[str, ...] = ()
    narrow_speedup: float = 1.0
    # Whether vector units multiply bf16: 706 bundles instead of 1,160 for a block of int4 weights on v6e, but
    # 1,438 instead of 1,107 on v5e (docs/kernels.md).
    has_bf16_vectors: bool = False
    # Whether the number in a cloud name counts cores, and whether single chips are rented; the smallest slice
    # of the others is a host. Source: cloud.google.com/tpu/docs, pages "TPU v4", "v5p", "v5e", "v6e", "tpu7x".
    name_counts_cores: bool = False
    is_rented_singly: bool = False
    # What Google Cloud calls it before the size in --accelerator-type, and the software version of its VMs; None
    # where TPU VMs have no such chip. Source: pages "TPU configurations" and "TPU software versions".
    accelerator: str | None = None
    runtime: str | None = None

    # HBM of one device that programs may use; libtpu 0.0.42.1 reserves the rest (the limit that it
    # states when a program exceeds it).
    program_hbm_bytes: int | None = None

    @property
    def device_hbm_bytes(self) -> int | None:
        """HBM of one device that programs may use, in bytes; all of it if no limit is known."""
        if self.hbm_bytes is None or self.program_hbm_bytes is not None:
            return self.program_hbm_bytes
        return self.hbm_bytes // self.devices_per_chip

    @property
    def all_links_bytes_per_s(self) -> float | None:
        """All links of the chip in one direction: two along each torus dimension of a TPU, all of a GPU."""
        if self.link_bytes_per_s is None:
            return None
        return self.link_bytes_per_s * (2 * self.n_grid_dims if self.kind is ChipKind.TPU else 1)


def _chip(name: str, facts: Mapping[str, Any]) -> Chip:
    values = {key: value for key, value in facts.items() if key != "notes"}
    for key in ("hbm", "program_hbm"):
        if f"{key}_gib" in values:
            values[f"{key}_bytes"] = int(values.pop(f"{key}_gib") * GIB)
    return from_plain(Chip, {"name": name, **values})


_DOCUMENT = own_table("hardware/chips.json")
CHIPS = {name: _chip(name, facts) for name, facts in _DOCUMENT["chips"].items()}
# GPUs without published rates here: their traces can be imported.
_PROFILED = {"kind": "gpu", "devices_per_chip": 1, "n_grid_dims": 1, "chips_per_host": 8}
PROFILED_CHIPS = {
    name: _chip(name, {**_PROFILED, "source": of["source"], **({"hbm_gib": gib} if gib else {})})
    for of in _DOCUMENT["profiled"]
    for name, gib in of["hbm_gib"].items()
}
CHIP_ALIASES: dict[str, str] = _DOCUMENT["aliases"]


def chip_of(name: str, *, is_imported: bool = False) -> Chip:
    """The chip with this name or alias; SpecError suggests the nearest. Some are for imported traces only."""
    key = CHIP_ALIASES.get(name.lower(), name.lower())
    if key in CHIPS:
        return CHIPS[key]
    if key in PROFILED_CHIPS:
        if is_imported:
            return PROFILED_CHIPS[key]
        known = ", ".join(n for n, chip in CHIPS.items() if chip.kind is ChipKind.GPU)
        raise SpecError(
            f"chip '{name}' has no rates of links, memory and compute here, so only 'meshscope import' "
            f"takes it. Name another GPU, such as {known}, or a TPU."
        )
    names = [*CHIPS, *CHIP_ALIASES, *(PROFILED_CHIPS if is_imported else ())]
    optional = (
        " An import needs no --topology: --mesh dp=8 lays out any devices." if is_imported else ""
    )
    raise SpecError(f"unknown chip '{name}'. {nearest(name, names)}{optional}")


def tpu_of_kind(device_kind: str) -> Chip | None:
    """The TPU of JAX's `device_kind`, in lower case; None if it is unknown."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def is_chip_named(chip: Chip, device_name: str) -> bool | None:
    """Whether a profiler's device name, such as `NVIDIA A100-SXM4-80GB`, names the chip; None if it names no model."""
    lowered = device_name.lower().strip()
    if chip.kind is not ChipKind.GPU or lowered.startswith("tpu"):
        named = tpu_of_kind(lowered)
        return None if named is None else named.name == chip.name
    words = re.findall(r"[a-z0-9]+", lowered)
    if chip.name in words:
        return True
    is_amd = chip.name.startswith("mi")
    if ("amd" in words and not is_amd) or ("nvidia" in words and is_amd):
        return False
    return False if any(re.fullmatch(r"[a-z]+\d+[a-z]*", word) for word in words) else None


def product_speedup(weight_dtype: str, chip: Chip) -> float:
    """Peak of products with weights in this format over the bf16 peak: above 1 for 8-bit operands that the chip multiplies."""
    return 1.0 if peak_dtype(weight_dtype, chip) == "bf16" else chip.narrow_speedup


def peak_dtype(weight_dtype: str, chip: Chip) -> str:
    """The dtype whose peak bounds products with weights in this format."""
    dtype = activation_dtype_of(weight_dtype)
    return "bf16" if dtype is None or dtype not in chip.narrow_dtypes else dtype


def precision_notes(weights: str, activations: str, chip: Chip) -> Iterator[str]:
    """How products of dtypes other than bf16 are computed and timed on a TPU."""
    if chip.kind is not ChipKind.TPU:
        return
    native, narrow = chip.narrow_dtypes, activation_dtype_of(weights)
    quantization = quantization_of(weights)
    if narrow is not None:
        dtype = format_dtype(narrow)
        speed = f"multiplies {dtype} at {chip.narrow_speedup:g} x its bf16 peak"
        if narrow not in native:
            speed = (
                f"has no {dtype} unit and emulates it: products at the bf16 peak, after "
                "conversions that only the compiler's own cycles count"
            )
        yield (
            f"activations are rounded to {dtype} with a scale for each token of a device; {chip.name} {speed}; "
            f"collectives, cache, embedding and head stay in their own dtypes ({activations} activations)"
        )
    elif quantization is not None:
        values = values_dtype(weights)
        lack = "" if values in native else f" has no {format_dtype(values)} unit and"
        units = ", ".join(("bf16", *map(format_dtype, native)))
        of_experts = (
            " and, of experts, in the bundles of their kernel" if DTYPE_BITS[values] == 4 else ""
        )
        yield (
            f"{chip.name}{lack} multiplies {format_dtype(values)} weights as {activations}: bytes count as stored, "
            f"products at the bf16 peak, and conversions only in the compiler's own cycles{of_experts} (matrix "
            f"units: {units})"
        )
        if quantization.coverage is not Coverage.EXPERTS and quantization.codes_dtype is not None:
            yield (
                "the codes of dense mxfp4 matrices are converted in a pass before each product, which the prediction "
                "lacks: compile, or see docs/formats.md"
            )
    if activations == "f32":
        yield "f32 products run as one bf16 pass, JAX's default precision on TPUs"
    elif activations == "f16":
        yield f"{chip.name} has no f16 unit; products are timed at the bf16 peak, the nearest"
