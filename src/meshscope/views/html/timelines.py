"""The sections on the timeline of a step and the traffic intervals of each mesh axis."""

from collections.abc import Iterator, Sequence

import polars as pl

from meshscope.units import format_seconds
from meshscope.views.charts.timeline import Bursts, StepTimeline, axis_bursts, step_timelines
from meshscope.views.html import charts
from meshscope.views.html.blocks import Block, Chart, Panel, Section, unknown
from meshscope.views.html.drawing import ChartFactory, definition
from meshscope.views.html.page_run import PageRun
from meshscope.views.words import counted

NO_TIMELINE = "timeline: compiled and measured runs have one, predictions do not"


def timeline_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """A step and one layer of it, for every run."""
    return Section(
        id="timeline",
        title="Timeline",
        lead="One device. Lanes: compute by part of the model, collectives by mesh axis, copies between memories. Drag to pan; zoom with the buttons, with + and -, or with Ctrl and the mouse wheel.",
        panels=tuple(
            Panel(title=run.title, blocks=tuple(_timelines(run, factory))) for run in runs
        ),
    )


def _timelines(run: PageRun, factory: ChartFactory) -> Iterator[Block]:
    timelines = step_timelines(run.run.path, run.inputs)
    if not timelines:
        yield unknown(NO_TIMELINE)
    for timeline in timelines:
        yield _step_chart(timeline, factory)
        yield _layer_chart(timeline, factory)


def _step_chart(timeline: StepTimeline, factory: ChartFactory) -> Chart:
    n, n_hidden = sum(span.n for span in timeline.spans), timeline.n_left_out
    hidden = f"The {n_hidden:,} shortest spans are not drawn." if n_hidden else ""
    return factory.chart(
        "timeline",
        f"One {timeline.phase} step ({timeline.source})",
        charts.timeline_data(timeline),
        description=f"{counted(n, 'span')} in {format_seconds(timeline.end_s)}. {hidden}".strip(),
        note=hidden,
    )


def _layer_chart(timeline: StepTimeline, factory: ChartFactory) -> Block:
    if timeline.layer is None:
        return unknown(
            f"the boundaries of a {timeline.phase} layer: no loop and no collective marks them"
        )
    name, start_s, end_s = timeline.layer
    return factory.chart(
        "timeline",
        f"One layer of {timeline.phase}: {name}",
        charts.timeline_data(timeline, (start_s, end_s)),
        description=f"From {format_seconds(start_s)} to {format_seconds(end_s)} of the step.",
    )


def intervals_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """Bursts of each axis, the gaps between them, windows between axes, and the period."""
    return Section(
        id="intervals",
        title="Traffic intervals",
        lead="When each mesh axis has traffic in a step, how long it is idle, and what repeats.",
        panels=tuple(
            Panel(title=run.title, blocks=tuple(_intervals(run, factory))) for run in runs
        ),
    )


def _intervals(run: PageRun, factory: ChartFactory) -> Iterator[Block]:
    phases = axis_bursts(run.inputs, run.source)
    if not phases:
        yield unknown("the run has no collectives")
        return
    for bursts in sorted(phases, key=lambda b: b.phase, reverse=True):
        yield _burst_chart(bursts, factory)
    yield run.table("traffic_intervals", "Bursts and gaps", note=definition("traffic_intervals"))
    windows = run.metrics["axis_windows"]
    if isinstance(windows, pl.DataFrame) and windows.is_empty():
        yield unknown("windows between axes: traffic never changes from one axis to another")
    else:
        yield run.table("axis_windows", "Windows between axes")
    yield run.table("period", "Period of a step")


def _burst_chart(bursts: Bursts, factory: ChartFactory) -> Chart:
    n, n_hidden = len(bursts.bursts), bursts.n_left_out
    hidden = f"Only the first {n:,} bursts are drawn; {n_hidden:,} follow." if n_hidden else ""
    order = "" if bursts.unit == "s" else "The x axis is the position in the schedule, not time."
    return factory.chart(
        "timeline",
        f"Bursts of each axis in one {bursts.phase} step",
        charts.bursts_data(bursts),
        description=f"{counted(n, 'burst')}. {hidden}".strip(),
        note=f"{order} {hidden}".strip(),
    )
