"""The content of the section that compares several runs."""

from collections.abc import Iterator, Sequence

import polars as pl

from meshscope.analysis.catalog import Unavailable
from meshscope.analysis.explanation import explain
from meshscope.analysis.request import request_times
from meshscope.analysis.sides import Side
from meshscope.events.enums import Phase
from meshscope.units import format_seconds
from meshscope.views.explanation import sentences
from meshscope.views.html.blocks import Block, Chart, PageTable, Paragraph, page_table, unknown
from meshscope.views.html.page_run import PageRun
from meshscope.views.html.times import REQUEST_TIMES
from meshscope.views.model import (
    UNKNOWN_LABEL,
    CellValue,
    Unit,
    ViewTable,
    figure_column,
    text_column,
    view_columns,
)
from meshscope.views.plain import short
from meshscope.views.summary import fits_cell, gib_cell
from meshscope.views.times import time_figure

ONE_RUN = "This report has one run. Pass several runs to meshscope report to compare them."
SCALING_NOTE = (
    "The line joins the fastest run of each size. Dashed: ideal scaling from the smallest size."
)
NO_SCALING = "step times over devices: the runs use the same number of devices, or have no times"


def plan_blocks(runs: Sequence[PageRun]) -> Iterator[Block]:
    """The runs as rows, their step times over devices, and why each differs from the first."""
    if len(runs) == 1:
        yield Paragraph(text=ONE_RUN, class_name="unknown")
        return
    yield _plans(runs)
    yield _requests(runs)
    scaling = list(_scaling_charts(runs))
    yield from scaling or [unknown(NO_SCALING)]
    first = runs[0]
    for run in runs[1:]:
        left, right = (Side(name=r.letter, run=r.run, source=r.source) for r in (first, run))
        yield Paragraph(text=f"{run.letter} against {first.letter}", class_name="heading")
        for sentence in sentences(explain(left, right)):
            yield Paragraph(text=short(sentence, 800), class_name="say")


def _plans(runs: Sequence[PageRun]) -> PageTable:
    steps = (f"{phase} step_s" for phase in Phase)
    sent = (f"sent per {phase} step_bytes" for phase in Phase)
    view = ViewTable(
        title="Plans",
        columns=(
            *view_columns(("run", "model", "plan", "slice", "source"), ("devices", *steps, *sent)),
            figure_column("memory", Unit.MEMORY_BYTES),
            text_column("fits"),
        ),
        rows=tuple(map(_plan_row, runs)),
    )
    return page_table("plans-table", view)


def _plan_row(run: PageRun) -> tuple[CellValue, ...]:
    experiment, costs = run.run.manifest.experiment, run.strongest_costs
    memory = run.run.memory.get(run.source)
    topology = experiment.topology
    return (
        run.letter,
        short(experiment.model_name or UNKNOWN_LABEL, 80),
        run.plan,
        UNKNOWN_LABEL if topology is None else topology.name,
        run.source.value,
        experiment.n_devices,
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


def _requests(runs: Sequence[PageRun]) -> PageTable:
    """TTFT, TPOT and end-to-end time of every run, with range and basis."""
    times = ((figure_column(n, Unit.SECONDS), text_column("range")) for n in REQUEST_TIMES)
    columns = (text_column("run"), *(c for pair in times for c in pair), text_column("basis"))
    rows = tuple((run.letter, *_request_cells(run)) for run in runs)
    view = ViewTable(title="Request time", columns=columns, rows=rows)
    return page_table("requests-table", view)


def _request_cells(run: PageRun) -> Iterator[CellValue]:
    """Time and range of each duration by the strongest source, and its basis."""
    requests = list(request_times(run.run).values())
    if not requests:
        yield from (*(None,) * (2 * len(REQUEST_TIMES)), UNKNOWN_LABEL)
        return
    request = requests[-1]
    for time in (request.ttft, request.tpot, request.e2e):
        figure = None if time is None else time_figure(time)
        yield figure
        yield None if figure is None or figure.low is None else figure.range_text
    yield request.basis


def _scaling_charts(runs: Sequence[PageRun]) -> Iterator[Chart]:
    """Step time over devices, for phases whose runs differ in size."""
    for phase in Phase:
        points = sorted(
            (run.inputs.n_devices, costs[phase].step_s, run.letter)
            for run in runs
            if run.inputs.n_devices and phase in (costs := run.strongest_costs)
        )
        line = {"name": f"{phase} step", "points": [[letter, n, s] for n, s, letter in points]}
        if len({n for n, *_ in points}) > 1:
            yield Chart(
                kind="scaling",
                title=f"{phase.capitalize()} step time over devices",
                description="; ".join(
                    f"{letter} on {n} devices {format_seconds(s)}" for n, s, letter in points
                ),
                data={"unit": "s", "lines": [line]},
                note=SCALING_NOTE,
            )
