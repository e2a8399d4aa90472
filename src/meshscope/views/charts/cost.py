"""Bars of one step: what its time is made of."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import DeviceLoad
from meshscope.events.step_time import StepTime

COMPUTE, MEMORY, STAGES, IDLE = "compute", "waiting for memory", "waiting for stages", "idle"
COLLECTIVES = "collectives, hidden or not"
EXPOSED = "exposed over "


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBar:
    """One step of a phase: `segments` are (what, seconds), which sum to `step_s`.

    `low_s` and `high_s` are between what the step is taken to lie, null where that is not known.
    """

    source: Source
    phase: Phase
    step_s: float
    low_s: float | None
    high_s: float | None
    basis: str
    segments: tuple[tuple[str, float], ...]


def cost_bars(subject: MetricInputs) -> tuple[CostBar, ...]:
    """A bar for each phase and source whose step has a time; prefill first, weaker sources first."""
    bars = [*_modelled(subject), *_measured(subject)]
    phases, sources = list(Phase), list(Source)
    return tuple(sorted(bars, key=lambda b: (phases.index(b.phase), sources.index(b.source))))


def segments_of(time: StepTime) -> tuple[tuple[str, float], ...]:
    """Compute, exposed communication by axis, waiting for copies and for other stages; sums to the step."""
    exposed = [(f"{EXPOSED}{axis}", seconds) for axis, seconds in time.exposed_by_axis_s.items()]
    copies = max(0.0, time.idle_s - time.bubble_s)
    every = [(COMPUTE, time.compute_s), *exposed, (MEMORY, copies), (STAGES, time.bubble_s)]
    return tuple((name, seconds) for name, seconds in every if seconds > 0)


def _modelled(subject: MetricInputs) -> Iterator[CostBar]:
    bases = {(step.source, step.phase): step.basis for step in subject.steps}
    for time in subject.times:
        yield CostBar(
            source=time.source,
            phase=time.phase,
            step_s=time.step.value_s,
            low_s=time.step.low_s,
            high_s=time.step.high_s,
            basis=bases.get((time.source, time.phase), "not known"),
            segments=segments_of(time),
        )


def _measured(subject: MetricInputs) -> Iterator[CostBar]:
    if subject.measured is None:
        return
    for step in subject.steps:
        if step.source is Source.MEASURED:
            loads = [load for load in subject.measured.loads if load.phase is step.phase]
            yield CostBar(
                source=step.source,
                phase=step.phase,
                step_s=step.step_s,
                low_s=None,
                high_s=None,
                basis=step.basis,
                segments=_shares(loads, step.step_s),
            )


def _shares(loads: list[DeviceLoad], step_s: float) -> tuple[tuple[str, float], ...]:
    """The timed step divided as the profiled steps were, by the mean of the devices."""
    window_s = sum(load.window_s for load in loads)
    if not window_s:
        return ()
    compute_s = sum(load.busy_s - load.collective_s for load in loads)
    every = (
        (COMPUTE, compute_s),
        (COLLECTIVES, sum(load.collective_s for load in loads)),
        (IDLE, window_s - sum(load.busy_s for load in loads)),
    )
    return tuple((name, step_s * seconds / window_s) for name, seconds in every if seconds > 0)
