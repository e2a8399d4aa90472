"""Renders tables for a terminal: a rule below the header, no frame, long cells wrapped and never cut."""

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from textwrap import shorten
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.reports.model import (
    MAX_NAME,
    CellValue,
    ViewColumn,
    ViewTable,
    format_cell,
    plain,
    short,
    wrapped,
)
from meshscope.units import counted

MAX_WIDTH = 10_000  # columns; wider than any terminal
MAX_LINES, COLUMNS = 12, 80  # of an answer; its last line may say what else there is
LEAST_LINES = 4  # before an empty line at which an answer stops
T = TypeVar("T", bound=RenderableType)

# Styles of cells by the key of their column, or the label of their row, and their text.
_STYLES: dict[str, dict[str, str]] = {
    "fits": {"yes": "green", "NO": "bold red"},
    "verdict": {
        "equal": "green",
        "more bytes": "yellow",
        "fewer bytes": "yellow",
        "changed": "bold red",
        "missing": "bold red",
        "extra": "bold red",
    },
}


def new_table(*names: str, n_words: int = 1) -> Table:
    """An empty table; the first `n_words` columns hold text, the others figures."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for i, name in enumerate(names):
        add_column(table, name, is_figure=i >= n_words)
    return table


def add_column(table: Table, name: str, *, is_figure: bool = False) -> None:
    """Adds a column; text is left-aligned, figures are right-aligned."""
    lines = [plain(line) for line in name.splitlines()]
    table.add_column(
        Text("\n".join(lines)), overflow="fold", justify="right" if is_figure else "left"
    )


def rich_table(view: ViewTable, *, max_text: int = MAX_NAME) -> Table:
    """The table for a terminal, with the title over the first column if that has no label.

    Cells are cut after `max_text` characters.
    """
    table = new_table()
    for i, column in enumerate(view.columns):
        title = "" if i else view.title
        add_column(table, column.label or title, is_figure=column.is_figure)
    for row in view.rows:
        row_label = row[0] if isinstance(row[0], str) else ""
        cells = zip(view.columns, row, strict=True)
        table.add_row(*(cell_text(c, value, row_label, max_text) for c, value in cells))
    return table


def cell_text(
    column: ViewColumn, value: CellValue, row_label: str = "", max_text: int = MAX_NAME
) -> Text:
    """The text of a cell with its style."""
    text = short(format_cell(value, column.unit), max_text)
    styles = _STYLES.get(column.key) or _STYLES.get(row_label) or {}
    return Text(text, styles.get(text, ""))


def labeled(rows: Iterable[Sequence[str | Text]]) -> Table:
    """Rows of a dim label and cells, without lines."""
    grid = Table.grid(padding=(0, 2))
    for number, row in enumerate(rows):
        for at in range(len(row) if number == 0 else 0):
            grid.add_column(style="" if at else "dim", overflow="fold" if at else "ellipsis")
        grid.add_row(*row)
    return grid


def bullets(texts: Iterable[str], style: str = "") -> Table:
    """The texts one below the other, each after a dash; later lines of a text are indented."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for text in texts:
        grid.add_row(Text("-", style=style), Text(text, style=style))
    return grid


def fits_console(table: Table, console: Console) -> bool:
    """Whether the console shows the table without wrapping any cell."""
    unbounded = console.options.update(width=MAX_WIDTH)
    return console.measure(table, options=unbounded).maximum <= console.width


def fits_first_block(lines: Iterable[RenderableType], *, is_last: bool = True) -> bool:
    """Whether an answer, MAX_LINES lines of 80 columns, holds these, and a line more unless they are its last."""
    every, most = list(lines), MAX_LINES - (not is_last)
    if sum(map(_least_lines, every)) > most:  # rendering is slow
        return False
    console = Console(width=COLUMNS, file=StringIO(), markup=False, emoji=False)
    return sum(len(console.render_lines(line)) for line in every) <= most


def _least_lines(part: RenderableType) -> int:
    """Lines that a part takes at least: a line holds COLUMNS, and a space at which it is wrapped."""
    if isinstance(part, Table):
        cells = (column.cells for column in part.columns)
        return sum(max(map(_least_lines, row)) for row in zip(*cells, strict=True))
    n_columns = cell_len(str(part)) if isinstance(part, str | Text) else 0
    return max(1, -(-n_columns // (COLUMNS + 1)))


def shown_lines(lines: Sequence[str], basis: str = "", *, is_whole: bool = False) -> Sequence[str]:
    """The lines with the `basis` of their figures unless they say it; up to MAX_LINES of them unless `is_whole`.

    They stop at the last gap before, else before a sentence or row, and the last line says how many more there are.
    """
    plains = [Text.from_ansi(line).plain.strip() for line in lines]
    is_said = not basis or any(line.startswith("basis") for line in plains)
    if is_whole:
        return [*lines, *(() if is_said else wrapped(f"basis: {plain(basis)}"))]
    if len(lines) + (not is_said) <= MAX_LINES:
        return [*lines, *(() if is_said else [_basis_line(basis)])]
    gaps = (n for n in range(MAX_LINES - 1, LEAST_LINES, -1) if not plains[n])
    end = next(gaps, MAX_LINES - 1)
    while end > LEAST_LINES and lines[end][:1] == " ":  # the rest of a sentence or of a row
        end -= 1
    rest = f"--full adds {counted(sum(map(bool, plains[end:])), 'line')}"
    return [*lines[:end], _basis_line(basis, rest) if basis else rest]


def _basis_line(basis: str, rest: str = "") -> str:
    """One line of what figures rest on, then the `rest`: the phrases for which it has room, else the first words."""
    whole = "; ".join(filter(None, (f"basis: {plain(basis)}", rest)))
    if len(whole) <= COLUMNS:
        return whole
    room, phrases = COLUMNS - len("; --full"), f"basis: {plain(basis)}".split("; ")
    while len(phrases) > 1 and len("; ".join(phrases)) > room:
        phrases.pop()
    return f"{shorten('; '.join(phrases), room, placeholder=' ...')}; --full"


def with_first_block(parts: Iterable[T], gap: T) -> Iterator[T]:
    """The parts in order, with a `gap` before the first one for which the first block has no room."""
    shown, is_open = list[T](), True
    for part in parts:
        if is_open and shown and not fits_first_block((*shown, part), is_last=False):
            yield gap
            is_open = False
        shown.append(part)
        yield part


def first_block(head: Sequence[RenderableType], others: Iterable[T]) -> tuple[list[T], list[T]]:
    """Those of the others that the first block holds below its head, in order, and those that it does not."""
    shown, left = list[T](), list[T]()
    for other in others:
        fits = fits_first_block((*head, *shown, other), is_last=False)
        (shown if fits else left).append(other)
    return shown, left
