"""Tables as HTML for notebooks: escaped text with inline style, without scripts or external files."""

from collections.abc import Sequence
from html import escape
from typing import Any

import polars as pl

from meshscope.reports.model import Unit, ViewColumn, format_cell, unit_of
from meshscope.reports.plain import plain
from meshscope.reports.words import counted

MAX_ROWS = 50
MAX_TEXT = 200  # characters of a cell

_CELL = "padding:2px 10px 2px 0;border:0;vertical-align:top;white-space:nowrap"
_HEAD = "border-bottom:1px solid currentColor"
_SCROLL = "overflow-x:auto"
_TABLE = "border-collapse:collapse;border:0;font-variant-numeric:tabular-nums"


def folded_html(frame: pl.DataFrame, *, title: str) -> str:
    """The table, folded behind its title and number of rows."""
    head = f"<b>{_escaped(title)}</b>, {counted(len(frame), 'row')}"
    return f"<details><summary>{head}</summary>{table_html(frame)}</details>"


def table_html(frame: pl.DataFrame, *, title: str = "") -> str:
    """The first rows as an HTML table with the frame's column names, and the number of hidden rows."""
    columns = [_column(frame[name]) for name in frame.columns]
    heads = "".join(_cell("th", column.label, column) for column in columns)
    rows = "".join(_row(row, columns) for row in frame.head(MAX_ROWS).iter_rows())
    n_hidden = len(frame) - MAX_ROWS
    foot = f"<p>{n_hidden:,} more rows</p>" if n_hidden > 0 else ""
    caption = f"<p><b>{_escaped(title)}</b></p>" if title else ""
    table = f'<table style="{_TABLE}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'{caption}<div style="{_SCROLL}">{table}</div>{foot}'


def _column(series: pl.Series) -> ViewColumn:
    unit = unit_of(series.name) if series.dtype.is_numeric() else Unit.TEXT
    return ViewColumn(key=series.name, label=series.name, unit=unit)


def _row(row: Sequence[Any], columns: Sequence[ViewColumn]) -> str:
    cells = (_cell("td", value, column) for value, column in zip(row, columns, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _cell(tag: str, value: Any, column: ViewColumn) -> str:
    alignment = "right" if column.is_figure else "left"
    style = f"{_CELL};text-align:{alignment};{_HEAD if tag == 'th' else ''}"
    is_plain = value is None or isinstance(value, str | bool | int | float)
    text = format_cell(value, column.unit) if is_plain else str(value)
    return f'<{tag} style="{style}">{_escaped(text)}</{tag}>'


def _escaped(text: str) -> str:
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    return escape(plain(cut), quote=True)
