"""The content of the sections on step times, timelines and traffic intervals."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.request import ASSUMPTION
from meshscope.events.enums import Phase
from meshscope.events.measured import StepLabel
from meshscope.reports.charts.cost import CostBar
from meshscope.reports.charts.timeline import Bursts, StepTimeline, axis_bursts, step_timelines
from meshscope.reports.html import charts
from meshscope.reports.html.blocks import (
    Block,
    Chart,
    Paragraph,
    basis_text,
    columns,
    fold,
    page_table,
)
from meshscope.reports.html.page_run import PageRun
from meshscope.reports.model import Figure, Unit, joined
from meshscope.reports.plain import short
from meshscope.reports.speculation import speculation_table
from meshscope.reports.times import step_notes
from meshscope.reports.trace import is_trace
from meshscope.reports.words import counted
from meshscope.units import format_seconds

LOOP = "An iteration is one layer, or several layers of different kinds that recur together; the first and last layers may be outside the loop. A copy lane shows each copy between memories."
WHISKER = "The line over the end of a bar is the interval of the estimate."


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
    for phase in Phase:
        named = [(name, bar) for name, bar in bars if bar.phase is phase]
        if named:
            yield Chart(
                kind="bars",
                title=f"Time of one {phase} step",
                description="; ".join(f"{name} {_with_interval(bar)}" for name, bar in named),
                data=charts.cost_data(named),
                note=WHISKER if any(bar.low_s is not None for _, bar in named) else "",
            )


def _with_interval(bar: CostBar) -> str:
    step = Figure(value=bar.step_s, unit=Unit.SECONDS, low=bar.low_s, high=bar.high_s)
    return step.text_with_range


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
    steps = [_step_chart(timeline) for timeline in timelines]
    layers = [_layer_chart(timeline) for timeline in timelines if timeline.layer is not None]
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


def _step_chart(timeline: StepTimeline) -> Chart:
    n, n_hidden, phase = sum(s.n for s in timeline.spans), timeline.n_left_out, timeline.phase
    hidden = f"The {n_hidden:,} shortest spans are not drawn." if n_hidden else ""
    return Chart(
        kind="timeline",
        title=f"{_heading(phase)} ({timeline.source})",
        description=f"{counted(n, 'span')} in {format_seconds(timeline.end_s)}. {hidden}",
        data=charts.timeline_data(timeline),
        note=hidden,
    )


def _heading(phase: str) -> str:
    """`One decode step`; a trace without steps is one window."""
    match phase:
        case StepLabel.TRACE.value:
            return "The trace"
        case Phase.STEP.value:
            return "One step"
        case _:
            return f"One {phase} step"


def _layer_chart(timeline: StepTimeline) -> Chart:
    assert timeline.layer is not None
    name, start_s, end_s = timeline.layer
    return Chart(
        kind="timeline",
        title=f"Detail of {timeline.phase} ({timeline.source}): {name}",
        description=f"From {format_seconds(start_s)} to {format_seconds(end_s)} of the step",
        data=charts.timeline_data(timeline, (start_s, end_s)),
        note=LOOP if "loop over layers" in name else "",
    )


def interval_blocks(run: PageRun) -> Iterator[Block]:
    """Bursts of each axis, the gaps between them, windows between axes, and the period.

    Nothing if the plan has one axis: the timeline shows its traffic.
    """
    phases = axis_bursts(run.inputs, run.source)
    if len({axis for bursts in phases for axis in bursts.axes}) < 2:
        return
    yield from map(_burst_chart, sorted(phases, key=lambda bursts: bursts.phase, reverse=True))
    yield from run.tables("traffic_intervals", "Bursts and gaps", is_defined=True)
    yield from run.tables("axis_windows", "Windows between axes")
    yield from run.tables("period", "Period of a step")


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
