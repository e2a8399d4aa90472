"""The section on step and request times: bars, large figures, and tables by part of the model."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.request import ASSUMPTION, RequestTime, request_times
from meshscope.events.enums import Phase, Source
from meshscope.units import format_seconds
from meshscope.views.charts.cost import CostBar
from meshscope.views.html import charts
from meshscope.views.html.blocks import (
    Block,
    Panel,
    Paragraph,
    Section,
    Tile,
    Tiles,
    basis_text,
    unknown,
)
from meshscope.views.html.drawing import ChartFactory, definition
from meshscope.views.html.page_run import PageRun
from meshscope.views.plain import short
from meshscope.views.times import time_figure

REQUEST_TIMES = ("TTFT", "TPOT", "end to end")
WHISKER = "The whisker at the end of a bar is the interval of the estimate."


def cost_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """Bars of a step, large figures of a request, and tables by part, of every run."""
    panels: list[Panel] = []
    if len(runs) == 1:
        panels.append(Panel(title="", blocks=tuple(_latency(runs[0]))))
    panels.append(Panel(title="", blocks=tuple(_cost_charts(runs, factory))))
    panels += [Panel(title=run.title, blocks=tuple(_cost_blocks(run))) for run in runs if run.costs]
    return Section(
        id="cost",
        title="Step time",
        lead="One step of each phase on one device. Communication is exposed while the device computes nothing; communication hidden behind compute costs no time.",
        panels=tuple(panels),
    )


def _cost_charts(runs: Sequence[PageRun], factory: ChartFactory) -> Iterator[Block]:
    for phase in Phase:
        bars = [(_bar_name(r, bar), bar) for r in runs for bar in r.costs if bar.phase is phase]
        if bars:
            description = "; ".join(f"{name} {_with_interval(bar)}" for name, bar in bars)
            yield factory.chart(
                "bars",
                f"Time of one {phase} step",
                charts.cost_data(bars),
                description=f"{description}.",
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


def _cost_blocks(run: PageRun) -> Iterator[Block]:
    if run.inputs.times:
        yield Paragraph(text=f"Modeled times: {ASSUMPTION}.")
        for time in run.inputs.times:
            for note in time.notes:
                yield Paragraph(text=f"{time.phase}: {short(note, 600)}")
    yield run.table("step_time", "Step time", note=definition("step_time"))
    yield run.table("part_costs", "Cost of each part of the model", note=definition("part_costs"))
    if run.inputs.measured is not None:
        yield run.table("latency", "Timed requests")
        yield run.table("device_idle", "Load of devices")


def _latency(run: PageRun) -> Iterator[Block]:
    """TTFT, TPOT and end-to-end time as large figures, measured if requests were timed."""
    latency = run.inputs.latency
    if latency is not None:
        spreads = (latency.ttft, latency.tpot, latency.e2e)
        yield Tiles(
            tiles=tuple(
                Tile(
                    name=name,
                    value=format_seconds(spread.mean_s),
                    note=f"measured, mean of {spread.n}; p99 {format_seconds(spread.p99_s)}",
                )
                for name, spread in zip(REQUEST_TIMES, spreads, strict=True)
                if spread is not None
            )
        )
        return
    for source, request in list(request_times(run.run).items())[-1:]:  # the strongest source
        yield Tiles(tiles=tuple(_modeled_tiles(source, request)))
        if request.basis is not None:
            yield Paragraph(text=f"Basis: {basis_text(request.basis)}; largest share first.")


def _modeled_tiles(source: Source, request: RequestTime) -> Iterator[Tile]:
    mark = "extrapolated, " if request.is_extrapolated else ""
    for name, time in zip(REQUEST_TIMES, (request.ttft, request.tpot, request.e2e), strict=True):
        if time is not None:
            figure = time_figure(time)
            note = f"{figure.range_text}; {mark}{source}"
            yield Tile(name=name, value=figure.text, note=note)
