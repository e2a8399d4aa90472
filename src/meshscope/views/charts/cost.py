"""Bars of the step time and its parts."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from meshscope.analysis.metric_inputs import MetricInputs, StepDuration
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import DeviceLoad
from meshscope.events.step_time import StepTime
from meshscope.views.model import UNKNOWN_LABEL

COMPUTE, MEMORY, STAGES, IDLE = "compute", "waiting for memory", "waiting for stages", "idle"
COLLECTIVES = "collectives, hidden or not"
EXPOSED = "exposed over "


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBar(StepDuration):
    """One step of a phase: `segments` are (label, seconds), which sum to `step_s`.

    `low_s` and `high_s` bound the step; null if the bounds are unknown.
    """

    low_s: float | None = None
    high_s: float | None = None
    segments: tuple[tuple[str, float], ...]


def cost_bars(inputs: MetricInputs) -> tuple[CostBar, ...]:
    """A bar for each phase and source with a step time, prefill first and weaker sources first."""
    bars = [*_modeled_bars(inputs), *_measured_bars(inputs)]
    phases, sources = list(Phase), list(Source)
    return tuple(sorted(bars, key=lambda b: (phases.index(b.phase), sources.index(b.source))))


def segments_of(time: StepTime) -> tuple[tuple[str, float], ...]:
    """Compute, exposed communication by axis, waits for copies and for other stages."""
    exposed = [(f"{EXPOSED}{axis}", seconds) for axis, seconds in time.exposed_by_axis_s.items()]
    copies_s = max(0.0, time.idle_s - time.bubble_s)
    segments = [(COMPUTE, time.compute_s), *exposed, (MEMORY, copies_s), (STAGES, time.bubble_s)]
    return tuple((label, seconds) for label, seconds in segments if seconds > 0)


def _modeled_bars(inputs: MetricInputs) -> Iterator[CostBar]:
    bases = {(step.source, step.phase): step.basis for step in inputs.steps}
    for time in inputs.times:
        yield CostBar(
            source=time.source,
            phase=time.phase,
            step_s=time.step.value_s,
            low_s=time.step.low_s,
            high_s=time.step.high_s,
            basis=bases.get((time.source, time.phase), UNKNOWN_LABEL),
            segments=segments_of(time),
        )


def _measured_bars(inputs: MetricInputs) -> Iterator[CostBar]:
    if inputs.measured is None:
        return
    for step in inputs.steps:
        if step.source is Source.MEASURED:
            loads = [load for load in inputs.measured.loads if load.phase is step.phase]
            yield CostBar(**asdict(step), segments=_measured_segments(loads, step.step_s))


def _measured_segments(loads: list[DeviceLoad], step_s: float) -> tuple[tuple[str, float], ...]:
    """The timed step, divided in proportion to the mean profiled step of all devices."""
    window_s = sum(load.window_s for load in loads)
    if not window_s:
        return ()
    segments = (
        (COMPUTE, sum(load.busy_s - load.collective_s for load in loads)),
        (COLLECTIVES, sum(load.collective_s for load in loads)),
        (IDLE, window_s - sum(load.busy_s for load in loads)),
    )
    return tuple((label, step_s * seconds / window_s) for label, seconds in segments if seconds > 0)


def strongest_costs(bars: Iterable[CostBar]) -> dict[Phase, CostBar]:
    """The bar of each phase by the strongest source, from `cost_bars`."""
    return {bar.phase: bar for bar in bars}  # weaker sources come first
