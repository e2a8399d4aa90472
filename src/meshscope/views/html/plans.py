"""The section that compares several runs: a row each, scaling over devices, and explanations."""

from collections.abc import Iterator, Sequence

import polars as pl

from meshscope.analysis.explanation import explain
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.request import request_times
from meshscope.analysis.sides import Side
from meshscope.events.enums import Phase
from meshscope.events.step_time import TimeEstimate
from meshscope.units import format_seconds
from meshscope.views.explanation import sentences
from meshscope.views.html.blocks import (
    Block,
    PageTable,
    Panel,
    Paragraph,
    Section,
    page_table,
    unknown,
)
from meshscope.views.html.cost import REQUEST_TIMES
from meshscope.views.html.drawing import ChartFactory
from meshscope.views.html.page_run import PageRun
from meshscope.views.model import (
    UNKNOWN_LABEL,
    CellValue,
    Unit,
    ViewTable,
    figure_column,
    text_column,
)
from meshscope.views.plain import short
from meshscope.views.summary import fits_cell, gib_cell
from meshscope.views.times import time_figure

SCALING_NOTE = (
    "The line joins the fastest run of each size. Dashed: ideal scaling from the smallest size."
)


def plans_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """The runs as rows, their step times over devices, and why each differs from the first."""
    blocks: list[Block] = []
    if len(runs) > 1:
        blocks += [_plans(runs), _requests(runs)]
        blocks += _scaling_charts(runs, factory)
        blocks += [block for run in runs[1:] for block in _why(runs[0], run)]
    else:
        text = "This report has one run. Pass several runs to meshscope report to compare them."
        blocks.append(Paragraph(text=text, class_name="unknown"))
    panel = Panel(title="", blocks=tuple(blocks))
    return Section(id="plans", title="Comparison of plans", lead="", panels=(panel,))


def _plans(runs: Sequence[PageRun]) -> PageTable:
    view = ViewTable(
        title="Plans",
        columns=(
            *map(text_column, ("run", "model", "plan", "slice")),
            figure_column("devices"),
            text_column("source"),
            *(figure_column(f"{phase} step", Unit.SECONDS) for phase in Phase),
            *(figure_column(f"sent per {phase} step", Unit.BYTES) for phase in Phase),
            figure_column("memory", Unit.MEMORY_BYTES),
            text_column("fits"),
        ),
        rows=tuple(map(_plan_row, runs)),
    )
    return page_table("plans-table", view)


def _plan_row(run: PageRun) -> tuple[CellValue, ...]:
    experiment = run.run.manifest.experiment
    costs = run.strongest_costs
    memory = run.run.memory.get(run.source)
    return (
        run.letter,
        short(experiment.model_name or UNKNOWN_LABEL, 80),
        run.plan,
        UNKNOWN_LABEL if experiment.topology is None else experiment.topology.name,
        experiment.n_devices,
        run.source.value,
        *(costs[phase].step_s if phase in costs else None for phase in Phase),
        *(_sent_bytes(run, phase) for phase in Phase),
        gib_cell(None if memory is None else memory.total_bytes),
        fits_cell(None if memory is None else memory.fits),
    )


def _sent_bytes(run: PageRun, phase: Phase) -> float | None:
    """Wire bytes of one step of the phase; None if the phase has no collectives."""
    volume = run.of_strongest("volume")
    if isinstance(volume, Unavailable):
        return None
    wire_bytes = volume.filter(pl.col("phase") == phase.value)["wire_bytes"]
    return float(wire_bytes.sum()) if len(wire_bytes) else None


def _why(first: PageRun, other: PageRun) -> Iterator[Block]:
    """Why a run differs from the first run."""
    left, right = (Side(name=r.letter, run=r.run, source=r.source) for r in (first, other))
    yield Paragraph(text=f"{other.letter} against {first.letter}", class_name="heading")
    for sentence in sentences(explain(left, right)):
        yield Paragraph(text=short(sentence, 800), class_name="say")


def _requests(runs: Sequence[PageRun]) -> PageTable:
    """TTFT, TPOT and end-to-end time of every run, with range and basis."""
    view = ViewTable(
        title="Request time",
        columns=(
            text_column("run"),
            *(
                column
                for name in REQUEST_TIMES
                for column in (figure_column(name, Unit.SECONDS), text_column("range"))
            ),
            text_column("basis"),
        ),
        rows=tuple((run.letter, *_request_cells(run)) for run in runs),
    )
    return page_table("requests-table", view)


def _request_cells(run: PageRun) -> tuple[CellValue, ...]:
    """Time and range of each duration by the strongest source, and its basis."""
    requests = list(request_times(run.run).values())
    if not requests:
        return (*(None,) * (2 * len(REQUEST_TIMES)), UNKNOWN_LABEL)
    request = requests[-1]
    times = (request.ttft, request.tpot, request.e2e)
    return (*(cell for time in times for cell in _with_range(time)), request.basis)


def _with_range(time: TimeEstimate | None) -> tuple[CellValue, CellValue]:
    if time is None:
        return None, None
    figure = time_figure(time)
    return figure, None if figure.low is None else figure.range_text


def _scaling_charts(runs: Sequence[PageRun], factory: ChartFactory) -> Iterator[Block]:
    """Step time over devices, if the runs differ in size."""
    is_drawn = False
    for phase in Phase:
        points = sorted(
            (run.inputs.n_devices, costs[phase].step_s, run.letter)
            for run in runs
            if run.inputs.n_devices and phase in (costs := run.strongest_costs)
        )
        if len({n for n, *_ in points}) < 2:
            continue
        is_drawn = True
        line = {"name": f"{phase} step", "points": [[letter, n, s] for n, s, letter in points]}
        described = (f"{letter} on {n} devices {format_seconds(s)}" for n, s, letter in points)
        yield factory.chart(
            "scaling",
            f"{phase.capitalize()} step time over devices",
            {"unit": "s", "lines": [line]},
            description=f"{'; '.join(described)}.",
            note=SCALING_NOTE,
        )
    if not is_drawn:
        yield unknown(
            "step times over devices: the runs use the same number of devices, or have no times"
        )
