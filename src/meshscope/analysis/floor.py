"""The least time of a step on its hardware, where the rest of its time goes, and a sentence that says both."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshscope.analysis.roofline import RESOURCES, BindingResource, DevicePeaks, device_peaks
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import Activity, ActivityTime, StepTime
from meshscope.hardware.chips import Chip, peak_dtype
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds

MIN_FRAC = 0.01  # of the step; smaller causes are added up
ROUNDING = 1e-9
OTHER = "other"
PADDING = "padding of matmuls"
SLOW_HBM = "HBM below peak"
SORTING = "sorting tokens by expert"
EXPOSED_OVER = "exposed over "
MAX_CAUSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorCause:
    """Seconds beyond the floor in which one activity leaves the binding resource unused."""

    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Lower bounds of a step on one device in seconds; the largest is its floor.

    `link_s` assumes all links of the chip at once. The `causes` are positive, the longest first, and add up
    to the step minus its floor; a step that is not longer than its floor has none.
    """

    hbm_s: float
    compute_s: float
    link_s: float
    binding: BindingResource
    causes: tuple[FloorCause, ...]
    peak: str = "bf16"  # whose products count at their peak

    @property
    def floor_s(self) -> float:
        """The largest bound."""
        return max(self.hbm_s, self.compute_s, self.link_s)


def step_floor(time: StepTime, chip: Chip, weight_dtype: str | None = None) -> StepFloor | None:
    """The floor of a modeled step; None without published peaks or without the work of its parts.

    Bounds are HBM bytes / HBM rate, FLOPs / matrix peak and wire bytes / link rate, of one device. A cause
    is the time of an activity in which the binding resource is not used: less FLOPs / peak where compute
    binds, less the time in which the HBM is busy where the HBM does, less wire bytes / link rate where links
    do. Work of the resource that overlaps activities unseen shortens all causes alike. The time in which the
    HBM is busy beyond bytes / peak is a cause of its own. An activity whose products fill tiles of the matrix
    units with padding yields these FLOPs to `PADDING`.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model" (2009).
    """
    peaks = device_peaks(chip, weight_dtype)
    if peaks is None or not any(p.hbm_bytes for p in time.parts):
        return None
    bounds = peaks.bounds_s(time.parts)
    binding, floor_s = next(iter(bounds.items()))
    return StepFloor(
        hbm_s=bounds[BindingResource.HBM],
        compute_s=bounds[BindingResource.COMPUTE],
        link_s=bounds[BindingResource.INTERCONNECT],
        binding=binding,
        peak="bf16" if weight_dtype is None else peak_dtype(weight_dtype, chip),
        causes=_ranked(_causes(time, binding, peaks), time.step.value_s, floor_s, binding),
    )


def _causes(
    time: StepTime, binding: BindingResource, peaks: DevicePeaks
) -> Iterator[tuple[str, float]]:
    """Seconds of each activity in which the binding resource is not used."""
    has_experts = any((part.part or "").startswith("moe.") for part in time.parts)
    for spent in time.activities:
        padding_s = 0.0
        match binding:
            case BindingResource.HBM:
                used_s = spent.hbm_busy_s
            case BindingResource.COMPUTE:
                used_s = spent.flops / peaks.flops_per_s
                padding_s = spent.padding_flops / peaks.flops_per_s
            case BindingResource.INTERCONNECT:
                used_s = spent.wire_bytes / peaks.link_bytes_per_s
        unused_s = max(0.0, spent.seconds - used_s)
        padding_s = min(unused_s, padding_s)
        yield PADDING, padding_s
        yield _cause(spent, has_experts=has_experts), unused_s - padding_s


def _cause(spent: ActivityTime, *, has_experts: bool) -> str:
    match spent.activity:
        case Activity.MATMUL:
            return "matmuls below peak"
        case Activity.KERNEL:
            return f"attention {'and expert ' if has_experts else ''}kernels below peak"
        case Activity.GATHER if has_experts:
            return SORTING
        case Activity.EXPOSED if spent.axis:
            return f"{EXPOSED_OVER}{spent.axis}"
        case _:
            return spent.activity.value


def _ranked(
    causes: Iterable[tuple[str, float]], step_s: float, floor_s: float, binding: BindingResource
) -> tuple[FloorCause, ...]:
    """The causes, the longest first, scaled to the time beyond the floor if they exceed it.

    What they leave is a busy HBM if it binds; causes below MIN_FRAC are added up with what is unknown.
    """
    beyond_s = step_s - floor_s
    if beyond_s <= 0:
        return ()
    totals: dict[str, float] = {}
    for cause, seconds in causes:
        totals[cause] = totals.get(cause, 0.0) + seconds
    unused_s = sum(totals.values())
    scale = min(1.0, beyond_s / unused_s) if unused_s else 1.0
    totals = {cause: scale * seconds for cause, seconds in totals.items()}
    if binding is BindingResource.HBM and totals:
        totals[SLOW_HBM] = max(0.0, beyond_s - unused_s)
    large = {cause: s for cause, s in totals.items() if s >= MIN_FRAC * step_s}
    rest_s = beyond_s - sum(large.values())
    if rest_s > ROUNDING * beyond_s:
        large[OTHER] = rest_s
    ranked = sorted(large.items(), key=lambda item: (item[0] == OTHER, -item[1]))
    return tuple(FloorCause(cause=cause, seconds=seconds) for cause, seconds in ranked)


def why_sentences(run: RunRecord) -> dict[Phase, str]:
    """A sentence for each modeled phase of the strongest source that has times."""
    experiment = run.manifest.experiment
    chip, weight_dtype = experiment.chip, experiment.weight_dtype
    sources = [source for source in Source if run.times_of(source)]
    times = run.times_of(sources[-1]) if sources else ()
    return {time.phase: why_sentence(time, chip, weight_dtype) for time in times}


def why_sentence(
    time: StepTime,
    chip: Chip | None,
    weight_dtype: str | None = None,
    *,
    max_causes: int = MAX_CAUSES,
) -> str:
    """What binds the step and where its time beyond the floor goes.

    `decode takes 28.8 ms, 1.22 x its HBM floor of 23.6 ms: 3.3 ms HBM below peak, 1.85 ms matmuls below peak`.
    The seconds add up to the time beyond the floor.
    """
    head = f"{time.phase} takes {format_seconds(time.step.value_s)}"
    floor = None if chip is None else step_floor(time, chip, weight_dtype)
    if floor is None or not floor.floor_s:
        return head
    clauses = ", ".join(_clauses(floor, max_causes))
    return f"{head}, {_of_floor(time, floor)}{': ' if clauses else ''}{clauses}"


def _of_floor(time: StepTime, floor: StepFloor) -> str:
    """`3.7 x its HBM floor of 9.1 ms`; runs whose bytes or FLOPs exceed the peaks are below it."""
    ratio = time.step.value_s / floor.floor_s
    times = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"
    peak = "" if floor.peak == "bf16" else f" at the {floor.peak} peak"
    peak = peak if floor.binding is BindingResource.COMPUTE else ""
    name = f"{RESOURCES[floor.binding]} floor of {format_seconds(floor.floor_s)}{peak}"
    return f"{times} x its {name}"


def _clauses(floor: StepFloor, max_causes: int) -> Iterator[str]:
    """The largest causes with their seconds, `1.66 ms exposed tp communication`, and the sum of the others."""
    shown = [cause for cause in floor.causes if cause.cause != OTHER][:max_causes]
    for cause in shown:
        yield f"{format_seconds(cause.seconds)} {_noun(cause)}"
    rest_s = sum(cause.seconds for cause in floor.causes if cause not in shown)
    if rest_s > MIN_FRAC * sum(cause.seconds for cause in floor.causes):
        yield f"{format_seconds(rest_s)} {OTHER if shown else 'of unknown cause'}"


def _noun(cause: FloorCause) -> str:
    """The cause as the words after its seconds."""
    if cause.cause.startswith(EXPOSED_OVER):
        return f"exposed {cause.cause.removeprefix(EXPOSED_OVER)} communication"
    return cause.cause
