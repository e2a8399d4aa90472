"""Tables as HTML for notebooks: every text escaped, no script, no style from outside."""

from collections.abc import Sequence
from html import escape
from typing import Any

import polars as pl

from meshscope.events.text import printable

MAX_ROWS = 50
MAX_WORDS = 200  # characters of a text in a cell

_CELL = "padding:2px 10px 2px 0;border:0;vertical-align:top;white-space:nowrap"
_HEAD = "border-bottom:1px solid currentColor"
_SCROLL = "overflow-x:auto"
WHOLE = 1e4  # from here on, a figure needs no decimals
_TABLE = "border-collapse:collapse;border:0;font-variant-numeric:tabular-nums"


def folded_html(table: pl.DataFrame, *, title: str) -> str:
    """The table behind its title, which unfolds it."""
    n = f"{len(table):,} row{'' if len(table) == 1 else 's'}"
    return f"<details><summary><b>{_text(title)}</b>, {n}</summary>{table_html(table)}</details>"


def table_html(table: pl.DataFrame, *, title: str = "") -> str:
    """The first rows as an HTML table, with how many more there are."""
    heads = "".join(_cell("th", name, is_figure=_is_figure(table[name])) for name in table.columns)
    figures = [_is_figure(table[name]) for name in table.columns]
    rows = "".join(_row(row, figures) for row in table.head(MAX_ROWS).iter_rows())
    more = len(table) - MAX_ROWS
    foot = f"<p>{more:,} more rows</p>" if more > 0 else ""
    caption = f"<p><b>{_text(title)}</b></p>" if title else ""
    whole = f'<table style="{_TABLE}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'{caption}<div style="{_SCROLL}">{whole}</div>{foot}'


def _row(row: Sequence[Any], figures: Sequence[bool]) -> str:
    cells = (_cell("td", value, is_figure=f) for value, f in zip(row, figures, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _cell(tag: str, value: Any, *, is_figure: bool) -> str:
    look = f"{_CELL};text-align:{'right' if is_figure else 'left'}"
    return f'<{tag} style="{look};{_HEAD if tag == "th" else ""}">{_text(value)}</{tag}>'


def _text(value: Any) -> str:
    if value is None:
        return '<span style="opacity:.5">null</span>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if WHOLE <= abs(value) < float("inf") else f"{value:,.6g}"
    text = printable(str(value))
    return escape(text if len(text) <= MAX_WORDS else f"{text[: MAX_WORDS - 3]}...", quote=True)


def _is_figure(column: pl.Series) -> bool:
    return column.dtype.is_numeric()
