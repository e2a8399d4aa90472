"""What steps cost: bars of their parts, and the front of a search."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from meshscope.analysis.catalog import MetricInputs, StepDuration
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime
from meshscope.reports.charts import spec
from meshscope.reports.loads import load_text
from meshscope.reports.model import UNKNOWN_LABEL, Figure, Unit
from meshscope.reports.plan import choice_name
from meshscope.serving.loads import LoadTable
from meshscope.serving.objective import Objective
from meshscope.serving.search import Choice, PlanSearch
from meshscope.units import format_rate, format_seconds

COMPUTE, MEMORY, STAGES, IDLE = "compute", "waiting for memory", "waiting for stages", "idle"
COLLECTIVES = "collectives, hidden or not"
EXPOSED = "exposed over "
WHOLE = "step"  # of a step whose parts are unknown
WHISKER = "The line over the end of a bar is the interval of the estimate."
OTHER_PLANS = "best of another plan"
TTFT, TPOT, RATE, REQUEST = "TTFT", "TPOT", "request tokens/s per chip", "request"
MAX_PLANS = 8
FRONT = "No choice is better than one of the front in TTFT, TPOT and request tokens/s per chip at once. Hollow: the best choice of other plans. Dashed: the limits."
CLOSEST_NOTE = "The choice that comes closest to the limits, and those with the least TTFT and the least TPOT. Dashed: the limits."

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


def cost_charts(bars: Sequence[tuple[str, CostBar]]) -> Iterator[spec.Chart]:
    """The named bars of each phase with their intervals."""
    for phase in Phase:
        rows: list[spec.Bar] = []
        for name, bar in bars:
            if bar.phase is phase:
                ends = bar.low_s, bar.high_s
                step = Figure(value=bar.step_s, unit=Unit.SECONDS, low=ends[0], high=ends[1])
                segments = bar.segments or [("no breakdown", bar.step_s)]
                rows.append(spec.Bar(name, segments, step.text_with_range, *ends))
        title, has_ends = f"Time of one {phase} step", any(row.low is not None for row in rows)
        if rows:
            note = WHISKER if has_ends else ""
            yield spec.bars_chart(f"cost-{phase}", title, rows, Unit.SECONDS, note=note)


def front_chart(
    search: PlanSearch, shown: Sequence[Choice], others: Sequence[Choice] = ()
) -> spec.Chart:
    """Choices by two of TTFT, TPOT and request tokens/s per chip, the best first; the limits are dashed."""
    names = ("winner", "Pareto front") if search.front else ("closest", "least latency")
    groups = [(names[0], shown[:1]), (names[1], shown[1:]), (OTHER_PLANS, others)]
    plans = dict.fromkeys(spec.name_of(c.experiment.plan) for c in (*shown, *others))
    named = list(plans)[:MAX_PLANS]  # with a color of their own
    points: list[spec.Layer] = []
    for group, choices in groups:
        for one in choices:
            plan, rate = spec.name_of(one.experiment.plan), one.tokens_per_s_per_chip
            figures = {TTFT: one.ttft_s, TPOT: one.tpot_s, RATE: rate}
            texts = {TTFT: format_seconds(one.ttft_s), TPOT: format_seconds(one.tpot_s)}
            said = (f"{name} {text}" for name, text in {**texts, RATE: f"{rate:,.3g}"}.items())
            tip = f"{spec.name_of(choice_name(one))} ({group})\n{', '.join(said)}"
            color = plan if plan in named else "other plans"
            points.append({"plan": color, "group": group, **figures, "tip": tip})
    measures = [TTFT, TPOT, RATE]
    shapes = {names[0]: "diamond", names[1]: "circle"} | ({OTHER_PLANS: "square"} if others else {})
    described = (
        f"{choice_name(one)}: TTFT {format_seconds(one.ttft_s)}, TPOT {format_seconds(one.tpot_s)}, {one.tokens_per_s_per_chip:,.0f} {RATE}"
        for one in shown[:3]
    )
    return spec.chart(
        "front",
        "; ".join(described),
        name="front",
        note=FRONT if search.front else CLOSEST_NOTE,
        params=[spec.choice("across", "across", measures), spec.choice("up", "up", measures, at=2)],
        **_scales(points, measures, search.objective),
        best=names[0],
        groups=list(shapes),
        shapes=list(shapes.values()),
        points=points[::-1],  # the best is drawn last, above the others
    )


def _scales(
    points: Sequence[spec.Layer], measures: Sequence[str], objective: Objective
) -> dict[str, Any]:
    """The limits of an objective, ticks that cover them and the points, and a color for each plan."""
    limits: list[spec.Layer] = [
        {"measure": name, "v": v, "tip": f"limit of {name}: {format_seconds(v)}"}
        for name, v in ((TTFT, objective.ttft_s), (TPOT, objective.tpot_s))
        if v is not None
    ]
    every = [*points, *({n["measure"]: n["v"]} for n in limits)]
    ticks = {n: spec.log_ticks((v[n] for v in every if n in v), is_fine=True) for n in measures}
    color = spec.color_by("plan", [point["plan"] for point in points])
    return {"limits": limits, "ticks": json.dumps(ticks), "color": color}


def loads_chart(table: LoadTable) -> spec.Chart:
    """Output tokens per second per chip against latency, a line for each plan; the knee of each is large."""
    points: list[spec.Layer] = []
    for curve in table.curves:
        for one in curve.points:
            figures = one.figures
            named = ((TPOT, figures.tpot), (TTFT, figures.ttft), (REQUEST, figures.e2e))
            times = {name: of.p50_s for name, of in named if of is not None}
            said = ", ".join(f"{name} {format_seconds(value)}" for name, value in times.items())
            tip = f"{curve.plan} at {load_text(table, one.load)}\n{format_rate(figures.output_tokens_per_s)} tokens/s, {said}"
            rate = figures.output_tokens_per_s / curve.placed.n_chips
            points.append({"plan": curve.plan, "load": one.load, "rate": rate, "knee": one is curve.knee, **times, "tip": tip})  # fmt: skip
    best, measures = table.winner, [TPOT, TTFT, REQUEST]
    return spec.chart(
        "loads",
        f"{best.plan}: knee at {load_text(table, best.knee.load)}",
        name="loads",
        params=[spec.choice("across", "across", measures)],
        points=points,
        **_scales(points, measures, table.objective),
    )
