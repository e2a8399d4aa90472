"""The metrics of a run as tables for people, and as the values that --json prints."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.catalog import ALIASES, METRICS, Result, metrics_of
from meshscope.analysis.intervals import SECONDS
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.run_inputs import metric_inputs
from meshscope.events.enums import Phase
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes
from meshscope.views.cells import column_words, figure_words
from meshscope.views.plain import short
from meshscope.views.tables import add_column, new_table

UNKNOWN_PHASE = "unknown phase"
MAX_ROWS = 24  # of one table on a screen; --json has them all
MAX_WORDS = 60  # characters of a text in a cell
_PLACED = ("up", "down", "window")  # with bursts and gaps: lengths in the unit of their rows
_BESIDES = (
    "request_",
    "min_",
    "max_",
    "p90_",
    "n_steps_seen",
    "hidden_",
    "collective_compute",
    "low_",
    "high_",
    "bubble_",
    "unestimated_",
    "measured_dur",
    "dur_busbw",
    "algbw_",
)  # columns that a narrow terminal goes without
MAX_WIDTH = 10_000  # wider than any terminal: how wide a table would be if it could


def metrics_document(run: RunRecord) -> dict[str, Any]:
    """Every metric by its name: its unit and its rows, or the reason why it is not known."""
    found = metrics_of(metric_inputs(run))
    documents = {m.name: _document(m.unit, found[m.name]) for m in METRICS}
    return documents | {alias: documents[name] for alias, name in ALIASES.items()}


def _document(unit: str, result: Result) -> dict[str, Any]:
    if isinstance(result, Unavailable):
        return {"unit": unit, "reason": result.reason}
    return {"unit": unit, "rows": [_finite(row) for row in result.iter_rows(named=True)]}


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """A number that is none has no form in JSON: it is unknown."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def metrics_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """A table for each metric of the run's strongest source, then what is not known and why."""
    unknown: dict[str, list[str]] = {}
    found = metrics_of(metric_inputs(run))
    for metric in METRICS:
        result = found[metric.name]
        if isinstance(result, Unavailable):
            unknown.setdefault(result.reason, []).append(metric.title)
            continue
        yield Text.assemble((metric.title, "bold"), (f"  {metric.name}", "dim"))
        own = _of_strongest(result, run)
        grids = list(_grids(own, console)) if metric.name == "traffic_matrix" else []
        yield from grids or _tables(own, console)
        yield Text("")
    for reason, titles in unknown.items():
        yield Text.assemble("unknown: ", ", ".join(titles), (f"\n  {short(reason)}", "dim"))


def _of_strongest(table: pl.DataFrame, run: RunRecord) -> pl.DataFrame:
    if "source" not in table.columns:
        return table
    own = table.filter(pl.col("source") == run.manifest.source.value)
    return own if len(own) else table


def _tables(table: pl.DataFrame, console: Console) -> Iterator[RenderableType]:
    """The table without columns that say nothing, those that are the same in all rows in words."""
    if table.is_empty():
        yield Text("  none", style="dim")
        return
    ordered = _by_phase(table)
    empty = [c for c in ordered.columns if _says_nothing(ordered[c])]
    kept = _with_unit(ordered.drop(empty))
    same = [c for c in kept.columns if _is_word(kept[c]) and kept[c].n_unique() == 1]
    if same and len(kept) > 1:
        yield Text("  " + ", ".join(f"{c} {_cell(c, kept[c][0])}" for c in same), style="dim")
        kept = kept.drop(same)
    yield _fitting(kept.head(MAX_ROWS), console)
    if len(kept) > MAX_ROWS:
        yield Text(f"  {len(kept) - MAX_ROWS:,} more rows with --json", style="dim")


def _grids(matrix: pl.DataFrame, console: Console) -> Iterator[RenderableType]:
    """The traffic matrix of each phase as a grid, senders down and receivers across; none if too wide."""
    devices = sorted({*matrix["from_device"], *matrix["to_device"]})
    drawn: list[RenderableType] = []
    for phase in matrix["phase"].unique(maintain_order=True).sort(descending=True):
        own = matrix.filter(pl.col("phase").eq_missing(pl.lit(phase)))
        sums = own.group_by("from_device", "to_device").agg(pl.col("wire_bytes").sum())
        cells = {(a, b): format_bytes(n) for a, b, n in sums.rows()}
        table = new_table("from \\ to", *map(str, devices))
        for source in devices:
            table.add_row(str(source), *(cells.get((source, target), "") for target in devices))
        unbounded = console.options.update(width=MAX_WIDTH)
        if console.measure(table, options=unbounded).maximum > console.width:
            return
        axes = sorted({str(axis) for axis in own["axis"]})
        drawn += [
            Text(f"  {phase or UNKNOWN_PHASE}, {short(' and '.join(axes))}", style="dim"),
            table,
        ]
    yield from drawn


def _with_unit(table: pl.DataFrame) -> pl.DataFrame:
    """Figures of a table whose `unit` is seconds throughout, named as seconds."""
    if "unit" not in table.columns or not (table["unit"] == SECONDS).all():
        return table
    places = [c for c in table.columns if c in _PLACED or c.endswith(("_burst", "_gap"))]
    return table.drop("unit").rename({c: f"{c}_s" for c in places})


def _says_nothing(column: pl.Series) -> bool:
    """Null everywhere; or none of what is counted apart, because it is not known, is there."""
    return column.null_count() == len(column) or (column.name == "n_unsized" and not column.sum())


def _is_word(column: pl.Series) -> bool:
    return isinstance(column.dtype, pl.String | pl.Boolean)


def _by_phase(table: pl.DataFrame) -> pl.DataFrame:
    """Prefill before decode; the order stays otherwise."""
    if "phase" not in table.columns:
        return table
    ranks = {phase.value: i for i, phase in enumerate(Phase)}
    rank = pl.col("phase").replace_strict(ranks, default=len(ranks), return_dtype=pl.Int64)
    return table.sort(rank, maintain_order=True)


def _fitting(table: pl.DataFrame, console: Console) -> Table:
    """Names in one line; or over each other; or without what a wider terminal has; or figure by figure."""
    for layout in (_flat, _tall, _brief):
        drawn = layout(table)
        unbounded = console.options.update(width=MAX_WIDTH)
        if console.measure(drawn, options=unbounded).maximum <= console.width:
            return drawn
    return _long(table)


def _flat(table: pl.DataFrame) -> Table:
    return _drawn(table, [column_words(c) for c in table.columns])


def _tall(table: pl.DataFrame) -> Table:
    return _drawn(table, [column_words(c).replace(" ", "\n") for c in table.columns])


def _brief(table: pl.DataFrame) -> Table:
    return _tall(table.drop([c for c in table.columns if c.startswith(_BESIDES)]))


def _drawn(table: pl.DataFrame, names: Sequence[str]) -> Table:
    drawn = new_table()
    for name, column in zip(names, table.columns, strict=True):
        add_column(drawn, name, is_figure=table[column].dtype.is_numeric())
    for row in table.iter_rows(named=True):
        drawn.add_row(*(_cell(name, value) for name, value in row.items()))
    return drawn


def _long(table: pl.DataFrame) -> Table:
    """Words of a row together, then each figure on a line of its own."""
    words = [c for c in table.columns if not table[c].dtype.is_numeric()]
    drawn = new_table("", "", n_words=1)
    for row in table.iter_rows(named=True):
        drawn.add_row(
            Text(", ".join(_cell(c, row[c]) for c in words if row[c] is not None), "bold")
        )
        for name in table.columns:
            if name not in words and row[name] is not None:
                drawn.add_row(f"  {column_words(name)}", _cell(name, row[name]))
    return drawn


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return figure_words(column, value)
    return short(value, MAX_WORDS)
