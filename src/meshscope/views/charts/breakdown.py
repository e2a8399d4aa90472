"""A step and a request divided by part of the model and by axis, to compare runs."""

from collections.abc import Iterator, Mapping
from itertools import chain

from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.views.charts.cost import COMPUTE, CostBar, segments_of

WHOLE = "step"  # of a step whose parts are unknown

Breakdown = Mapping[str, float]  # seconds by part of the model, exposed axis, and reason to wait


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
