"""Plots of time and memory: what a step is made of, its timeline, its bursts, its roofline, and the HBM."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshscope.analysis.catalog import NO_COLLECTIVES, NO_MEMORY, NO_STEP
from meshscope.events.enums import Phase, Source
from meshscope.spec.plan.memory import Memory
from meshscope.views.charts.cost import cost_bars
from meshscope.views.charts.roofline import RooflinePoint, roofline_chart
from meshscope.views.charts.timeline import StepTimeline, TimeSpan, axis_bursts, step_timelines
from meshscope.views.plots.style import (
    BLUE,
    COLOURS,
    GREY,
    PARTS,
    Drawn,
    Plotted,
    colour_of,
    gib_axis,
    legend_below,
    name_of,
    new_axes,
    seconds_axis,
    stacked,
)

MAX_DRAWN_SPANS = 20_000


def draw_cost(it: Plotted) -> Iterator[Drawn]:
    """A bar for each source of each phase: compute, exposed communication by axis, waiting."""
    bars = cost_bars(it.subject)
    if not bars:
        yield Drawn(name="cost", reason=NO_STEP.reason)
    for phase in Phase:
        of_phase = [bar for bar in bars if bar.phase is phase]
        if of_phase:
            figure, axes = new_axes(0.7 + 0.5 * len(of_phase))
            stacked(
                axes, [(bar.source, bar.segments or [("step", bar.step_s)]) for bar in of_phase]
            )
            for row, bar in enumerate(of_phase):
                if bar.low_s is not None and bar.high_s is not None:
                    axes.plot(
                        [bar.low_s, bar.high_s], [row, row], color="black", marker="|", linewidth=1
                    )
            seconds_axis(axes.xaxis)
            axes.set_title(f"One {phase} step of one device")
            legend_below(axes)
            yield Drawn(name=f"cost-{phase}", figure=figure)


def draw_timelines(it: Plotted) -> Iterator[Drawn]:
    """The step of each phase that the run folder keeps, and one layer of it."""
    found = step_timelines(it.run.path, it.subject)
    if not found:
        yield Drawn(
            name="timeline", reason="the run keeps no timeline; compiled and measured runs have one"
        )
    for timeline in found:
        yield Drawn(
            name=_timeline_name(timeline),
            figure=_timeline_figure(timeline, 0.0, timeline.end_s, f"One {timeline.phase} step"),
        )
        if timeline.layer is not None:
            name, start_s, end_s = timeline.layer
            title = f"One layer of {timeline.phase}: {name}"
            figure = _timeline_figure(timeline, start_s, end_s, title)
            yield Drawn(name=f"{_timeline_name(timeline)}-layer", figure=figure)


def _timeline_name(timeline: StepTimeline) -> str:
    measured = "-measured" if timeline.source == Source.MEASURED else ""
    return f"timeline-{timeline.phase}{measured}"


def _timeline_figure(timeline: StepTimeline, low: float, high: float, title: str) -> Figure:
    ranks = {"core": 0, "copy": 2}
    lanes = sorted({s.lane for s in timeline.spans}, key=lambda lane: (ranks.get(lane, 1), lane))
    figure, axes = new_axes(0.8 + 0.36 * len(lanes))
    colour = colour_of([lane for lane in lanes if lane != "core"])
    finest = (high - low) / MAX_DRAWN_SPANS
    for row, lane in enumerate(lanes):
        pieces: dict[str, list[tuple[float, float]]] = {}
        for span in timeline.spans:
            if span.lane == lane:
                part = span.label.partition(",")[0]
                name = PARTS.get(part, GREY) if lane == "core" else colour(lane)
                pieces.setdefault(name, []).extend(_pieces(span, low, high, finest))
        for name, bars in pieces.items():
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=name, linewidth=0)
    for part, name in PARTS.items():
        if any(s.lane == "core" and s.label.partition(",")[0] == part for s in timeline.spans):
            axes.barh(0, 0, color=name, label=part)
    axes.set_yticks(range(len(lanes)), [name_of(lane) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(low, high)
    seconds_axis(axes.xaxis)
    axes.set_title(name_of(title))
    legend_below(axes, n_columns=6)
    return figure


def _pieces(
    span: TimeSpan, low: float, high: float, finest: float
) -> Iterator[tuple[float, float]]:
    """(start, length) of every repetition in sight; those finer than can be seen as one stretch."""

    def unfolded(
        start: float, folds: tuple[tuple[int, float], ...]
    ) -> Iterator[tuple[float, float]]:
        if start > high:
            return
        if not folds:
            yield start, span.dur_s
            return
        (times, period), *rest = folds
        if period <= finest:
            yield start, (times - 1) * period + span.dur_s
            return
        for k in range(times):
            yield from unfolded(start + k * period, tuple(rest))

    for start, length in unfolded(span.start_s, span.repeats):
        if start + length >= low:
            yield start, length


def draw_intervals(it: Plotted) -> Iterator[Drawn]:
    """When each axis has traffic in a step."""
    found = axis_bursts(it.subject, it.source)
    if not found:
        yield Drawn(name="intervals", reason=NO_COLLECTIVES.reason)
    for bursts in found:
        lanes = list(dict.fromkeys(axis for axis, *_ in bursts.bursts))
        figure, axes = new_axes(0.8 + 0.36 * len(lanes))
        for row, lane in enumerate(lanes):
            bars = [(begin, end - begin) for axis, begin, end, _ in bursts.bursts if axis == lane]
            axes.broken_barh(
                bars, (row - 0.36, 0.72), facecolors=COLOURS[row % len(COLOURS)], linewidth=0
            )
        axes.set_yticks(range(len(lanes)), [name_of(lane) for lane in lanes])
        axes.invert_yaxis()
        if bursts.unit == "s":
            seconds_axis(axes.xaxis)
        else:
            axes.set_xlabel("operations in the order of the schedule, not time")
        axes.set_title(f"Traffic of each axis in one {bursts.phase} step")
        yield Drawn(name=f"intervals-{bursts.phase}", figure=figure)


def draw_roofline(it: Plotted) -> Iterator[Drawn]:
    """Each part of the model below the peaks of the chip."""
    roof = roofline_chart(it.subject)
    if roof is None:
        yield Drawn(
            name="roofline", reason="no part has FLOPs and time, or the chip no published peaks"
        )
        return
    figure, axes = new_axes(3.2)
    intensities = [p.flops_per_byte for p in roof.points]
    ridge = roof.flops_per_s / roof.hbm_bytes_per_s
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 6
    axes.plot(
        [low, ridge, high], [low * roof.hbm_bytes_per_s, roof.flops_per_s, roof.flops_per_s], color="black"
    )  # fmt: skip
    for point in roof.points:
        is_prefill = point.phase is Phase.PREFILL
        axes.plot(
            [point.flops_per_byte],
            [point.flops_per_s],
            "o" if is_prefill else "^",
            color=BLUE if is_prefill else COLOURS[1],
            markerfacecolor=None if point.source is Source.COMPILED else "none",
            label=f"{point.phase}, {point.source}",
        )
    _name_points(axes, roof.points)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs for each byte of HBM")
    axes.set_ylabel("FLOPs a second")
    axes.set_title("Roofline of one device, while it computes")
    legend_below(axes)
    yield Drawn(name="roofline", figure=figure)


def _name_points(axes: Axes, points: Sequence[RooflinePoint]) -> None:
    """The part beside each point; names of points that lie close stand below each other."""
    for i, point in enumerate(points):
        n_close = sum(_are_close(point, other) for other in points[:i])
        axes.annotate(
            name_of(point.part),
            (point.flops_per_byte, point.flops_per_s),
            (6, -3 - 8 * n_close),
            textcoords="offset points",
            fontsize=7,
        )


def _are_close(left: RooflinePoint, right: RooflinePoint) -> bool:
    """Whether their names would lie upon each other."""
    across = abs(np.log10(left.flops_per_byte / right.flops_per_byte))
    along = abs(np.log10(left.flops_per_s / right.flops_per_s))
    return bool(across < 0.5 and along < 0.25)


def draw_memory(it: Plotted) -> Iterator[Drawn]:
    """What one device holds, against its HBM."""
    if not it.run.memory:
        yield Drawn(name="memory", reason=NO_MEMORY.reason)
        return
    figure, axes = new_axes(0.8 + 0.45 * len(it.run.memory))
    bars = [(source, memory_segments(memory)) for source, memory in it.run.memory.items()]
    stacked(axes, bars)
    limit = next((m.hbm_bytes for m in it.run.memory.values() if m.hbm_bytes is not None), None)
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="HBM of one device")
    gib_axis(axes, limit)
    axes.set_title("Memory of one device")
    legend_below(axes)
    yield Drawn(name="memory", figure=figure)


def memory_segments(memory: Memory) -> list[tuple[str, float]]:
    """Weights, cache and temporaries; what is not known of the last is nothing drawn."""
    return [
        ("weights", memory.weights_bytes),
        ("KV cache", memory.kv_cache_bytes),
        ("temporary", memory.temp_bytes or 0),
    ]
