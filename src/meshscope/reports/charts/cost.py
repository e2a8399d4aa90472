"""Bars of the step time and its parts, and of a request by part of the model and by axis."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from meshscope.analysis.catalog import MetricInputs, StepDuration
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import DeviceLoad
from meshscope.events.step_time import StepTime
from meshscope.reports.charts.spec import (
    TIP,
    Bar,
    Chart,
    Layer,
    axis,
    bars_chart,
    choice,
    color_by,
    columnar,
    flattened,
    layered,
    marks,
    name_of,
    number_text,
    quantity,
    row_texts,
)
from meshscope.reports.model import UNKNOWN_LABEL, Figure, Unit, joined
from meshscope.units import format_seconds

COMPUTE, MEMORY, STAGES, IDLE = "compute", "waiting for memory", "waiting for stages", "idle"
COLLECTIVES = "collectives, hidden or not"
EXPOSED = "exposed over "
WHOLE = "step"  # of a step whose parts are unknown
MAX_CHANGES = 9  # named rows of a waterfall
LEAST_FRAC = 0.01  # of the longer side; smaller changes of a waterfall are one row
BEST, IDEAL = "fastest of each size", "ideal scaling"
WHISKER = "The line over the end of a bar is the interval of the estimate."
WATERFALL = "From the baseline at the top to the compared bar at the bottom: time that each part of the model, exposed communication over each axis, and waiting add (orange) or save (green)."
SCALING = (
    "The line joins the fastest run of each size. Dashed: ideal scaling from the smallest size."
)

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
        )
        for time in inputs.times
    ]
    measured = inputs.measured
    for step in inputs.steps if measured is not None else ():
        if step.source is Source.MEASURED and measured is not None:
            loads = [load for load in measured.loads if load.phase is step.phase]
            bars.append(CostBar(**asdict(step), segments=_measured_segments(loads, step.step_s)))
    phases, sources = list(Phase), list(Source)
    return tuple(sorted(bars, key=lambda b: (phases.index(b.phase), sources.index(b.source))))


def segments_of(time: StepTime) -> tuple[tuple[str, float], ...]:
    """Compute, exposed communication by axis, waits for copies and for other stages."""
    exposed = [(f"{EXPOSED}{axis}", seconds) for axis, seconds in time.exposed_by_axis_s.items()]
    copies_s = max(0.0, time.idle_s - time.bubble_s)
    segments = [(COMPUTE, time.compute_s), *exposed, (MEMORY, copies_s), (STAGES, time.bubble_s)]
    return tuple((label, seconds) for label, seconds in segments if seconds > 0)


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


def step_breakdowns(inputs: MetricInputs, bars: Mapping[Phase, CostBar]) -> dict[Phase, Breakdown]:
    """The seconds of each step: compute by part, exposed communication by axis, and waiting.

    They sum to the step. A measured step has no parts.
    """
    times = {(t.source, t.phase): t for t in inputs.times if any(p.compute_s for p in t.parts)}
    breakdowns: dict[Phase, Breakdown] = {}
    for phase, bar in bars.items():
        time = times.get((bar.source, phase)) if bar.segments else None
        whole = dict(bar.segments) or {WHOLE: bar.step_s}
        breakdowns[phase] = whole if time is None else time_breakdown(time)
    return breakdowns


def time_breakdown(time: StepTime) -> Breakdown:
    """A modeled step: compute by part, exposed communication by axis, and waiting."""
    parts = ((part.part or BETWEEN_PARTS, part.compute_s) for part in time.parts if part.compute_s)
    waits = (segment for segment in segments_of(time) if segment[0] != COMPUTE)
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
    columns = "span side part s whole"
    value = number_text("abs(datum.d)", Unit.SECONDS, digits=3)
    least = f"{LEAST_FRAC}*max(datum.before,datum.after)"
    transforms = [
        flattened(columns),
        _calculate("end", "[0, 1]"),
        {"flatten": ["end"]},
        {"filter": "datum.span===span && datum.side===(datum.end ? compared : baseline)"},
        _calculate("b", "datum.whole || datum.end ? 0 : datum.s"),
        _calculate("a", "datum.whole || !datum.end ? 0 : datum.s"),
        {"joinaggregate": [{"op": "sum", "field": "b", "as": "before"}, {"op": "sum", "field": "a", "as": "after"}]},
        _calculate("key", "datum.whole ? datum.end : datum.part"),
        _calculate("d", "datum.whole || datum.end ? datum.s : -datum.s"),
        _summed("key", "whole", "before", "after"),
        _calculate("size", "datum.whole ? 0 : abs(datum.d)"),
        {"window": [{"op": "row_number", "as": "rank"}], "groupby": ["whole"], "sort": [{"field": "size", "order": "descending"}]},
        _calculate("order", f"datum.whole ? datum.key*1000 : datum.rank<={MAX_CHANGES} && datum.size>={least} ? datum.rank : 999"),
        _calculate("name", "datum.whole ? (datum.key ? compared : baseline) : datum.order===999 ? 'other' : datum.key"),
        _summed("order", "name", "whole", "before", "after"),
        {"filter": f"datum.whole || datum.order<999 || abs(datum.d)>={least}/10"},
        _calculate("step", "datum.whole ? 0 : datum.d"),
        {"window": [{"op": "sum", "field": "step", "as": "run"}], "sort": [{"field": "order"}], "frame": [None, 0]},
        _calculate("to", "datum.whole ? datum.d : datum.before+datum.run"),
        _calculate("from", "datum.whole ? datum.d : datum.to-datum.d"),
        {"joinaggregate": [{"op": "min", "field": "to", "as": "lowest"}, {"op": "max", "field": "to", "as": "most"}]},
        # The axis starts near the shortest bar if the differences are much smaller.
        _calculate("low", "datum.lowest>0.5*datum.most ? datum.lowest-0.3*(datum.most-datum.lowest) : 0"),
        _calculate("from", "datum.whole ? datum.low : datum.from"),
        _calculate("sign", "datum.whole ? '' : datum.d>0 ? '+' : '\u2212'"),
        _calculate("factor", "datum.order===1000 && datum.before ? ', '+format(datum.after/datum.before,'.3~r')+' x' : ''"),
        _calculate("text", f"datum.sign+{value}+datum.factor"),
        _calculate("tip", "datum.name+'\\n'+datum.text"),
        _calculate("color", "datum.whole ? 'var(--gray)' : datum.d>0 ? 'var(--red)' : 'var(--green)'"),
    ]  # fmt: skip
    y: Layer = {"field": "order", "type": "ordinal", "axis": None, "scale": {"padding": 0}}
    encoding: Layer = {
        "y": y,
        "x": quantity("from", axis(Unit.SECONDS), zero=False, nice=False),
        "x2": {"field": "to"},
        "tooltip": TIP,
        "color": {"field": "color", "type": "nominal", "scale": None},
    }
    return Chart(
        kind="waterfall",
        title="What the difference is made of",
        description=f"{joined(sides)} by part of the model and axis",
        spec=layered(
            marks("bar", encoding, height=16, yOffset=8),
            *row_texts(None, {"field": "text"}, y=y, dy=-9),
            height={"step": 38},
            data={"values": [columnar(columns, rows)]},
            transform=transforms,
            params=[
                choice("span", "time of", list(spans)),
                choice("baseline", "baseline", sides),
                choice("compared", "compared", sides, at=1),
            ],
        ),
        note=WATERFALL,
    )


def _calculate(name: str, expression: str) -> Layer:
    return {"calculate": expression, "as": name}


def _summed(*keys: str) -> Layer:
    return {"aggregate": [{"op": "sum", "field": "d", "as": "d"}], "groupby": list(keys)}


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
    joining: list[Layer] = [
        {"n": n, "s": s, "line": line, "order": i}
        for i, n in enumerate(fastest)
        for line, s in ((BEST, fastest[n]), (IDEAL, first_s * first / n))
    ]
    devices = axis(title="devices", values=list(fastest), grid=False)
    at: Layer = {
        "x": quantity("n", devices, type="log", base=2, nice=False, padding=20),
        "y": quantity("s", axis(Unit.SECONDS), zero=True, nice=True),
    }
    dash: Layer = {"field": "line", "type": "nominal", "scale": {"domain": [BEST, IDEAL], "range": [[1, 0], [4, 4]]}, "legend": {"title": None, "orient": "bottom"}}  # fmt: skip
    order: Layer = {"strokeDash": dash, "order": {"field": "order"}}
    lines = marks("line", {**at, **order}, joining, stroke="var(--soft)", strokeWidth=1.5)
    values: list[Layer] = [
        {"n": n, "s": s, "run": name, "tip": f"{name}, {n} devices\n{phase} step: {format_seconds(s)}"}
        for n, s, name in named
    ]  # fmt: skip
    color = {"color": color_by("run", [name for *_, name in named]), "tooltip": TIP}
    dots = marks("point", {**at, **color}, values, filled=True, size=90, opacity=1)
    return Chart(
        kind="scaling",
        name=f"scaling-{phase}",
        title=f"{phase.capitalize()} step time over devices",
        description="; ".join(f"{name} on {n} devices {format_seconds(s)}" for n, s, name in named),
        spec=layered(
            lines,
            dots,
            height=220,
            resolve={"scale": {"color": "independent", "strokeDash": "independent"}},
        ),
        note=SCALING,
    )
