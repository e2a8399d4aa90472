"""The content of the sections on step times, timelines and traffic intervals."""

from collections.abc import Iterator, Sequence

import polars as pl

from meshscope.analysis.request import ASSUMPTION, request_times
from meshscope.events.enums import Phase
from meshscope.units import format_seconds
from meshscope.views.charts.cost import CostBar
from meshscope.views.charts.timeline import Bursts, StepTimeline, axis_bursts, step_timelines
from meshscope.views.html import charts
from meshscope.views.html.blocks import Block, Chart, Paragraph, Tile, Tiles, basis_text, unknown
from meshscope.views.html.page_run import PageRun
from meshscope.views.plain import short
from meshscope.views.times import time_figure
from meshscope.views.words import counted

REQUEST_TIMES = ("TTFT", "TPOT", "end to end")
WHISKER = "The whisker at the end of a bar is the interval of the estimate."


def cost_panels(runs: Sequence[PageRun]) -> list[tuple[str, Sequence[Block]]]:
    """Large figures of a single run, bars of a step, and tables by part of every run."""
    tiles = [("", tuple(_request_tiles(runs[0])))] if len(runs) == 1 else []
    tables = [(run.title, tuple(_cost_tables(run))) for run in runs if run.costs]
    return [*tiles, ("", tuple(_cost_charts(runs))), *tables]


def _cost_charts(runs: Sequence[PageRun]) -> Iterator[Block]:
    for phase in Phase:
        bars = [(_bar_name(r, bar), bar) for r in runs for bar in r.costs if bar.phase is phase]
        if bars:
            yield Chart(
                kind="bars",
                title=f"Time of one {phase} step",
                description="; ".join(f"{name} {_with_interval(bar)}" for name, bar in bars),
                data=charts.cost_data(bars),
                note=WHISKER if any(bar.low_s is not None for _, bar in bars) else "",
            )
    for run in runs:
        if not run.costs:
            yield unknown(run.with_letter("step times: nothing was measured or modeled"))


def _bar_name(run: PageRun, bar: CostBar) -> str:
    plan = "" if run.is_alone else short(run.plan, 24)
    return f"{run.with_letter(plan)} {bar.source.value}".strip()


def _with_interval(bar: CostBar) -> str:
    step = format_seconds(bar.step_s)
    if bar.low_s is None or bar.high_s is None:
        return step
    return f"{step} ({format_seconds(bar.low_s)} to {format_seconds(bar.high_s)})"


def _cost_tables(run: PageRun) -> Iterator[Block]:
    if run.inputs.times:
        yield Paragraph(text=f"Modeled times: {ASSUMPTION}.")
    for time in run.inputs.times:
        yield from (Paragraph(text=f"{time.phase}: {short(note, 600)}") for note in time.notes)
    yield run.table("step_time", "Step time", is_defined=True)
    yield run.table("part_costs", "Cost of each part of the model", is_defined=True)
    if run.inputs.measured is not None:
        yield run.table("latency", "Timed requests")
        yield run.table("device_idle", "Load of devices")


def _request_tiles(run: PageRun) -> Iterator[Block]:
    """TTFT, TPOT and end-to-end time as large figures, measured if requests were timed."""
    latency = run.inputs.latency
    for source, request in list(request_times(run.run).items())[-1:]:  # the strongest source
        tiles: list[Tile] = []
        spreads = (None,) * 3 if latency is None else (latency.ttft, latency.tpot, latency.e2e)
        times = (request.ttft, request.tpot, request.e2e)
        for name, time, spread in zip(REQUEST_TIMES, times, spreads, strict=True):
            figure = time_figure(time)
            mark = "extrapolated, " if request.is_extrapolated else ""
            note = f"{figure.range_text}; {mark}{source}"
            if spread is not None:
                note = f"measured, mean of {spread.n}; p99 {format_seconds(spread.p99_s)}"
            if time is not None:
                tiles.append(Tile(name=name, value=figure.text, note=note))
        yield Tiles(tiles=tuple(tiles))
        if latency is None and request.basis is not None:
            yield Paragraph(text=f"Basis: {basis_text(request.basis)}; largest share first.")


def timeline_blocks(run: PageRun) -> Iterator[Block]:
    """A step of each phase and one layer of it."""
    timelines = step_timelines(run.run.path, run.inputs)
    if not timelines:
        yield unknown("timeline: compiled and measured runs have one, predictions do not")
    for timeline in timelines:
        yield from _timeline_charts(timeline)


def _timeline_charts(timeline: StepTimeline) -> Iterator[Block]:
    n, n_hidden, phase = sum(s.n for s in timeline.spans), timeline.n_left_out, timeline.phase
    hidden = f"The {n_hidden:,} shortest spans are not drawn." if n_hidden else ""
    yield Chart(
        kind="timeline",
        title=f"One {phase} step ({timeline.source})",
        description=f"{counted(n, 'span')} in {format_seconds(timeline.end_s)}. {hidden}",
        data=charts.timeline_data(timeline),
        note=hidden,
    )
    if timeline.layer is None:
        yield unknown(f"the boundaries of a {phase} layer: no loop and no collective marks them")
        return
    name, start_s, end_s = timeline.layer
    yield Chart(
        kind="timeline",
        title=f"One layer of {phase}: {name}",
        description=f"From {format_seconds(start_s)} to {format_seconds(end_s)} of the step",
        data=charts.timeline_data(timeline, (start_s, end_s)),
    )


def interval_blocks(run: PageRun) -> Iterator[Block]:
    """Bursts of each axis, the gaps between them, windows between axes, and the period."""
    phases = axis_bursts(run.inputs, run.source)
    if not phases:
        yield unknown("the run has no collectives")
        return
    yield from map(_burst_chart, sorted(phases, key=lambda bursts: bursts.phase, reverse=True))
    yield run.table("traffic_intervals", "Bursts and gaps", is_defined=True)
    windows = run.metrics["axis_windows"]
    if isinstance(windows, pl.DataFrame) and windows.is_empty():
        yield unknown("windows between axes: traffic never changes from one axis to another")
    else:
        yield run.table("axis_windows", "Windows between axes")
    yield run.table("period", "Period of a step")


def _burst_chart(bursts: Bursts) -> Chart:
    n, n_hidden = len(bursts.bursts), bursts.n_left_out
    hidden = f"Only the first {n:,} bursts are drawn; {n_hidden:,} follow." if n_hidden else ""
    order = "" if bursts.unit == "s" else "The x axis is the position in the schedule, not time."
    return Chart(
        kind="timeline",
        title=f"Bursts of each axis in one {bursts.phase} step",
        description=f"{counted(n, 'burst')}. {hidden}",
        data=charts.bursts_data(bursts),
        note=f"{order} {hidden}".strip(),
    )
