"""What a page is made of: sections of panels of blocks; every text in them is safe to show."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from meshscope.analysis.intervals import SECONDS
from meshscope.views.cells import column_words, figure_words
from meshscope.views.plain import plain

MAX_TEXT = 240  # characters of a text from outside that are shown
BROKEN, WRAPPED = 24, 72  # characters from which on a cell may take several lines, and does
MAX_ROWS = 300  # of one table

# Columns of metrics whose unit stands in another column.
_PLACED = ("up", "down", "window", "min_burst", "mean_burst", "max_burst")
_PLACED_TOO = ("min_gap", "mean_gap", "max_gap")


def shown(text: object, limit: int = MAX_TEXT) -> str:
    """The text without characters that steer, and cut where it is long, with its length said."""
    whole = str(text)
    cut = plain(whole[:limit])
    return cut if len(whole) <= limit else f"{cut}... [{len(whole):,} characters]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageColumn:
    """A column of a table."""

    name: str
    is_figure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell: its text, and the value by which it is sorted and as which it is copied."""

    text: str
    value: float | None = None
    class_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that can be sorted and copied; cells point to `footnotes` as [1], [2], ..."""

    block: ClassVar[str] = "table"
    id: str
    title: str
    columns: tuple[PageColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    footnotes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart that the script of the page draws; `description` tells in words what it shows."""

    block: ClassVar[str] = "chart"
    number: int
    kind: str
    title: str
    description: str
    data: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One large figure."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Large figures in a row."""

    block: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactList:
    """Names and values, one a line."""

    block: ClassVar[str] = "facts"
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A paragraph; `class_name` is how it looks."""

    block: ClassVar[str] = "paragraph"
    text: str
    class_name: str = "note"


Block = PageTable | Chart | Tiles | FactList | Paragraph


def unknown(reason: str) -> Paragraph:
    """Says why there is nothing to show."""
    return Paragraph(text=f"Not known: {shown(reason, 600)}.", class_name="unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The blocks of one run, or of all together where it has no title."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page; `is_paired` puts its panels beside each other where there is room."""

    id: str
    title: str
    lead: str
    panels: tuple[Panel, ...]
    is_paired: bool = False


def cell(column: str, value: Any) -> Cell:
    """A value as a cell, with the unit that the name of its column says."""
    if value is None:
        return Cell(text="-")
    if isinstance(value, bool):
        return Cell(text="yes" if value else "no")
    if isinstance(value, int | float):
        is_finite = value == value and abs(value) != float("inf")  # noqa: PLR0124  NaN alone differs from itself
        return Cell(
            text=figure_words(column, value),
            value=value if is_finite else None,
            class_name="figure",
        )
    if column == "time_basis":
        return text_cell(basis_words(str(value)))
    return text_cell(value)


def basis_words(basis: str) -> str:
    """What a time rests on, in words that wrap."""
    return basis.replace("+", ", ").replace("_", " ")


def text_cell(value: object, limit: int = MAX_TEXT) -> Cell:
    """A text, which wraps where it is long."""
    text = shown(value, limit)
    look = "long" if len(text) > WRAPPED else "wrap" if len(text) > BROKEN else ""
    return Cell(text=text, class_name=look)


def figure(text: str, value: float | None) -> Cell:
    """A figure with words of its own."""
    return Cell(text=text, value=value, class_name="figure")


def table_of_rows(
    id_: str, title: str, names: Sequence[str], rows: Iterable[Sequence[Cell]], *, note: str = ""
) -> PageTable:
    """A table of these rows; how many do not fit is said below it."""
    every = [tuple(row) for row in rows]
    kept = every[:MAX_ROWS]
    is_figure = [any("figure" in row[i].class_name for row in kept) for i in range(len(names))]
    more = (
        f"{len(every) - MAX_ROWS:,} more rows: `show --json` has all."
        if len(every) > MAX_ROWS
        else ""
    )
    return PageTable(
        id=id_,
        title=title,
        columns=tuple(
            PageColumn(name=n, is_figure=f) for n, f in zip(names, is_figure, strict=True)
        ),
        rows=tuple(kept),
        note=" ".join(filter(None, (more, note))),
    )


def table_of_frame(id_: str, title: str, frame: pl.DataFrame, *, note: str = "") -> PageTable:
    """A metric's table without the columns that say nothing; what is the same in all rows stands below."""
    told = with_unit(frame.select(c for c in frame.columns if not _says_nothing(frame[c])))
    same = [c for c in told.columns if len(told) > 1 and _is_same_word(told[c])]
    words = ", ".join(f"{column_words(c)} {cell(c, told[c][0]).text}" for c in same)
    kept = told.drop(same) if len(same) < len(told.columns) else told
    note = " ".join(filter(None, (note, f"All rows: {words}." if same else "")))
    rows = (
        [cell(name, value) for name, value in row.items()] for row in kept.iter_rows(named=True)
    )
    return table_of_rows(id_, title, _names(kept.columns), rows, note=note)


def _names(columns: Sequence[str]) -> list[str]:
    """Names in words; a share that would be named as its dividend says that it is one."""
    names = [column_words(c) for c in columns]
    return [
        f"{name} share" if column.endswith("_frac") and names.count(name) > 1 else name
        for name, column in zip(names, columns, strict=True)
    ]


def _says_nothing(column: pl.Series) -> bool:
    """Null everywhere; or none of what is counted apart, because it is not known, is there."""
    return column.null_count() == len(column) or (column.name == "n_unsized" and not column.sum())


def _is_same_word(column: pl.Series) -> bool:
    return isinstance(column.dtype, pl.String | pl.Boolean) and column.n_unique() == 1


def with_unit(frame: pl.DataFrame) -> pl.DataFrame:
    """Figures of a table whose `unit` is seconds throughout, named as seconds."""
    if "unit" not in frame.columns or not (frame["unit"] == SECONDS).all():
        return frame
    places = [c for c in frame.columns if c in (*_PLACED, *_PLACED_TOO)]
    return frame.drop("unit").rename({c: f"{c}_s" for c in places})
