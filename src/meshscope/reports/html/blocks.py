"""The blocks of a page: a chart, or a mapping with its kind under `block` and what the template's macro of it takes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshscope.reports.charts.spec import Chart
from meshscope.reports.model import (
    CellValue,
    Figure,
    ViewColumn,
    ViewTable,
    format_cell,
    plain,
    short,
)

MAX_TEXT = 240  # characters of a text cell
MAX_ROWS = 300  # per table
WRAP_FROM, LONG_FROM = 24, 72  # characters from which a cell may wrap, and gets a wider column

Block = dict[str, Any] | Chart


def paragraph(text: str, style: str = "note") -> Block:
    """A paragraph with its CSS class."""
    return {"block": "paragraph", "text": text, "style": style}


def lines(texts: Iterable[str]) -> Block:
    """Lines of a terminal, in columns of equal characters."""
    return {"block": "lines", "text": "\n".join(texts)}


def tiles(figures: Iterable[tuple[str, str, str]]) -> Block:
    """Large figures in a row: (name, value, note)."""
    return {"block": "tiles", "tiles": list(figures)}


def descriptions(pairs: Iterable[tuple[str, str]]) -> Iterator[Block]:
    """Names and values, one pair per line; nothing without any, or for an empty value."""
    shown = [pair for pair in pairs if pair[1]]
    if shown:
        yield {"block": "descriptions", "pairs": shown}


def advice(rows: Iterable[tuple[str, str, str, str]], title: str = "Try next") -> Iterator[Block]:
    """Changes to try: (change, predicted gain, reason, command that predicts it); nothing without any."""
    shown = list(rows)
    if shown:
        yield {"block": "advice", "title": title, "rows": shown}


def fold(title: str, blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks under a title, closed at first; nothing without blocks."""
    inside = list(blocks)
    if inside:
        yield {"block": "fold", "title": title, "blocks": inside}


def columns(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks side by side if the window is wide; a single one takes the whole width."""
    inside = list(blocks)
    yield from [{"block": "columns", "blocks": inside}] if len(inside) > 1 else inside


def page_table(
    id_: str,
    view: ViewTable,
    *,
    note: str = "",
    footnotes: Sequence[str] = (),
    row_classes: Sequence[str] = (),
) -> Block:
    """A sortable table; its notes say how many rows are hidden and what all rows share.

    Cells refer to `footnotes` as [1], [2], ...; `row_classes` has one for each row, or none at all.
    """
    n_hidden = len(view.rows) - MAX_ROWS
    hidden = f"{n_hidden:,} more rows with show --json." if n_hidden > 0 else ""
    shared = "; ".join(
        f"{label}: {basis_text(text) if label == 'time basis' else short(text, MAX_TEXT)}"
        for label, text in view.shared
    )
    notes = (hidden, note, *view.notes, f"All rows: {shared}." if shared else "")
    rows = ([*map(_html_cell, view.columns, row)] for row in view.rows[:MAX_ROWS])
    return {
        "block": "table",
        "id": id_,
        "title": view.title,
        "columns": view.columns,
        "rows": list(zip(rows, [*row_classes, *[""] * MAX_ROWS], strict=False)),
        "note": " ".join(filter(None, notes)),
        "footnotes": footnotes,
    }


def _html_cell(column: ViewColumn, value: CellValue) -> tuple[str, float | None, str]:
    """A cell: its text, the value to sort and copy, and its CSS class."""
    number = value.value if isinstance(value, Figure) else value
    if isinstance(number, int | float) and not isinstance(number, bool):
        text = format_cell(value, column.unit)
        return text, number if math.isfinite(number) else None, "figure"
    text = short(format_cell(value, column.unit), MAX_TEXT)
    if column.key == "verdict":
        return text, None, f"is-{text.replace(' ', '-')}" if text else ""
    if column.is_figure:
        return text, None, "figure"
    if column.key in {"basis", "time_basis"}:
        text = basis_text(text)
    if len(text) > LONG_FROM:
        return text, None, "long"
    return text, None, "wrap" if len(text) > WRAP_FROM else ""


def basis_text(basis: str) -> str:
    """The sources of a time with spaces, so that the text wraps."""
    return plain(basis).replace("+", ", ").replace("_", " ")
