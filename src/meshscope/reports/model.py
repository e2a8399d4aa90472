"""The view model: typed tables and figures that terminal text, HTML, notebooks and plots render.

`format_cell` is the only place that turns a value into text. A null cell does not apply to its row (`-`); a `Figure`
without a value is not known (`unknown`). Strings from files and users are made safe to print.
"""

import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from meshscope.units import format_bytes, format_gib, format_rate, format_seconds

UNKNOWN_LABEL = "unknown"
UNKNOWN_PHASE_LABEL = "unknown phase"
UNKNOWN_AXIS_LABEL = "unknown axis"
EMPTY_LABEL = "-"


class Unit(StrEnum):
    """How a value is written."""

    TEXT = "text"
    NUMBER = "number"
    SECONDS = "seconds"
    BYTES = "bytes"
    MEMORY_BYTES = "memory_bytes"  # in GiB, as vendors size HBM
    BYTES_PER_S = "bytes_per_s"
    TOKENS_PER_S = "tokens_per_s"
    REQUESTS_PER_S = "requests_per_s"
    FLOPS = "flops"
    FRACTION = "fraction"


_SUFFIXES = {
    "_bytes_per_s": Unit.BYTES_PER_S,
    "_bytes": Unit.BYTES,
    "_gib": Unit.MEMORY_BYTES,
    "_frac": Unit.FRACTION,
    "_s": Unit.SECONDS,
    "flops": Unit.FLOPS,
}
# Words of column names that labels spell out.
_WORDS = {"dur": "duration", "flops": "FLOPs", "hbm": "HBM", "mbu": "MBU", "mfu": "MFU"}

_FORMATS: dict[Unit, Callable[[float], str]] = {
    Unit.SECONDS: format_seconds,
    Unit.BYTES: format_bytes,
    Unit.MEMORY_BYTES: format_gib,
    Unit.BYTES_PER_S: lambda rate: f"{format_bytes(rate)}/s",
    Unit.TOKENS_PER_S: lambda rate: f"{format_rate(rate)} tokens/s",
    Unit.REQUESTS_PER_S: lambda rate: f"{format_rate(rate)} requests/s",
    Unit.FLOPS: lambda flops: f"{format_bytes(flops).removesuffix('B')}FLOP",
    Unit.FRACTION: "{:.1%}".format,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value with its unit, its interval and its share of a whole.

    `low` and `high` bound the value in the same unit. A null value is unknown.
    """

    value: float | None
    unit: Unit
    low: float | None = None
    high: float | None = None
    share_frac: float | None = None

    @property
    def text(self) -> str:
        """`12.3 ms`, or `12.3 ms (25%)` with a share."""
        if self.value is None:
            return UNKNOWN_LABEL
        share = "" if self.share_frac is None else f" ({self.share_frac:.0%})"
        return f"{format_cell(self.value, self.unit)}{share}"

    @property
    def text_with_range(self) -> str:
        """`12.3 ms (10 to 20 ms)`, or the text alone without an interval."""
        is_known = self.low is not None and self.high is not None
        return f"{self.text} ({self.range_text})" if is_known else self.text

    @property
    def range_text(self) -> str:
        """`10 to 20 ms`, or with both units if they differ."""
        if self.low is None or self.high is None:
            return UNKNOWN_LABEL
        low, high = (format_cell(bound, self.unit) for bound in (self.low, self.high))
        unit = high[high.rfind(" ") :]
        return f"{low.removesuffix(unit)} to {high}"


CellValue = str | bool | float | Figure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewColumn:
    """A column: `key` names the field of the data, `label` is what a reader sees."""

    key: str
    label: str
    unit: Unit = Unit.TEXT

    @property
    def is_figure(self) -> bool:
        """Whether the column holds figures, which are right-aligned."""
        return self.unit is not Unit.TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTable:
    """A table to render. `shared` lists (label, text) of columns with one value in all rows."""

    title: str = ""
    columns: tuple[ViewColumn, ...]
    rows: tuple[tuple[CellValue, ...], ...]
    shared: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Every row has one cell for each column."""
        assert all(len(row) == len(self.columns) for row in self.rows)

    def only(self, is_shown: Callable[[int], bool]) -> "ViewTable":
        """The table with the columns at these indices."""
        kept = [i for i in range(len(self.columns)) if is_shown(i)]
        columns = tuple(self.columns[i] for i in kept)
        return replace(
            self, columns=columns, rows=tuple(tuple(r[i] for i in kept) for r in self.rows)
        )


def format_cell(value: CellValue, unit: Unit) -> str:
    """The text of a cell; text itself is returned as it is, unescaped."""
    if value is None:
        return EMPTY_LABEL
    if isinstance(value, Figure):
        return value.text
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def column(name: str) -> ViewColumn:
    """A column by a name that ends in its unit: `wire_bytes` -> `wire` in bytes; `count#` has plain figures.

    A name without such an ending is a text column.
    """
    if name.endswith("#"):
        return ViewColumn(key=name[:-1], label=name[:-1], unit=Unit.NUMBER)
    ending, unit = next(
        (e for e in _SUFFIXES.items() if e[0][0] == "_" and name.endswith(e[0])), ("", Unit.TEXT)
    )
    return ViewColumn(key=name, label=name.removesuffix(ending), unit=unit)


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[CellValue]],
    *,
    title: str = "",
    notes: Iterable[str] = (),
) -> ViewTable:
    """A table of rows; `column` says what the names of the columns mean."""
    return ViewTable(
        title=title,
        columns=tuple(map(column, columns)),
        rows=tuple(map(tuple, rows)),
        notes=tuple(notes),
    )


T = TypeVar("T")


def table_of(
    items: Iterable[T],
    columns: Mapping[str, str | Callable[[T], CellValue]],
    *,
    title: str = "",
    notes: Iterable[str] = (),
) -> ViewTable:
    """A row for each item; a column has the name of an attribute, or a function of the item."""
    rows = (
        [getattr(one, of) if isinstance(of, str) else of(one) for of in columns.values()]
        for one in items
    )
    return table(columns, rows, title=title, notes=notes)


def known(value: CellValue) -> CellValue:
    """The value of a cell, `unknown` for None; None itself does not apply."""
    return UNKNOWN_LABEL if value is None else value


def unit_of(column: str) -> Unit:
    """The unit in a column's name: `_s`, `_bytes`, `_bytes_per_s`, `_frac`, `flops`."""
    return next((unit for end, unit in _SUFFIXES.items() if column.endswith(end)), Unit.NUMBER)


def label_of(column: str) -> str:
    """A column's name in words, without its unit: `mean_dur_s` -> `mean duration`."""
    suffix = next((end for end in _SUFFIXES if end[0] == "_" and column.endswith(end)), "")
    name = (column.removesuffix(suffix) or column).removeprefix("n_").removeprefix("is_")
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


MAX_NAME = 300  # characters of a name in a table; real names have about a hundred


def short(text: object, limit: int = MAX_NAME) -> str:
    """`plain`, cut after `limit` characters, with the full length."""
    whole = str(text)
    if len(whole) <= limit:
        return plain(whole)
    return f"{plain(whole[:limit])}... [{len(whole):,} characters]"


def plain(text: object) -> str:
    """The text with every control, format and unassigned character escaped."""
    return "".join(
        c.encode("unicode_escape").decode("ascii")
        if c != " " and unicodedata.category(c).startswith(("C", "Z"))
        else c
        for c in str(text)
    )


WIDTH = 80


def wrapped(text: str, *, indent: int = 0) -> Iterator[str]:
    """The lines of a paragraph; words longer than a line stay whole."""
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
