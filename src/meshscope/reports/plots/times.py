"""Plots of step times: breakdowns, scaling over devices, timelines and bursts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from matplotlib.axes import Axes

from meshscope.analysis.catalog import NO_STEP
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import repetition_starts
from meshscope.reports.charts.cost import CostBar, cost_bars, strongest_costs
from meshscope.reports.charts.timeline import (
    StepTimeline,
    TimeSpan,
    axis_bursts,
    step_timelines,
    without_stage,
)
from meshscope.reports.model import Unit
from meshscope.reports.plots.style import (
    BLUE,
    COLORS,
    GRAY,
    MARKERS,
    MIN_VISIBLE_FRAC,
    PARTS,
    Plot,
    PlotRun,
    color_map,
    finished,
    intervals,
    label_text,
    lane_axis,
    new_axes,
    stacked,
    unit_axis,
)
from meshscope.reports.run_label import distinct_labels

MAX_DRAWN_SPANS = 20_000
NO_SCALING = "the runs use the same number of devices, or have no step times"
NO_TIMELINE = "the run keeps no timeline; compiled and measured runs have one"
LANE_HEIGHT = 0.72

ScalingPoint = tuple[int, float, str]  # devices, seconds, label of the run


def cost_plots(run: PlotRun) -> Iterator[Plot]:
    """The time of one step by phase, one bar per source."""
    bars = cost_bars(run.inputs)
    yield from _cost_plots([(bar.source.value, bar) for bar in bars])


def cost_plots_by_run(runs: Sequence[PlotRun]) -> Iterator[Plot]:
    """The time of one step by phase, one bar per run."""
    labels = distinct_labels([run.run for run in runs])
    yield from _cost_plots(
        [
            (label, bar)
            for label, run in zip(labels, runs, strict=True)
            for bar in _strongest(run).values()
        ]
    )


def _cost_plots(labeled_bars: Sequence[tuple[str, CostBar]]) -> Iterator[Plot]:
    if not labeled_bars:
        yield Plot(name="cost", reason=NO_STEP)
    for phase in Phase:
        rows = [(label, bar) for label, bar in labeled_bars if bar.phase is phase]
        if not rows:
            continue
        axes = new_axes(0.7 + 0.45 * len(rows))
        stacked(axes, [(label, bar.segments or [("step", bar.step_s)]) for label, bar in rows])
        intervals(axes, [(bar.low_s, bar.high_s) for _, bar in rows])
        unit_axis(axes.xaxis, Unit.SECONDS)
        yield finished(f"cost-{phase}", axes, f"Time of one {phase} step on one device")


def _strongest(run: PlotRun) -> Mapping[Phase, CostBar]:
    """For each phase the bar of the strongest source."""
    return strongest_costs(cost_bars(run.inputs))


def scaling_plots(runs: Sequence[PlotRun]) -> Iterator[Plot]:
    """Step time over devices: one point per run, the fastest of each size joined by a line."""
    labels = distinct_labels([run.run for run in runs])
    is_drawn = False
    for phase in Phase:
        points = sorted(
            (run.inputs.n_devices, bars[phase].step_s, label)
            for run, label in zip(runs, labels, strict=True)
            if run.inputs.n_devices and phase in (bars := _strongest(run))
        )
        if len({n for n, _, _ in points}) > 1:
            is_drawn = True
            yield _scaling_plot(points, phase)
    if not is_drawn:
        yield Plot(name="scaling", reason=NO_SCALING)


def _scaling_plot(points: Sequence[ScalingPoint], phase: Phase) -> Plot:
    axes = new_axes(3.0)
    fastest = {n: min(s for m, s, _ in points if m == n) for n, _, _ in points}
    (first, first_s), *_ = fastest.items()
    ideal = [first_s * first / n for n in fastest]
    axes.plot([*fastest], ideal, "--", color=GRAY, label="ideal scaling")
    axes.plot([*fastest], [*fastest.values()], color=BLUE, label="fastest of each size")
    for i, (n, seconds, label) in enumerate(points):
        marker, color = MARKERS[i % len(MARKERS)], COLORS[i % len(COLORS)]
        axes.plot([n], [seconds], marker, color=color, label=label_text(label))
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks([*fastest], [str(n) for n in fastest])
    axes.minorticks_off()
    unit_axis(axes.yaxis, Unit.SECONDS)
    axes.set_xlabel("devices")
    heading = f"Time of one {phase} step over devices"
    return finished(f"scaling-{phase}", axes, heading, n_columns=3)


def timeline_plots(run: PlotRun) -> Iterator[Plot]:
    """The timeline of one step of each phase, and of a repetition of its layers."""
    timelines = step_timelines(run.run.path, run.inputs)
    if not timelines:
        yield Plot(name="timeline", reason=NO_TIMELINE)
    for timeline in timelines:
        measured = "-measured" if timeline.source == Source.MEASURED else ""
        name = f"timeline-{timeline.phase}{measured}"
        heading = f"One {timeline.phase} step"
        yield _timeline_plot(name, timeline, (0.0, timeline.end_s), heading)
        if timeline.layer is not None:
            layer, start_s, end_s = timeline.layer
            heading = f"Detail of {timeline.phase}: {layer}"
            yield _timeline_plot(f"{name}-layer", timeline, (start_s, end_s), heading)


def _timeline_plot(
    name: str, timeline: StepTimeline, visible: tuple[float, float], heading: str
) -> Plot:
    lanes = timeline.lanes
    axes = new_axes(0.8 + 0.36 * len(lanes))
    labels = map(without_stage, lanes)
    color = color_map([label for label in labels if label != "core"])
    for row, lane in enumerate(lanes):
        spans = [span for span in timeline.spans if span.lane == lane]
        if without_stage(lane) == "core":
            _draw_core(axes, row, spans, visible)
        else:
            _draw_spans(axes, row, spans, visible, color=color(without_stage(lane)))
    lane_axis(axes, lanes)
    axes.set_xlim(*visible)
    unit_axis(axes.xaxis, Unit.SECONDS)
    return finished(name, axes, heading, n_columns=6)


def _draw_core(
    axes: Axes, row: int, spans: Sequence[TimeSpan], visible: tuple[float, float]
) -> None:
    """Draws the compute lane, one color per part of the model; the legend names the visible parts."""
    least_s = MIN_VISIBLE_FRAC * (visible[1] - visible[0])
    by_part: dict[str, list[TimeSpan]] = {}
    for span in spans:
        part = span.label.partition(",")[0]
        by_part.setdefault(part if part in PARTS else "", []).append(span)
    for part, part_spans in by_part.items():
        drawn_s = _draw_spans(axes, row, part_spans, visible, color=PARTS.get(part, GRAY))
        if drawn_s >= least_s and part:
            axes.barh(0, 0, color=PARTS[part], label=part)


def _draw_spans(
    axes: Axes, row: int, spans: Sequence[TimeSpan], visible: tuple[float, float], *, color: str
) -> float:
    """Draws the visible repetitions of the spans; returns their seconds."""
    bars = [bar for span in spans for bar in _repetitions(span, *visible)]
    axes.broken_barh(bars, (row - LANE_HEIGHT / 2, LANE_HEIGHT), facecolors=color, linewidth=0)
    return sum(duration for _, duration in bars)


def _repetitions(span: TimeSpan, low: float, high: float) -> Iterator[tuple[float, float]]:
    """(start, duration) of every visible repetition; repetitions too fine to see become one bar."""
    finest = (high - low) / MAX_DRAWN_SPANS
    coarse = list(takewhile(lambda loop: loop[1] > finest, span.repeats))
    duration = span.dur_s
    if len(coarse) < len(span.repeats):
        times, period_s = span.repeats[len(coarse)]
        duration += (times - 1) * period_s
    for start in repetition_starts(span.start_s, coarse).tolist():
        if low - duration <= start <= high:
            yield start, duration


def burst_plots(run: PlotRun) -> Iterator[Plot]:
    """The traffic bursts of each mesh axis in one step."""
    phases = axis_bursts(run.inputs, run.source)
    if not phases:
        yield Plot(name="intervals", reason=run.reason("traffic_intervals"))
    for bursts in phases:
        lanes = bursts.axes
        axes = new_axes(0.8 + 0.36 * len(lanes))
        for row, lane in enumerate(lanes):
            bars = [(begin, end - begin) for axis, begin, end, _ in bursts.bursts if axis == lane]
            rows = (row - LANE_HEIGHT / 2, LANE_HEIGHT)
            axes.broken_barh(bars, rows, facecolors=COLORS[row % len(COLORS)], linewidth=0)
        lane_axis(axes, lanes)
        if bursts.unit == "s":
            unit_axis(axes.xaxis, Unit.SECONDS)
        else:
            axes.set_xlabel("position in the schedule (operations, not time)")
        heading = f"Traffic of each mesh axis in one {bursts.phase} step"
        yield finished(f"intervals-{bursts.phase}", axes, heading)
