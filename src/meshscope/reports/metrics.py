"""The metrics of a run as tables for a terminal, and as the document of --json."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import polars as pl
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.catalog import (
    ALIASES,
    METRICS,
    Result,
    Unavailable,
    metric_inputs,
    metrics_of,
)
from meshscope.reports.frames import metric_table
from meshscope.reports.model import (
    UNKNOWN_LABEL,
    UNKNOWN_PHASE_LABEL,
    ViewColumn,
    ViewTable,
    format_cell,
    short,
)
from meshscope.reports.tables import add_column, fits_console, new_table, rich_table
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes

MAX_ROWS = 24  # per table on a terminal; --json prints all rows
MAX_TEXT = 60  # characters of a text cell
# Columns that a narrow terminal omits, by how their names begin.
_SECONDARY = (
    *("request_", "min_", "max_", "p90_", "n_steps_seen", "hidden_", "collective_compute"),
    *("low_", "high_", "bubble_", "unestimated_", "measured_dur", "dur_busbw", "algbw_"),
)


def metrics_document(run: RunRecord) -> dict[str, Any]:
    """Every metric by name: its unit and rows, or the reason why it is unavailable."""
    results = metrics_of(metric_inputs(run))
    documents = {m.name: _document(m.unit, results[m.name]) for m in METRICS}
    return documents | {alias: documents[name] for alias, name in ALIASES.items()}


def _document(unit: str, result: Result) -> dict[str, Any]:
    """JSON has no form for NaN and infinities, which are null."""
    if isinstance(result, Unavailable):
        return {"unit": unit, "reason": result.reason}

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = result.iter_rows(named=True)
    return {"unit": unit, "rows": [{name: finite(v) for name, v in row.items()} for row in rows]}


def metrics_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """A table for each metric of the run's strongest source, then the unavailable ones with reasons."""
    unavailable: dict[str, list[str]] = {}
    results = metrics_of(metric_inputs(run))
    for metric in METRICS:
        result = results[metric.name]
        if isinstance(result, Unavailable):
            unavailable.setdefault(result.reason, []).append(metric.title)
            continue
        yield Text.assemble((metric.title, "bold"), (f"  {metric.name}", "dim"))
        is_strongest = pl.lit(value=True)
        if "source" in result.columns:
            is_strongest = pl.col("source") == run.manifest.source.value
        strongest = result.filter(is_strongest)
        frame = strongest if len(strongest) else result
        grids = list(_grids(frame, console)) if metric.name == "traffic_matrix" else []
        yield from grids or _tables(metric.name, frame, console)
        yield Text("")
    for reason, titles in unavailable.items():
        head = f"{UNKNOWN_LABEL}: {', '.join(titles)}"
        yield Text.assemble(head, (f"\n  {short(reason)}", "dim"))


def _tables(name: str, frame: pl.DataFrame, console: Console) -> Iterator[RenderableType]:
    if frame.is_empty():
        yield Text("  none", style="dim")
        return
    view = metric_table(name, frame)
    if view.shared:
        shared = ", ".join(f"{label} {short(text, MAX_TEXT)}" for label, text in view.shared)
        yield Text(f"  {shared}", style="dim")
    n_hidden = len(view.rows) - MAX_ROWS
    yield _fitting(replace(view, rows=view.rows[:MAX_ROWS]), console)
    if n_hidden > 0:
        yield Text(f"  {n_hidden:,} more rows with --json", style="dim")


def _grids(matrix: pl.DataFrame, console: Console) -> Iterator[RenderableType]:
    """The traffic matrix of each phase as a grid of senders and receivers; nothing if too wide."""
    devices = sorted({*matrix["from_device"], *matrix["to_device"]})
    grids: list[RenderableType] = []
    for phase in matrix["phase"].unique(maintain_order=True).sort(descending=True):
        of_phase = matrix.filter(pl.col("phase").eq_missing(pl.lit(phase)))
        sums = of_phase.group_by("from_device", "to_device").agg(pl.col("wire_bytes").sum())
        cells = {(sender, receiver): format_bytes(n) for sender, receiver, n in sums.rows()}
        grid = new_table("from \\ to", *map(str, devices))
        for sender in devices:
            grid.add_row(str(sender), *(cells.get((sender, one), "") for one in devices))
        if not fits_console(grid, console):
            return
        axes = " and ".join(sorted({str(axis) for axis in of_phase["axis"]}))
        heading = f"  {phase or UNKNOWN_PHASE_LABEL}, {short(axes)}"
        grids += [Text(heading, style="dim"), grid]
    yield from grids


def _fitting(view: ViewTable, console: Console) -> Table:
    """The first layout that fits the console: flat, stacked header, fewer columns, one figure a line."""
    columns = tuple(replace(one, label=one.label.replace(" ", "\n")) for one in view.columns)
    stacked = replace(view, columns=columns)
    few = stacked.only(lambda i: not columns[i].key.startswith(_SECONDARY))
    for one in (view, stacked, few):
        flat = rich_table(one, max_text=MAX_TEXT)
        if fits_console(flat, console):
            return flat
    table = new_table()
    add_column(table, "")
    add_column(table, "", is_figure=True)
    for row in view.rows:
        cells = [
            (c, value) for c, value in zip(view.columns, row, strict=True) if value is not None
        ]
        text = ", ".join(_cell(c, value) for c, value in cells if not c.is_figure)
        table.add_row(Text(text, "bold"))
        for column, value in cells:
            if column.is_figure:
                table.add_row(f"  {column.label}", _cell(column, value))
    return table


def _cell(column: ViewColumn, value: Any) -> str:
    return short(format_cell(value, column.unit), MAX_TEXT)
