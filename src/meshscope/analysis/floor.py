"""The least time of a step on its hardware, and where the rest of its time goes."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.analysis.roofline import BETWEEN_PARTS, BindingResource, device_peaks
from meshscope.events.step_time import PartCost, StepTime
from meshscope.spec.hardware.chips import Chip

WAITING = "waiting"
MIN_FRAC = 0.01  # of the step; smaller causes are added up
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorCause:
    """Seconds beyond the floor that a part, exposed communication over an axis, or waiting takes.

    They are negative for a part whose bytes are fetched while other parts compute or communicate.
    """

    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Lower bounds of a step on one device in seconds; the largest is its floor.

    `link_s` assumes all links of the chip at once. The `causes` add up to the step minus its floor.
    """

    hbm_s: float
    compute_s: float
    link_s: float
    binding: BindingResource
    causes: tuple[FloorCause, ...]

    @property
    def floor_s(self) -> float:
        """The largest bound."""
        return max(self.hbm_s, self.compute_s, self.link_s)


def step_floor(time: StepTime, chip: Chip) -> StepFloor | None:
    """The floor of a modeled step; None without published peaks or without the work of its parts.

    Bounds are HBM bytes / HBM rate, FLOPs / bf16 peak and wire bytes / link rate, of one device.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model" (2009).
    """
    peaks = device_peaks(chip)
    if peaks is None or chip.link_bytes_per_s is None or not any(p.hbm_bytes for p in time.parts):
        return None
    links_bytes_per_s = chip.link_bytes_per_s * 2 * chip.n_grid_dims
    rates = {
        BindingResource.HBM: peaks.hbm_bytes_per_s,
        BindingResource.COMPUTE: peaks.flops_per_s,
        BindingResource.INTERCONNECT: links_bytes_per_s,
    }
    bounds = {r: sum(_work(part, r) for part in time.parts) / rate for r, rate in rates.items()}
    binding = max(bounds, key=lambda resource: bounds[resource])
    return StepFloor(
        hbm_s=bounds[BindingResource.HBM],
        compute_s=bounds[BindingResource.COMPUTE],
        link_s=bounds[BindingResource.INTERCONNECT],
        binding=binding,
        causes=_shown(_causes(time, binding, rates[binding]), time.step.value_s),
    )


def _work(part: PartCost, resource: BindingResource) -> float:
    match resource:
        case BindingResource.HBM:
            return part.hbm_bytes or 0.0
        case BindingResource.COMPUTE:
            return part.flops or 0.0
        case BindingResource.INTERCONNECT:
            return part.wire_bytes or 0.0


def _causes(time: StepTime, binding: BindingResource, rate: float) -> Iterator[FloorCause]:
    for axis, seconds in time.exposed_by_axis_s.items():
        yield FloorCause(cause=f"exposed over {axis}", seconds=seconds)
    yield FloorCause(cause=WAITING, seconds=time.idle_s)
    for part in time.parts:
        seconds = part.compute_s - _work(part, binding) / rate
        yield FloorCause(cause=part.part or BETWEEN_PARTS, seconds=seconds)


def _shown(causes: Iterator[FloorCause], step_s: float) -> tuple[FloorCause, ...]:
    """The causes, the longest first, with those below MIN_FRAC of the step added up."""
    ranked = sorted(causes, key=lambda cause: -cause.seconds)
    large = [cause for cause in ranked if abs(cause.seconds) >= MIN_FRAC * step_s]
    rest_s = sum(cause.seconds for cause in ranked if cause not in large)
    return (*large, FloorCause(cause=OTHER, seconds=rest_s)) if rest_s else tuple(large)
