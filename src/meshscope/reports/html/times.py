"""The content of the sections on step times, their differences, timelines and traffic intervals."""

from collections.abc import Iterator, Mapping, Sequence

from meshscope.analysis.request import ASSUMPTION
from meshscope.events.enums import Phase
from meshscope.reports.charts.cost import (
    Breakdown,
    CostBar,
    cost_chart,
    request_breakdown,
    waterfall_chart,
)
from meshscope.reports.charts.spec import Chart
from meshscope.reports.charts.timeline import (
    axis_bursts,
    burst_chart,
    layer_chart,
    step_chart,
    step_timelines,
)
from meshscope.reports.html.blocks import (
    Block,
    PageTable,
    Paragraph,
    basis_text,
    columns,
    fold,
    page_table,
)
from meshscope.reports.html.page_run import PageRun
from meshscope.reports.model import Unit, ViewTable, figure_column, joined, text_column
from meshscope.reports.plain import short
from meshscope.reports.speculation import speculation_table
from meshscope.reports.times import step_notes
from meshscope.reports.trace import is_trace
from meshscope.units import NANOSECOND_S

SMALL_FRAC = 0.001  # of the whole; smaller differences have no row

Steps = Mapping[Phase, Breakdown]


def waterfall_blocks(
    named: Sequence[tuple[str, Steps]], *, n_decode_steps: int | None, table_id: str
) -> Iterator[Block]:
    """The steps of the first name against those of the others; nothing without a phase that all have."""
    names = [name for name, _ in named]
    spans = _spans([steps for _, steps in named], n_decode_steps)
    if len(named) < 2 or not spans:
        return
    yield waterfall_chart(names, spans)
    span, breakdowns = next(iter(spans.items()))
    yield from fold("Differences as a table", [_differences(names, span, breakdowns, table_id)])


def _spans(steps: Sequence[Steps], n_decode_steps: int | None) -> dict[str, list[Breakdown]]:
    """The breakdowns of the request, and of each phase that all sides have."""
    shared = [phase for phase in Phase if all(phase in of_side for of_side in steps)]
    spans = {f"{phase} step": [of_side[phase] for of_side in steps] for phase in shared}
    if n_decode_steps is None or any(len(of_side) > len(shared) for of_side in steps):
        return spans
    requests = [request_breakdown(of_side, n_decode_steps) for of_side in steps]
    return {"request": requests, **spans} if len(shared) > 1 else spans


def _differences(
    names: Sequence[str], span: str, breakdowns: Sequence[Breakdown], id_: str
) -> PageTable:
    """Seconds of the first side, and what the others take beyond it, by part and axis."""
    first, *others = ({**breakdown, "total": sum(breakdown.values())} for breakdown in breakdowns)
    parts = list(dict.fromkeys(part for breakdown in breakdowns for part in breakdown))
    rows = [
        (part, first.get(part, 0.0), *(_change_s(first, other, part) for other in others))
        for part in (*parts, "total")
    ]
    least_s = SMALL_FRAC * first["total"]
    view = ViewTable(
        title=f"Time of one {span} and its differences",
        columns=(
            text_column("part or axis"),
            figure_column(names[0], Unit.SECONDS),
            *(figure_column(f"{name} minus {names[0]}", Unit.SECONDS) for name in names[1:]),
        ),
        rows=tuple(row for row in rows if row[0] == "total" or max(map(abs, row[1:])) >= least_s),
    )
    return page_table(id_, view)


def _change_s(before: Breakdown, after: Breakdown, part: str) -> float:
    """The change of a part; 0 within the rounding error of the sums, a nanosecond."""
    change_s = after.get(part, 0.0) - before.get(part, 0.0)
    return change_s if abs(change_s) >= NANOSECOND_S else 0.0


def speculation_blocks(run: PageRun) -> Iterator[Block]:
    """Speculative decoding, if the run has it."""
    table = speculation_table(run.run)
    if table is not None:
        yield page_table(run.html_id("speculative-step"), table)


def cost_blocks(run: PageRun) -> Iterator[Block]:
    """A bar of each source for a step of each phase, and the tables behind it."""
    if not run.costs:
        return
    yield from columns(step_charts([(bar.source.value, bar) for bar in run.costs]))
    yield from fold("Basis, step time and cost of each part", _cost_tables(run))


def _basis(run: PageRun) -> Iterator[Paragraph]:
    """Where the times come from, and what limits them."""
    if run.inputs.times:
        yield Paragraph(text=f"Modeled times: {ASSUMPTION}.")
    if run.timed.basis is not None:
        order = "; largest share first" if "+" in run.timed.basis else ""
        yield Paragraph(text=f"Basis: {basis_text(run.timed.basis)}{order}.")
    for steps, note in step_notes(run.inputs.times):
        yield Paragraph(text=f"{steps[0].upper()}{steps[1:]}: {short(note, 600)}.")


def step_charts(bars: Sequence[tuple[str, CostBar]]) -> Iterator[Chart]:
    """The named bars of each phase."""
    yield from filter(None, (cost_chart(phase, bars) for phase in Phase))


def _cost_tables(run: PageRun) -> Iterator[Block]:
    yield from _basis(run)
    yield from run.tables("step_time", "Step time", is_defined=True)
    yield from run.tables("part_costs", "Cost of each part of the model", is_defined=True)
    if run.inputs.measured is not None:
        yield from run.tables("latency", "Timed requests")
        yield from run.tables("device_idle", "Load of devices")


def timeline_blocks(run: PageRun) -> Iterator[Block]:
    """A repetition of the layers of each phase, and the whole steps."""
    timelines = step_timelines(run.run.path, run.inputs)
    steps = list(map(step_chart, timelines))
    layers = list(filter(None, map(layer_chart, timelines)))
    yield from layers or steps
    if layers:
        yield from fold("Whole steps", steps)
    if run.inputs.sampled:
        yield Paragraph(text=f"The trace is long; shown here: {joined(run.inputs.sampled)}.")
    if is_trace(run.run):
        yield from fold("Overlap of communication and compute", _overlap_tables(run))


def _overlap_tables(run: PageRun) -> Iterator[Block]:
    yield from run.tables("overlap", "Mean step of each device", is_defined=True)
    yield from run.tables("exposed_by", "Exposed time of each axis", is_defined=True)


def interval_blocks(run: PageRun) -> Iterator[Block]:
    """Bursts of each axis, the gaps between them, windows between axes, and the period.

    Nothing if the plan has one axis: the timeline shows its traffic.
    """
    phases = axis_bursts(run.inputs, run.source)
    if len({axis for bursts in phases for axis in bursts.axes}) < 2:
        return
    yield from map(burst_chart, sorted(phases, key=lambda bursts: bursts.phase, reverse=True))
    yield from run.tables("traffic_intervals", "Bursts and gaps", is_defined=True)
    yield from run.tables("axis_windows", "Windows between axes")
    yield from run.tables("period", "Period of a step")
