"""Tables of the view model made from polars frames, for metrics in every renderer.

Apart from `reports.model`, so that `predict` prints without loading polars.
"""

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from meshscope.analysis.intervals import SECONDS
from meshscope.events.enums import Phase
from meshscope.reports.model import Unit, ViewColumn, ViewTable, format_cell, label_of, unit_of

MEMORY_METRIC = "hbm"


def metric_table(name: str, frame: pl.DataFrame, *, title: str = "") -> ViewTable:
    """`table_of_frame` of the metric `name`; the memory of a device is in GiB."""
    table = table_of_frame(frame, title=title)
    if name != MEMORY_METRIC:
        return table
    columns = (
        replace(c, unit=Unit.MEMORY_BYTES) if c.unit is Unit.BYTES else c for c in table.columns
    )
    return replace(table, columns=tuple(columns))


def table_of_frame(frame: pl.DataFrame, *, title: str = "") -> ViewTable:
    """A metric's rows, prefill first, without empty columns.

    A text column with one value in several rows moves to `shared`, unless all columns would.
    """
    ordered = prefill_first(frame)
    filled = ordered.select(c for c in ordered.columns if not _is_empty(ordered[c]))
    timed = _with_seconds(filled)
    constant = [c for c in timed.columns if len(timed) > 1 and _is_constant_text(timed[c])]
    kept = timed.drop(constant) if len(constant) < len(timed.columns) else timed
    return ViewTable(
        title=title,
        columns=tuple(_columns(kept)),
        rows=tuple(kept.iter_rows()),
        shared=tuple(
            (label_of(c), format_cell(timed[c][0], Unit.TEXT))
            for c in timed.columns
            if c not in kept.columns
        ),
    )


def _columns(frame: pl.DataFrame) -> Iterator[ViewColumn]:
    """Columns with labels; a fraction whose label another column has is a `share`."""
    labels = [label_of(name) for name in frame.columns]
    for name, label in zip(frame.columns, labels, strict=True):
        is_doubled = name.endswith("_frac") and labels.count(label) > 1
        unit = unit_of(name) if frame[name].dtype.is_numeric() else Unit.TEXT
        yield ViewColumn(key=name, label=f"{label} share" if is_doubled else label, unit=unit)


def prefill_first(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows with prefill before decode, otherwise in their order."""
    if "phase" not in frame.columns:
        return frame
    ranks = {phase.value: i for i, phase in enumerate(Phase)}
    rank = pl.col("phase").replace_strict(ranks, default=len(ranks), return_dtype=pl.Int64)
    return frame.sort(rank, maintain_order=True)


def _is_empty(column: pl.Series) -> bool:
    """All null, or a count of unsized operations that is 0 in all rows."""
    return column.null_count() == len(column) or (column.name == "n_unsized" and not column.sum())


def _is_constant_text(column: pl.Series) -> bool:
    return isinstance(column.dtype, pl.String | pl.Boolean) and column.n_unique() == 1


def _with_seconds(frame: pl.DataFrame) -> pl.DataFrame:
    """Adds the suffix `_s` to intervals if the column `unit` says seconds in all rows."""
    if "unit" not in frame.columns or not (frame["unit"] == SECONDS).all():
        return frame
    lengths = [c for c in frame.columns if _is_interval(c)]
    return frame.drop("unit").rename({c: f"{c}_s" for c in lengths})


def _is_interval(column: str) -> bool:
    return column in {"up", "down", "window"} or column.endswith(("_burst", "_gap"))
