"""A roofline with three roofs: what a part of a step takes at the peaks of compute, of memory, and on the wires.

Compute and memory are at the chip's published peaks; the wires are those of the interconnect model,
with what a collective costs before its first byte. The highest of the three binds: no schedule takes
less than it, and overlap at its best takes as much.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshscope.events.step_time import PartCost, StepTime
from meshscope.spec.hardware.chips import Chip

WHOLE = "step"
OTHER = "other"


class BindingResource(StrEnum):
    """What can bind."""

    COMPUTE = "compute"
    HBM = "hbm"
    INTERCONNECT = "interconnect"


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineBounds:
    """The roofs of one part of a step in seconds, and what it takes by the model.

    `binding` is the highest roof, `factor` how many times as high as the next (null where that is 0).
    `roof_frac` is the highest roof over what the part takes: 1 where the model has it at the roof.
    """

    part: str
    compute_s: float
    hbm_s: float
    interconnect_s: float
    taken_s: float
    binding: BindingResource
    factor: float | None
    roof_frac: float | None


def roofs_of(time: StepTime, chip: Chip) -> list[RooflineBounds]:
    """The whole step, then its parts, the dearest first; none for a chip without published peaks."""
    if chip.bf16_flops_per_s is None or chip.hbm_bytes_per_s is None:
        return []
    n = chip.devices_per_chip
    peaks = (chip.bf16_flops_per_s / n, chip.hbm_bytes_per_s / n)
    whole = _roofs(WHOLE, time.parts, peaks, time.step.value_s)
    parts = [_roofs(p.part or OTHER, [p], peaks, p.compute_s + p.exposed_s) for p in time.parts]
    return [whole, *(part for part in parts if part.taken_s > 0)]


def _roofs(
    name: str, parts: Iterable[PartCost], peaks: tuple[float, float], taken_s: float
) -> RooflineBounds:
    parts = list(parts)
    heights = {
        BindingResource.COMPUTE: _sum(part.flops for part in parts) / peaks[0],
        BindingResource.HBM: _sum(part.hbm_bytes for part in parts) / peaks[1],
        BindingResource.INTERCONNECT: sum(part.collective_s for part in parts),
    }
    binding = max(heights, key=lambda roof: heights[roof])
    return RooflineBounds(
        part=name,
        compute_s=heights[BindingResource.COMPUTE],
        hbm_s=heights[BindingResource.HBM],
        interconnect_s=heights[BindingResource.INTERCONNECT],
        taken_s=taken_s,
        binding=binding,
        factor=_factor(sorted(heights.values())),
        roof_frac=heights[binding] / taken_s if taken_s else None,
    )


def _sum(amounts: Iterable[float | None]) -> float:
    return sum(amount or 0.0 for amount in amounts)


def _factor(heights: Sequence[float]) -> float | None:
    return heights[-1] / heights[-2] if heights[-2] else None
