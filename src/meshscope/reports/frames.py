"""Data frames as tables: view tables of metrics, and HTML for notebooks. Apart from `reports.model`: it loads polars.

HTML has escaped text with inline style, without scripts or external files.
"""

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Any

import polars as pl

from meshscope.analysis.overlap import SECONDS
from meshscope.events.enums import Phase
from meshscope.reports.model import (
    Unit,
    ViewColumn,
    ViewTable,
    format_cell,
    label_of,
    plain,
    unit_of,
)
from meshscope.reports.words import counted

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
    texts = [c for c in timed.columns if isinstance(timed[c].dtype, pl.String | pl.Boolean)]
    constant = [c for c in texts if len(timed) > 1 and timed[c].n_unique() == 1]
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
    phase = pl.col("phase").cast(pl.String)  # without a phase in any row, polars knows no type
    rank = phase.replace_strict(ranks, default=len(ranks), return_dtype=pl.Int64)
    return frame.sort(rank, maintain_order=True)


def _is_empty(column: pl.Series) -> bool:
    """All null, or a count of unsized operations that is 0 in all rows."""
    return column.null_count() == len(column) or (column.name == "n_unsized" and not column.sum())


def _with_seconds(frame: pl.DataFrame) -> pl.DataFrame:
    """Adds the suffix `_s` to intervals if the column `unit` says seconds in all rows."""
    if "unit" not in frame.columns or not (frame["unit"] == SECONDS).all():
        return frame
    intervals = ("up", "down", "window")
    lengths = (c for c in frame.columns if c in intervals or c.endswith(("_burst", "_gap")))
    return frame.drop("unit").rename({c: f"{c}_s" for c in lengths})


MAX_ROWS = 50
MAX_TEXT = 200  # characters of a cell

_CELL = "padding:2px 10px 2px 0;border:0;vertical-align:top;white-space:nowrap"
_HEAD = "border-bottom:1px solid currentColor"
_SCROLL = "overflow-x:auto"
_TABLE = "border-collapse:collapse;border:0;font-variant-numeric:tabular-nums"


def folded_html(frame: pl.DataFrame, *, title: str) -> str:
    """The table, folded under its title and number of rows."""
    head = f"<b>{_escaped(title)}</b>, {counted(len(frame), 'row')}"
    return f"<details><summary>{head}</summary>{table_html(frame)}</details>"


def table_html(frame: pl.DataFrame, *, title: str = "") -> str:
    """The first rows as an HTML table with the frame's column names, and the number of hidden rows."""
    columns = [
        ViewColumn(key=name, label=name, unit=unit_of(name) if kind.is_numeric() else Unit.TEXT)
        for name, kind in frame.schema.items()
    ]
    heads = "".join(_cell("th", column.label, column) for column in columns)
    cells = (
        "".join(_cell("td", value, column) for value, column in zip(row, columns, strict=True))
        for row in frame.head(MAX_ROWS).iter_rows()
    )
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    n_hidden = len(frame) - MAX_ROWS
    foot = f"<p>{n_hidden:,} more rows</p>" if n_hidden > 0 else ""
    caption = f"<p><b>{_escaped(title)}</b></p>" if title else ""
    table = f'<table style="{_TABLE}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'{caption}<div style="{_SCROLL}">{table}</div>{foot}'


def _cell(tag: str, value: Any, column: ViewColumn) -> str:
    alignment = "right" if column.is_figure else "left"
    style = f"{_CELL};text-align:{alignment};{_HEAD if tag == 'th' else ''}"
    is_plain = value is None or isinstance(value, str | bool | int | float)
    text = format_cell(value, column.unit) if is_plain else str(value)
    return f'<{tag} style="{style}">{_escaped(text)}</{tag}>'


def _escaped(text: str) -> str:
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    return escape(plain(cut), quote=True)
