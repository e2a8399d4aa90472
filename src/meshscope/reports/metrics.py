"""Metrics as tables for a terminal and pages, and as the document of --json."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import polars as pl
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis import catalog
from meshscope.analysis.overlap import SECONDS
from meshscope.events.enums import Phase
from meshscope.reports import model
from meshscope.reports.answer import request_of, title_of
from meshscope.reports.model import Unit, ViewColumn, ViewTable, format_cell, short
from meshscope.reports.tables import add_column, fits_console, new_table, rich_table
from meshscope.store.run import RunRecord

MAX_ROWS = 24  # per table on a terminal; --json prints all rows
MAX_TEXT = 60  # characters of a text cell
# Columns that a narrow terminal omits, by how their names begin.
_SECONDARY = (
    *("request_", "min_", "max_", "p90_", "n_steps_seen", "hidden_", "collective_compute"),
    *("low_", "high_", "bubble_", "unestimated_", "measured_dur", "dur_busbw", "algbw_"),
)
MEMORY_METRIC = "hbm"


def metrics_document(run: RunRecord) -> dict[str, Any]:
    """Every metric by name: its unit and rows, or the reason why it is unavailable."""
    results = catalog.metrics_of(catalog.metric_inputs(run))
    return {m.name: {"unit": m.unit, **_rows(results[m.name])} for m in catalog.METRICS}


def _rows(result: catalog.Result) -> dict[str, Any]:
    """JSON has no form for NaN and infinities, which are null."""
    if isinstance(result, catalog.Unavailable):
        return {"reason": result.reason}

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = result.iter_rows(named=True)
    return {"rows": [{name: finite(value) for name, value in row.items()} for row in rows]}


def metrics_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """The run, a table for each metric of its strongest source, then the unavailable ones with reasons."""
    yield Text.assemble((short(title_of(run)), "bold"), f" ({run.manifest.source})")
    yield from map(short, filter(None, [request_of(run)]))
    yield Text("")
    results = catalog.metrics_of(catalog.metric_inputs(run))
    for metric in catalog.METRICS:
        result = results[metric.name]
        if isinstance(result, catalog.Unavailable):
            continue
        yield Text.assemble((metric.title, "bold"), (f"  {metric.name}", "dim"))
        is_strongest = pl.lit(value=True)
        if "source" in result.columns:
            is_strongest = pl.col("source") == run.manifest.source.value
        strongest = result.filter(is_strongest)
        frame = strongest if len(strongest) else result
        yield from _tables(metric.name, frame, console)
        yield Text("")
    for reason, titles in unavailable(results).items():
        head = f"{model.UNKNOWN_LABEL}: {', '.join(titles)}"
        yield Text.assemble(head, (f"\n  {short(reason)}", "dim"))


def unavailable(results: Mapping[str, catalog.Result]) -> dict[str, list[str]]:
    """The titles of the metrics without a table, by the reason."""
    titles: dict[str, list[str]] = {}
    for metric in catalog.METRICS:
        if isinstance(result := results[metric.name], catalog.Unavailable):
            titles.setdefault(result.reason, []).append(metric.title)
    return titles


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
        pairs = [pair for pair in zip(view.columns, row, strict=True) if pair[1] is not None]
        cells = [(c, short(format_cell(value, c.unit), MAX_TEXT)) for c, value in pairs]
        text = ", ".join(cell for column, cell in cells if not column.is_figure)
        table.add_row(Text(text, "bold"))
        for column, cell in cells:
            if column.is_figure:
                table.add_row(f"  {column.label}", cell)
    return table


def metric_table(name: str, frame: pl.DataFrame, *, title: str = "") -> ViewTable:
    """`table_of_frame` of the metric `name`; the memory of a device is in GiB."""
    table = table_of_frame(frame, title=title)
    units = {Unit.BYTES: Unit.MEMORY_BYTES} if name == MEMORY_METRIC else {}
    columns = tuple(replace(c, unit=units.get(c.unit, c.unit)) for c in table.columns)
    return replace(table, columns=columns)


def table_of_frame(frame: pl.DataFrame, *, title: str = "") -> ViewTable:
    """A metric's rows, prefill first, without empty columns: null, or with counts of unsized operations that are 0.

    A text column with one value in several rows moves to `shared`, unless all columns would. A fraction whose
    label another column has is a `share`.
    """
    ordered = prefill_first(frame)
    empty = [c.name for c in ordered if c.null_count() == len(c)]
    if "n_unsized" in ordered.columns and not ordered["n_unsized"].sum():
        empty.append("n_unsized")
    timed = _with_seconds(ordered.drop(empty))
    texts = [c.name for c in timed if isinstance(c.dtype, pl.String | pl.Boolean)]
    constant = [c for c in texts if len(timed) > 1 and timed[c].n_unique() == 1]
    kept = timed.drop(constant) if len(constant) < len(timed.columns) else timed
    columns = list[ViewColumn]()
    labels = [model.label_of(name) for name in kept.columns]
    for name, label in zip(kept.columns, labels, strict=True):
        is_doubled = name.endswith("_frac") and labels.count(label) > 1
        unit = model.unit_of(name) if kept[name].dtype.is_numeric() else Unit.TEXT
        columns.append(
            ViewColumn(key=name, label=f"{label} share" if is_doubled else label, unit=unit)
        )
    shared = (c for c in timed.columns if c not in kept.columns)
    return ViewTable(
        title=title,
        columns=tuple(columns),
        rows=tuple(kept.iter_rows()),
        shared=tuple((model.label_of(c), format_cell(timed[c][0], Unit.TEXT)) for c in shared),
    )


def prefill_first(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows with prefill before decode, otherwise in their order."""
    if "phase" not in frame.columns:
        return frame
    ranks = {phase.value: i for i, phase in enumerate(Phase)}
    phase = pl.col("phase").cast(pl.String)  # without a phase in any row, polars knows no type
    rank = phase.replace_strict(ranks, default=len(ranks), return_dtype=pl.Int64)
    return frame.sort(rank, maintain_order=True)


def _with_seconds(frame: pl.DataFrame) -> pl.DataFrame:
    """Adds the suffix `_s` to intervals if the column `unit` says seconds in all rows."""
    if "unit" not in frame.columns or not (frame["unit"] == SECONDS).all():
        return frame
    intervals = ("up", "down", "window")
    lengths = (c for c in frame.columns if c in intervals or c.endswith(("_burst", "_gap")))
    return frame.drop("unit").rename({c: f"{c}_s" for c in lengths})
