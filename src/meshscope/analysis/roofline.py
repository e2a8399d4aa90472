"""The roofline of one device: its peaks, the points below them, and the resource that binds.

The model is Williams et al., "Roofline: An Insightful Visual Performance Model" (2009), with the
links as a third bound. Each bound is work over a peak rate, so latency and schedules are in none of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from meshscope.events.enums import Phase, Source
from meshscope.events.measured import StepCost
from meshscope.events.step_time import PartCost, StepTime
from meshscope.hardware.chips import Chip, ChipKind, product_speedup

if TYPE_CHECKING:  # it loads polars, which predict does not need
    from meshscope.analysis.metric_inputs import MetricInputs

STEP = "step"
OTHER = "other"
WHOLE_STEP = "whole step"
BETWEEN_PARTS = "between parts"


class BindingResource(StrEnum):
    """A resource that can bound a step."""

    COMPUTE = "compute"
    HBM = "hbm"
    INTERCONNECT = "interconnect"


RESOURCES = {
    BindingResource.COMPUTE: "compute",
    BindingResource.HBM: "HBM",
    BindingResource.INTERCONNECT: "link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """Peak rates of one device: matrix FLOPs, HBM bandwidth, and all links of its chip in one direction."""

    flops_per_s: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float

    def bounds_s(self, parts: Iterable[PartCost]) -> dict[BindingResource, float]:
        """Least seconds of the parts by resource, the one that binds first: their work at its peak rate."""
        parts = list(parts)
        bounds = {
            BindingResource.COMPUTE: sum(p.flops or 0.0 for p in parts) / self.flops_per_s,
            BindingResource.HBM: sum(p.hbm_bytes or 0.0 for p in parts) / self.hbm_bytes_per_s,
            BindingResource.INTERCONNECT: sum(p.wire_bytes or 0.0 for p in parts)
            / self.link_bytes_per_s,
        }
        return dict(sorted(bounds.items(), key=lambda bound: -bound[1]))


def device_peaks(chip: Chip, weight_dtype: str | None = None) -> DevicePeaks | None:
    """A device's share of the chip's published peaks; None if the peaks are not published.

    FLOPs are those of bf16 products, or of products with weights in `weight_dtype`. A TPU has two links along
    each dimension of its torus; the rate of a GPU is that of all its links.
    """
    if chip.bf16_flops_per_s is None or chip.hbm_bytes_per_s is None:
        return None
    if chip.link_bytes_per_s is None:
        return None
    speedup = 1.0 if weight_dtype is None else product_speedup(weight_dtype, chip)
    n_links = 2 * chip.n_grid_dims if chip.kind is ChipKind.TPU else 1
    return DevicePeaks(
        flops_per_s=speedup * chip.bf16_flops_per_s / chip.devices_per_chip,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / chip.devices_per_chip,
        link_bytes_per_s=chip.link_bytes_per_s * n_links,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRoofline:
    """A measured step of one device against its peaks.

    `hbm_frac` and `flops_frac` are the achieved rates over the peaks; the larger one is the bound. Null
    means unknown.
    """

    phase: Phase
    step_s: float
    accessed_bytes: float | None
    flops: float | None
    hbm_frac: float | None
    flops_frac: float | None


def step_roofline(cost: StepCost, step_s: float, peaks: DevicePeaks) -> StepRoofline:
    """Achieved HBM bandwidth and FLOP rate of a measured step on one device, as fractions of the peaks.

    `hbm_frac` = accessed bytes / step time / peak HBM bandwidth, `flops_frac` = FLOPs / step time / peak
    bf16 FLOP rate. The larger fraction names the bound of the step. The compiler counts FLOPs and bytes; bytes
    that stay in VMEM, and 8-bit products, can lift a fraction above 1.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model" (2009); costs: XLA's cost
    analysis of the compiled program; peaks: `meshscope.hardware.chips`.
    """
    return StepRoofline(
        phase=cost.phase,
        step_s=step_s,
        accessed_bytes=cost.accessed_bytes,
        flops=cost.flops,
        hbm_frac=_fraction(cost.accessed_bytes, step_s * peaks.hbm_bytes_per_s),
        flops_frac=_fraction(cost.flops, step_s * peaks.flops_per_s),
    )


def _fraction(amount: float | None, maximum: float) -> float | None:
    return None if amount is None else amount / maximum


def step_rooflines(
    costs: Iterable[StepCost], step_s: Mapping[Phase, float], chip: Chip
) -> list[StepRoofline]:
    """The roofline of every measured phase; empty if the chip's peaks are not published."""
    peaks = device_peaks(chip)
    if peaks is None:
        return []
    timed = [(cost, step_s.get(cost.phase)) for cost in costs]
    return [step_roofline(cost, seconds, peaks) for cost, seconds in timed if seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """Arithmetic intensity and FLOP rate of one part of the model on one device."""

    source: Source
    phase: Phase
    part: str
    flops_per_byte: float
    flops_per_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The peaks of one device and the points of a run below them."""

    peaks: DevicePeaks
    points: tuple[RooflinePoint, ...]


def roofline_of(inputs: "MetricInputs") -> Roofline | None:
    """The roofline of a run; None without published peaks or without a part with FLOPs and time.

    A modeled part is placed by its FLOPs over its compute time, which excludes communication and
    waiting. A measured step is one point, placed by its whole time.
    """
    peaks = None if inputs.topology is None else device_peaks(inputs.topology.chip)
    points = tuple(_points(inputs))
    return None if peaks is None or not points else Roofline(peaks=peaks, points=points)


def _points(inputs: "MetricInputs") -> Iterator[RooflinePoint]:
    for source, phase, part, flops, n_bytes, seconds in _work(inputs):
        if flops and n_bytes and seconds > 0:
            yield RooflinePoint(
                source=source,
                phase=phase,
                part=part,
                flops_per_byte=flops / n_bytes,
                flops_per_s=flops / seconds,
                compute_s=seconds,
            )


def _work(
    inputs: "MetricInputs",
) -> Iterator[tuple[Source, Phase, str, float | None, float | None, float]]:
    """(source, phase, part, FLOPs, HBM bytes, seconds) of modeled parts and measured steps."""
    for time in inputs.times:
        for p in time.parts:
            name = p.part or BETWEEN_PARTS
            yield time.source, time.phase, name, p.flops, p.hbm_bytes, p.compute_s
    for cost in () if inputs.measured is None else inputs.measured.costs:
        step_s = inputs.measured_step_s.get(cost.phase, 0.0)
        yield Source.MEASURED, cost.phase, WHOLE_STEP, cost.flops, cost.accessed_bytes, step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineBound:
    """Lower bounds of one part of a step by resource, in seconds, and the modeled time.

    `binding` is the resource with the largest bound, `factor` the ratio of that bound to the next one
    (null if that is 0), and `roof_frac` the ratio of the bound to the modeled time `taken_s`: 1 if the
    part runs at its bound, more if its weights arrive or its collectives run during other parts.
    """

    part: str
    compute_s: float
    hbm_s: float
    interconnect_s: float
    taken_s: float
    binding: BindingResource
    factor: float | None
    roof_frac: float | None


def roofline_bounds(
    time: StepTime, chip: Chip, weight_dtype: str | None = None
) -> list[RooflineBound]:
    """Bounds of the whole step, then of its parts, the costliest first; empty without published peaks.

    The largest bound of the step is its floor.
    """
    peaks = device_peaks(chip, weight_dtype)
    if peaks is None:
        return []
    whole = _bound(STEP, peaks.bounds_s(time.parts), time.step.value_s)
    parts = [
        _bound(p.part or OTHER, peaks.bounds_s([p]), p.compute_s + p.exposed_s) for p in time.parts
    ]
    return [whole, *(part for part in parts if part.taken_s > 0)]


def _bound(name: str, bounds_s: Mapping[BindingResource, float], taken_s: float) -> RooflineBound:
    first_s, second_s, _ = bounds_s.values()
    return RooflineBound(
        part=name,
        compute_s=bounds_s[BindingResource.COMPUTE],
        hbm_s=bounds_s[BindingResource.HBM],
        interconnect_s=bounds_s[BindingResource.INTERCONNECT],
        taken_s=taken_s,
        binding=next(iter(bounds_s)),
        factor=first_s / second_s if second_s else None,
        roof_frac=first_s / taken_s if taken_s else None,
    )
