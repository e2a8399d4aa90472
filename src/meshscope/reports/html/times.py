"""The content of the sections on step times, timelines and traffic intervals."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.request import ASSUMPTION
from meshscope.events.enums import Phase
from meshscope.reports.charts.cost import CostBar, cost_chart
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
    Paragraph,
    basis_text,
    columns,
    fold,
    page_table,
)
from meshscope.reports.html.page_run import PageRun
from meshscope.reports.model import joined
from meshscope.reports.plain import short
from meshscope.reports.speculation import speculation_table
from meshscope.reports.times import step_notes
from meshscope.reports.trace import is_trace


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
