"""What runs when in a step, and when each axis has traffic."""

from collections.abc import Iterator, Sequence

import polars as pl

from meshscope.units import format_seconds
from meshscope.views.charts.timeline import StepTimeline, axis_bursts, step_timelines
from meshscope.views.html import charts
from meshscope.views.html.blocks import (
    Block,
    Panel,
    Section,
    unknown,
)
from meshscope.views.html.drawing import Charts, definition
from meshscope.views.html.side import PageRun

NO_TIMELINE = (
    "the run keeps no timeline. Compiled and measured runs have one; a prediction has none"
)


def timeline_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """A step and one layer of it, of every run."""
    return Section(
        id="timeline",
        title="Timeline",
        lead="One device. Compute by part of the model, collectives by axis, copies between memories. Drag to move, zoom with the buttons, + and -, or ctrl and wheel.",
        panels=tuple(Panel(title=run.title, blocks=tuple(_timelines(run, new))) for run in runs),
    )


def _timelines(run: PageRun, new: Charts) -> Iterator[Block]:
    found = step_timelines(run.run.path, run.subject)
    if not found:
        yield unknown(NO_TIMELINE)
    for timeline in found:
        yield from _step_and_layer(timeline, new)


def _step_and_layer(timeline: StepTimeline, new: Charts) -> Iterator[Block]:
    left_out = (
        f" {timeline.n_left_out:,} of the shortest spans are left out."
        if timeline.n_left_out
        else ""
    )
    yield new.new(
        "timeline",
        f"A {timeline.phase} step ({timeline.source})",
        charts.timeline_data(timeline),
        about=f"{sum(s.n for s in timeline.spans):,} spans in {format_seconds(timeline.end_s)}.{left_out}",
        note=left_out.strip(),
    )
    if timeline.layer is None:
        yield unknown(
            f"where a layer of {timeline.phase} begins and ends: no loop and no collective tells"
        )
        return
    name, start_s, end_s = timeline.layer
    yield new.new(
        "timeline",
        f"One layer of {timeline.phase}: {name}",
        charts.timeline_data(timeline, (start_s, end_s)),
        about=f"From {format_seconds(start_s)} to {format_seconds(end_s)} of the step.",
    )


def intervals_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """Bursts of each axis, the gaps between them, windows between axes, and what repeats."""
    return Section(
        id="intervals",
        title="Traffic intervals",
        lead="When each axis has traffic in a step, for how long it is silent, and what repeats.",
        panels=tuple(Panel(title=run.title, blocks=tuple(_bursts(run, new))) for run in runs),
    )


def _bursts(run: PageRun, new: Charts) -> Iterator[Block]:
    found = axis_bursts(run.subject, run.source)
    if not found:
        yield unknown("the run has no collectives")
        return
    for bursts in sorted(found, key=lambda b: b.phase, reverse=True):
        is_time = bursts.unit == "s"
        more = (
            f" The first {len(bursts.bursts):,} bursts; {bursts.n_left_out:,} more follow."
            if bursts.n_left_out
            else ""
        )
        order = (
            ""
            if is_time
            else "The place in the order of the schedule, not time: no time is known. "
        )
        yield new.new(
            "timeline",
            f"Bursts of each axis in a {bursts.phase} step",
            charts.bursts_data(bursts),
            about=f"{len(bursts.bursts)} bursts.{more}",
            note=f"{order}{more.strip()}",
        )
    yield run.table("traffic_intervals", "Bursts and gaps", note=definition("traffic_intervals"))
    windows = run.metrics["axis_windows"]
    if isinstance(windows, pl.DataFrame) and windows.is_empty():
        yield unknown("windows between axes: traffic never changes from one axis to another")
    else:
        yield run.table("axis_windows", "Windows between axes")
    yield run.table("period", "What repeats in a step")
