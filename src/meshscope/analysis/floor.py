"""The least time of a step on its hardware, where the rest of its time goes, and a sentence that says both."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshscope.analysis.roofline import BindingResource, device_peaks
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import Activity, ActivityTime, PartCost, StepTime
from meshscope.spec.hardware.chips import Chip
from meshscope.spec.hardware.precision import peak_dtype, product_speedup
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_seconds

MIN_FRAC = 0.01  # of the step; smaller causes are added up
OTHER = "other"
PADDING = "padding"
SLOW_HBM = "HBM below peak"
# Causes by the activity that leaves the binding resource unused.
CAUSES = {
    Activity.MATMUL: "matmuls below peak",
    Activity.KERNEL: "kernels below peak",
    Activity.RELAYOUT: "relayouts",
    Activity.GATHER: "gathers of rows",
    Activity.ELEMENTWISE: "element-wise passes",
    Activity.SMALL: "small operations",
    Activity.EXPOSED: "exposed",
    Activity.COPY: "waiting for copies",
    Activity.BUBBLE: "pipeline bubble",
}
MAX_CAUSES = 2
NEAR_FLOOR = (
    1.5  # times the floor; a step below it is described by its rate, others by their causes
)
MIN_SHARE = 0.05  # of the step; smaller causes are not worth a clause
DOMINANT = 0.5  # of the step; a larger cause is named first
EXPOSED_OVER = "exposed over "


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorCause:
    """Seconds beyond the floor in which one activity leaves the binding resource unused.

    They are negative for collectives that overlap other work, if the links bind the step.
    """

    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Lower bounds of a step on one device in seconds; the largest is its floor.

    `link_s` assumes all links of the chip at once. The `causes`, the longest first, add up to the step
    minus its floor.
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
    binds, less the time in which the HBM is busy where the HBM does. The time in which it is busy beyond
    bytes / peak is a cause of its own. An activity whose products fill tiles of the matrix units with
    padding yields these FLOPs to `padding`.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model" (2009).
    """
    peaks = device_peaks(chip)
    if peaks is None or chip.link_bytes_per_s is None or not any(p.hbm_bytes for p in time.parts):
        return None
    links_bytes_per_s = chip.link_bytes_per_s * 2 * chip.n_grid_dims
    rates = {
        BindingResource.HBM: peaks.hbm_bytes_per_s,
        BindingResource.COMPUTE: peaks.flops_per_s * _speedup(weight_dtype, chip),
        BindingResource.INTERCONNECT: links_bytes_per_s,
    }
    bounds = {r: sum(_work(part, r) for part in time.parts) / rate for r, rate in rates.items()}
    binding = max(bounds, key=lambda resource: bounds[resource])
    beyond_s = time.step.value_s - bounds[binding]
    causes = list(_causes(time.activities, binding, rates[binding]))
    if binding is BindingResource.HBM and causes:
        slow_s = beyond_s - sum(cause.seconds for cause in causes)
        causes.append(FloorCause(cause=SLOW_HBM, seconds=slow_s))
    return StepFloor(
        hbm_s=bounds[BindingResource.HBM],
        compute_s=bounds[BindingResource.COMPUTE],
        link_s=bounds[BindingResource.INTERCONNECT],
        binding=binding,
        peak="bf16" if weight_dtype is None else peak_dtype(weight_dtype, chip),
        causes=_ranked(causes, beyond_s, MIN_FRAC * time.step.value_s),
    )


def _speedup(weight_dtype: str | None, chip: Chip) -> float:
    """Peak of the products over the bf16 peak; 1 if the format of the weights is unknown."""
    return 1.0 if weight_dtype is None else product_speedup(weight_dtype, chip)


def _work(part: PartCost, resource: BindingResource) -> float:
    match resource:
        case BindingResource.HBM:
            return part.hbm_bytes or 0.0
        case BindingResource.COMPUTE:
            return part.flops or 0.0
        case BindingResource.INTERCONNECT:
            return part.wire_bytes or 0.0


def _causes(
    activities: Iterable[ActivityTime], binding: BindingResource, rate: float
) -> Iterator[FloorCause]:
    for spent in activities:
        cause = CAUSES[spent.activity] + (f" over {spent.axis}" if spent.axis else "")
        match binding:
            case BindingResource.HBM:
                used_s = spent.hbm_busy_s
            case BindingResource.COMPUTE:
                used_s = spent.flops / rate
            case BindingResource.INTERCONNECT:
                used_s = spent.wire_bytes / rate
        padding_s = 0.0
        if binding is BindingResource.COMPUTE:
            padding_s = min(max(0.0, spent.seconds - used_s), spent.padding_flops / rate)
        yield FloorCause(cause=PADDING, seconds=padding_s)
        yield FloorCause(cause=cause, seconds=spent.seconds - used_s - padding_s)


def _ranked(
    causes: Iterable[FloorCause], beyond_s: float, least_s: float
) -> tuple[FloorCause, ...]:
    """The causes, the longest first; those below `least_s` are added up with what is unknown."""
    totals: dict[str, float] = {}
    for cause in causes:
        totals[cause.cause] = totals.get(cause.cause, 0.0) + cause.seconds
    large = {cause: seconds for cause, seconds in totals.items() if abs(seconds) >= least_s}
    ranked = sorted(large.items(), key=lambda item: -item[1])
    rest_s = beyond_s - sum(large.values())
    shown = tuple(FloorCause(cause=cause, seconds=seconds) for cause, seconds in ranked)
    return (*shown, FloorCause(cause=OTHER, seconds=rest_s)) if rest_s else shown


def why_sentences(run: RunRecord) -> dict[Phase, str]:
    """A sentence for each modeled phase of the strongest source that has times."""
    experiment = run.manifest.experiment
    chip, weight_dtype = experiment.chip, experiment.weight_dtype
    sources = [source for source in Source if run.times_of(source)]
    times = run.times_of(sources[-1]) if sources else ()
    return {time.phase: why_sentence(time, chip, weight_dtype) for time in times}


def why_sentence(time: StepTime, chip: Chip | None, weight_dtype: str | None = None) -> str:
    """What binds the step and where its time beyond the floor goes, with seconds and shares."""
    floor = None if chip is None else step_floor(time, chip, weight_dtype)
    if floor is None or not floor.floor_s:
        return f"{time.phase} takes {format_seconds(time.step.value_s)}"
    causes = sorted(_named(floor), key=lambda cause: -cause.seconds)
    if causes and causes[0].seconds >= DOMINANT * time.step.value_s:
        return _by_cause(time, floor, causes)
    if time.step.value_s <= NEAR_FLOOR * floor.floor_s:
        head, separator = _by_rate(time, floor), "; beyond it "
        causes = [cause for cause in causes if cause.cause != SLOW_HBM]  # the rate says it
    else:
        head, separator = f"{time.phase} takes {_of_floor(time, floor)}", ": "
    clauses = ", ".join(_clauses(time, causes))
    return f"{head}{separator}{clauses}" if clauses else head


def _named(floor: StepFloor) -> Iterator[FloorCause]:
    """The causes that lengthen the step; runs of older versions know only `other`."""
    return (cause for cause in floor.causes if cause.seconds > 0 and cause.cause != OTHER)


def _by_cause(time: StepTime, floor: StepFloor, causes: list[FloorCause]) -> str:
    """The sentence of a step with one cause that takes most of it."""
    first, *rest = causes
    seconds, step = format_seconds(first.seconds), format_seconds(time.step.value_s)
    clauses = list(_clauses(time, rest))
    clauses.append(f"the {_RESOURCES[floor.binding]} floor is {format_seconds(floor.floor_s)}")
    return f"{seconds} of the {step} of {time.phase} are {_noun(first)}; {', '.join(clauses)}"


def _by_rate(time: StepTime, floor: StepFloor) -> str:
    """The work of a step near its floor, and the fraction of the peak rate that it reaches."""
    rate = f"{floor.floor_s / time.step.value_s:.0%}"
    match floor.binding:
        case BindingResource.HBM:
            n_bytes = format_bytes(time.hbm_bytes)
            return f"{time.phase} reads and writes {n_bytes} a device at {rate} of the HBM rate"
        case BindingResource.COMPUTE:
            return f"{time.phase} runs at {rate} of the {floor.peak} peak"
        case BindingResource.INTERCONNECT:
            n_bytes = format_bytes(time.wire_bytes)
            return f"{time.phase} sends {n_bytes} a device at {rate} of the rate of all links"


_RESOURCES = {
    BindingResource.HBM: "HBM",
    BindingResource.COMPUTE: "compute",
    BindingResource.INTERCONNECT: "link",
}


def _of_floor(time: StepTime, floor: StepFloor) -> str:
    """`3.7 x its HBM floor of 9.1 ms`."""
    ratio = f"{time.step.value_s / floor.floor_s:.1f} x its {_RESOURCES[floor.binding]} floor"
    return f"{ratio} of {format_seconds(floor.floor_s)}"


def _clauses(time: StepTime, causes: list[FloorCause]) -> Iterator[str]:
    """The largest causes with their seconds, `1.66 ms exposed tp communication`."""
    large = [c for c in causes if c.seconds >= MIN_SHARE * time.step.value_s]
    for cause in large[:MAX_CAUSES]:
        yield f"{format_seconds(cause.seconds)} {_noun(cause)}"


def _noun(cause: FloorCause) -> str:
    """The cause as the words after its seconds."""
    if cause.cause.startswith(EXPOSED_OVER):
        return f"exposed {cause.cause.removeprefix(EXPOSED_OVER)} communication"
    return cause.cause
