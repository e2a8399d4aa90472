"""Bars of the step time and its parts, and of a request by part of the model and by axis."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain

from meshscope.analysis.metric_inputs import MetricInputs, StepDuration
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import DeviceLoad
from meshscope.events.step_time import StepTime
from meshscope.reports.model import UNKNOWN_LABEL

COMPUTE, MEMORY, STAGES, IDLE = "compute", "waiting for memory", "waiting for stages", "idle"
COLLECTIVES = "collectives, hidden or not"
EXPOSED = "exposed over "
WHOLE = "step"  # of a step whose parts are unknown

Breakdown = Mapping[str, float]  # seconds by part of the model, exposed axis, and reason to wait


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


def step_breakdowns(inputs: MetricInputs, bars: Mapping[Phase, CostBar]) -> dict[Phase, Breakdown]:
    """The seconds of each step: compute by part, exposed communication by axis, and waiting.

    They sum to the step. A measured step has no parts.
    """
    return {phase: dict(_breakdown(inputs, bar)) for phase, bar in bars.items()}


def _breakdown(inputs: MetricInputs, bar: CostBar) -> Iterator[tuple[str, float]]:
    times = (t for t in inputs.times if (t.source, t.phase) == (bar.source, bar.phase))
    parts = [part for time in times for part in time.parts if part.compute_s]
    yield from ((part.part or BETWEEN_PARTS, part.compute_s) for part in parts)
    rest = (segment for segment in bar.segments if not (parts and segment[0] == COMPUTE))
    yield from rest if bar.segments else [(WHOLE, bar.step_s)]


def time_breakdown(time: StepTime) -> Breakdown:
    """A modeled step: compute by part, exposed communication by axis, and waiting."""
    parts = ((part.part or BETWEEN_PARTS, part.compute_s) for part in time.parts if part.compute_s)
    waits = (segment for segment in segments_of(time) if segment[0] != COMPUTE)
    return dict(chain(parts, waits))


def request_breakdown(steps: Mapping[Phase, Breakdown], n_decode_steps: int) -> Breakdown:
    """The seconds of a request: one prefill step and all decode steps, named `prefill mlp` and so on."""
    counts = {Phase.PREFILL: 1, Phase.DECODE: n_decode_steps}
    named = (
        ((f"{phase} {name}", seconds * counts[phase]) for name, seconds in step.items())
        for phase, step in steps.items()
    )
    return dict(chain.from_iterable(named))
