"""Bars of the step time and its parts, and of a request by part of the model and by axis."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from meshscope.analysis.catalog import MetricInputs, StepDuration
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime
from meshscope.reports.charts.spec import (
    Bar,
    Chart,
    Layer,
    bars_chart,
    chart,
    choice,
    color_by,
    columnar,
    name_of,
    number_text,
)
from meshscope.reports.model import UNKNOWN_LABEL, Figure, Unit, joined
from meshscope.units import format_seconds

COMPUTE, MEMORY, STAGES, IDLE = "compute", "waiting for memory", "waiting for stages", "idle"
COLLECTIVES = "collectives, hidden or not"
EXPOSED = "exposed over "
WHOLE = "step"  # of a step whose parts are unknown
WHISKER = "The line over the end of a bar is the interval of the estimate."

Breakdown = Mapping[str, float]  # seconds by part of the model, exposed axis, and reason to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBar(StepDuration):
    """One step of a phase: `segments` are (label, seconds), which sum to `step_s`, as `breakdown` does.

    `low_s` and `high_s` bound the step; null if the bounds are unknown.
    """

    low_s: float | None = None
    high_s: float | None = None
    segments: tuple[tuple[str, float], ...]
    breakdown: Breakdown  # with parts of the model, if they are known


def cost_bars(inputs: MetricInputs) -> tuple[CostBar, ...]:
    """A bar for each phase and source with a step time, prefill first and weaker sources first."""
    bases = {(step.source, step.phase): step.basis for step in inputs.steps}
    bars = [
        CostBar(
            source=time.source,
            phase=time.phase,
            step_s=time.step.value_s,
            low_s=time.step.low_s,
            high_s=time.step.high_s,
            basis=bases.get((time.source, time.phase), UNKNOWN_LABEL),
            segments=segments_of(time),
            breakdown=time_breakdown(time) or {WHOLE: time.step.value_s},
        )
        for time in inputs.times
    ]
    for step in inputs.steps:
        if step.source is Source.MEASURED and inputs.measured is not None:
            loads = [load for load in inputs.measured.loads if load.phase is step.phase]
            # The timed step, divided in proportion to the mean profiled step of all devices.
            window_s = sum(load.window_s for load in loads)
            parts = {
                COMPUTE: sum(load.busy_s - load.collective_s for load in loads),
                COLLECTIVES: sum(load.collective_s for load in loads),
                IDLE: window_s - sum(load.busy_s for load in loads),
            }
            segments = tuple((n, step.step_s * s / window_s) for n, s in parts.items() if s > 0)
            whole = dict(segments) or {WHOLE: step.step_s}
            bars.append(CostBar(**asdict(step), segments=segments, breakdown=whole))
    phases, sources = list(Phase), list(Source)
    return tuple(sorted(bars, key=lambda b: (phases.index(b.phase), sources.index(b.source))))


def segments_of(time: StepTime) -> tuple[tuple[str, float], ...]:
    """Compute, exposed communication by axis, waits for copies and for other stages."""
    exposed = [(f"{EXPOSED}{axis}", seconds) for axis, seconds in time.exposed_by_axis_s.items()]
    copies_s = max(0.0, time.idle_s - time.bubble_s)
    segments = [(COMPUTE, time.compute_s), *exposed, (MEMORY, copies_s), (STAGES, time.bubble_s)]
    return tuple((label, seconds) for label, seconds in segments if seconds > 0)


def time_breakdown(time: StepTime) -> Breakdown:
    """A modeled step: compute by part, if the parts are known, exposed communication by axis, and waiting."""
    parts = [(part.part or BETWEEN_PARTS, part.compute_s) for part in time.parts if part.compute_s]
    waits = (one for one in segments_of(time) if not parts or one[0] != COMPUTE)
    return dict(chain(parts, waits))


def request_breakdown(steps: Mapping[Phase, Breakdown], n_decode_steps: int) -> Breakdown:
    """The seconds of a request: one prefill step and all decode steps, named `prefill mlp` and so on."""
    counts = {Phase.PREFILL: 1, Phase.DECODE: n_decode_steps}
    return {
        f"{phase} {name}": seconds * counts[phase]
        for phase, step in steps.items()
        for name, seconds in step.items()
    }


def cost_charts(bars: Sequence[tuple[str, CostBar]]) -> Iterator[Chart]:
    """The named bars of each phase with their intervals."""
    for phase in Phase:
        rows: list[Bar] = []
        for name, bar in bars:
            if bar.phase is phase:
                ends = bar.low_s, bar.high_s
                step = Figure(value=bar.step_s, unit=Unit.SECONDS, low=ends[0], high=ends[1])
                segments = bar.segments or [("no breakdown", bar.step_s)]
                rows.append(Bar(name, segments, step.text_with_range, *ends))
        title, has_ends = f"Time of one {phase} step", any(row.low is not None for row in rows)
        if rows:
            note = WHISKER if has_ends else ""
            yield bars_chart(f"cost-{phase}", title, rows, Unit.SECONDS, note=note)


def waterfall_chart(names: Sequence[str], spans: Mapping[str, Sequence[Breakdown]]) -> Chart:
    """From a chosen baseline's time to another side's, one step for each part or axis.

    `spans` has the breakdown of every side, the best first, for the request or a step.
    """
    sides = [name_of(name) for name in names]
    rows = [
        (span, side, name_of(part), seconds, is_total)
        for span, breakdowns in spans.items()
        for side, breakdown in zip(sides, breakdowns, strict=True)
        for is_total, parts in ((False, breakdown), (True, {"": sum(breakdown.values())}))
        for part, seconds in parts.items()
    ]
    return chart(
        "waterfall",
        f"{joined(sides)} by part of the model and axis",
        rows=[columnar("span side part s whole", rows)],
        value=number_text("abs(datum.d)", Unit.SECONDS, digits=3),
        params=[
            choice("span", "time of", list(spans)),
            choice("baseline", "baseline", sides),
            choice("compared", "compared", sides, at=1),
        ],
    )


def scaling_charts(
    runs: Iterable[tuple[str, MetricInputs, Mapping[Phase, CostBar]]], min_sizes: int
) -> Iterator[Chart]:
    """Step time over devices for each phase in which the named runs have at least so many sizes."""
    points: dict[Phase, list[tuple[int, float, str]]] = {phase: [] for phase in Phase}
    for name, inputs, bars in runs:
        for phase, bar in bars.items() if inputs.n_devices else ():
            points[phase].append((inputs.n_devices or 0, bar.step_s, name))
    for phase, of_phase in points.items():
        if len({n for n, *_ in of_phase}) >= min_sizes:
            yield _scaling_chart(phase, [(n, s, name_of(name)) for n, s, name in sorted(of_phase)])


def _scaling_chart(phase: Phase, named: Sequence[tuple[int, float, str]]) -> Chart:
    """The points are (devices, seconds, name), by devices."""
    fastest = {n: min(s for m, s, _ in named if m == n) for n, *_ in named}
    (first, first_s), *_ = fastest.items()
    values: list[Layer] = [
        {"n": n, "s": s, "run": name, "tip": f"{name}, {n} devices\n{phase} step: {format_seconds(s)}"}
        for n, s, name in named
    ]  # fmt: skip
    return chart(
        "scaling",
        "; ".join(f"{name} on {n} devices {format_seconds(s)}" for n, s, name in named),
        name=f"scaling-{phase}",
        title=f"{phase.capitalize()} step time over devices",
        sizes=list(fastest),
        lines=[
            {"n": n, "s": s, "line": line, "order": i}
            for i, n in enumerate(fastest)
            for line, s in (("fastest of each size", fastest[n]), ("ideal scaling", first_s * first / n))
        ],
        points=values,
        color=color_by("run", [name for *_, name in named]),
    )  # fmt: skip
