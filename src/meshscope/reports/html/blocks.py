"""The blocks of a page: sections of panels of tables, charts, tiles and paragraphs, all safe to show."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from meshscope.reports.charts.spec import Chart
from meshscope.reports.model import (
    CellValue,
    Figure,
    ViewColumn,
    ViewTable,
    format_cell,
)
from meshscope.reports.plain import plain, short

MAX_TEXT = 240  # characters of a text cell
MAX_ROWS = 300  # per table
WRAP_FROM, LONG_FROM = 24, 72  # characters from which a cell may wrap, and gets a wider column


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlCell:
    """A cell: its text, the value to sort and copy, and its CSS class."""

    text: str
    value: float | None = None
    class_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A sortable table; cells refer to `footnotes` as [1], [2], ..."""

    block: ClassVar[str] = "table"
    id: str
    title: str
    columns: tuple[ViewColumn, ...]
    rows: tuple[tuple[HtmlCell, ...], ...]
    note: str = ""
    footnotes: tuple[str, ...] = ()
    row_classes: tuple[str, ...] = ()  # one for each row, or none at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One large figure with its name and a note."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Large figures in a row."""

    block: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptionList:
    """Names and values, one pair per line."""

    block: ClassVar[str] = "descriptions"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A paragraph with its CSS class."""

    block: ClassVar[str] = "paragraph"
    text: str
    class_name: str = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSegment:
    """A segment of a bar whose whole width is 100; its CSS class gives the color."""

    name: str
    start: float
    width: float
    class_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBar:
    """The memory of one device beside its HBM: drawn without a script, in hundredths of its width."""

    block: ClassVar[str] = "fit"
    text: str
    class_name: str
    segments: tuple[BarSegment, ...]
    limit: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change to try: its predicted gain, why, and the command that predicts it."""

    change: str
    gain: str
    reason: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advices:
    """Changes or commands to try."""

    block: ClassVar[str] = "advices"
    title: str = "Try next"
    advices: tuple[Advice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedBlocks:
    """Blocks behind a title, closed at first."""

    block: ClassVar[str] = "fold"
    title: str
    blocks: "tuple[Block, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Blocks side by side if the window is wide."""

    block: ClassVar[str] = "columns"
    blocks: "tuple[Block, ...]"


Block = (
    PageTable
    | Chart
    | Tiles
    | DescriptionList
    | Paragraph
    | FitBar
    | Advices
    | FoldedBlocks
    | Columns
)


def flattened(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks in the order of the page, with those inside others."""
    for block in blocks:
        yield block
        if isinstance(block, FoldedBlocks | Columns):
            yield from flattened(block.blocks)


def fold(title: str, blocks: Iterable[Block]) -> Iterator[FoldedBlocks]:
    """The blocks behind a title; nothing without blocks."""
    inside = tuple(blocks)
    if inside:
        yield FoldedBlocks(title=title, blocks=inside)


def columns(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks side by side; a single one takes the whole width."""
    inside = tuple(blocks)
    yield from [Columns(blocks=inside)] if len(inside) > 1 else inside


def page_table(
    id_: str,
    view: ViewTable,
    *,
    note: str = "",
    footnotes: Sequence[str] = (),
    row_classes: Sequence[str] = (),
) -> PageTable:
    """The table for a page; its notes say how many rows are hidden and what all rows share."""
    n_hidden = len(view.rows) - MAX_ROWS
    hidden = f"{n_hidden:,} more rows with show --json." if n_hidden > 0 else ""
    shared = "; ".join(f"{label}: {_shared_text(label, text)}" for label, text in view.shared)
    notes = (hidden, note, *view.notes, f"All rows: {shared}." if shared else "")
    return PageTable(
        id=id_,
        title=view.title,
        columns=view.columns,
        rows=tuple(
            tuple(_html_cell(c, value) for c, value in zip(view.columns, row, strict=True))
            for row in view.rows[:MAX_ROWS]
        ),
        note=" ".join(filter(None, notes)),
        footnotes=tuple(footnotes),
        row_classes=tuple(row_classes[:MAX_ROWS]),
    )


def _shared_text(label: str, text: str) -> str:
    return basis_text(text) if label == "time basis" else short(text, MAX_TEXT)


def _html_cell(column: ViewColumn, value: CellValue) -> HtmlCell:
    number = value.value if isinstance(value, Figure) else value
    if isinstance(number, int | float) and not isinstance(number, bool):
        return HtmlCell(
            text=format_cell(value, column.unit),
            value=number if math.isfinite(number) else None,
            class_name="figure",
        )
    text = short(format_cell(value, column.unit), MAX_TEXT)
    if column.key == "verdict":
        return HtmlCell(text=text, class_name=f"is-{text.replace(' ', '-')}" if text else "")
    if column.is_figure:
        return HtmlCell(text=text, class_name="figure")
    if column.key in {"basis", "time_basis"}:
        text = basis_text(text)
    size = "long" if len(text) > LONG_FROM else "wrap" if len(text) > WRAP_FROM else ""
    return HtmlCell(text=text, class_name=size)


def basis_text(basis: str) -> str:
    """The sources of a time with spaces, so that the text wraps."""
    return plain(basis).replace("+", ", ").replace("_", " ")
