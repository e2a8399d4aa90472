"""The collectives of one phase as a table: wide with everything in line, narrow with footnotes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.grouping import grouped, layer_ranges, without_place
from meshscope.analysis.join import Match, Verdict
from meshscope.events.collective import Collective
from meshscope.units import format_bytes
from meshscope.views.plain import short
from meshscope.views.tables import add_column, new_table
from meshscope.views.words import UNKNOWN, array_words, group_words, opcode_words, source_words

STYLES: dict[Verdict, str] = {
    Verdict.EQUAL: "green",
    Verdict.MORE_BYTES: "yellow",
    Verdict.FEWER_BYTES: "yellow",
    Verdict.CHANGED: "bold red",
    Verdict.MISSING: "bold red",
    Verdict.EXTRA: "bold red",
}

MAX_WIDTH = 10_000  # wider than any terminal: how wide a table would be if it could

# What `count`, `payload` and `wire` mean; printed below the tables.
LEGEND = (
    "groups: how many x devices in each, DCN where one spans slices. "
    "count: times in one step on one device. payload: the whole array of one operation. "
    "wire: what one device sends for it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """One line of the table; `counts` has one entry for each side that is shown."""

    row: Collective
    layers: tuple[int, ...]
    counts: tuple[int | None, ...]
    verdict: Verdict | None = None
    remarks: tuple[str, ...] = ()


def lines_of_rows(rows: Iterable[Collective]) -> list[TableLine]:
    """The rows of one source, grouped over layers."""
    return _merged(
        TableLine(
            row=group.row,
            layers=group.layers,
            counts=(group.row.count,),
            remarks=_own_remarks(group.row),
        )
        for group in grouped(rows)
    )


def lines_of_matches(matches: Iterable[Match]) -> list[TableLine]:
    """Both sides of a comparison, each match one line with its verdict."""
    return _merged(
        TableLine(
            row=_shown(match),
            layers=match.layers,
            counts=(match.count if match.left else None, match.count if match.right else None),
            verdict=match.verdict,
            remarks=_remarks(match),
        )
        for match in matches
    )


def _shown(match: Match) -> Collective:
    """The row to show; where the right one does not tell its shape, with that of its partner."""
    row, left = match.shown, match.left
    if row.shape is None and left is not None:
        return replace(row, shape=left.shape)
    return row


def with_middle(lines: Iterable[TableLine], middle: Iterable[TableLine]) -> list[TableLine]:
    """Lines with counts (left, right) as (left, middle, right); `middle` are those of (left, middle).

    What only the middle has stays, as a line of its own.
    """
    counts = {_identity(line): line for line in middle}
    joined: list[TableLine] = []
    for line in lines:
        between = counts.pop(_identity(line), None)
        left, right = line.counts
        joined.append(replace(line, counts=(left, between.counts[1] if between else None, right)))
    return [*joined, *(replace(line, counts=(*line.counts, None)) for line in counts.values())]


def _identity(line: TableLine) -> tuple[object, ...]:
    row = line.row
    place = (row.phase, row.stage, row.part, line.layers)
    return (*place, row.kind, row.axis, row.groups, row.dtype, row.shape)


def _merged(lines: Iterable[TableLine]) -> list[TableLine]:
    """Lines that look the same, such as the gathers of two equal weights, as one with both counts."""
    members: dict[TableLine, list[TableLine]] = {}
    for line in lines:
        members.setdefault(_look(line), []).append(line)
    return [replace(same[0], counts=_sum_counts(same)) for same in members.values()]


def _look(line: TableLine) -> TableLine:
    """The line without its counts and without what the table does not show of a row."""
    shown = replace(
        without_place(line.row), source_line=None, hlo_shape=None, inserted_by=None, opcode=None
    )
    return replace(line, row=shown, counts=())


def _sum_counts(lines: Sequence[TableLine]) -> tuple[int | None, ...]:
    """Counts of each side; None where no line has that side."""
    sides = zip(*(line.counts for line in lines), strict=True)
    return tuple(
        None if None in counts else sum(count for count in counts if count is not None)
        for counts in sides
    )


def collectives_table(
    lines: Sequence[TableLine], *, sides: Sequence[str], console: Console
) -> RenderableType:
    """The table of these lines in the first layout that the console is wide enough for.

    Remarks stand in line, or else below as footnotes; if that is still too wide, two cells stand on
    top of each other. `sides` names the counts.
    """
    wide = _flat(_cells(line, sides, "; ".join(line.remarks)) for line in lines)
    if _fits(wide, console):
        return wide
    footnotes = Footnotes()
    marked = [_cells(line, sides, footnotes.marks(line.remarks)) for line in lines]
    flat = _flat(marked)
    return Group(flat if _fits(flat, console) else _stacked(marked), *footnotes.lines())


def _fits(table: Table, console: Console) -> bool:
    unbounded = console.options.update(width=MAX_WIDTH)
    return console.measure(table, options=unbounded).maximum <= console.width


@dataclass(slots=True)
class Footnotes:
    """Texts that stand below a table, each once, with the marks that point to them."""

    texts: list[str] = field(default_factory=list[str])

    def marks(self, remarks: Iterable[str]) -> str:
        """The marks of these texts, which are kept."""
        return " ".join(self._mark(remark) for remark in remarks)

    def _mark(self, remark: str) -> str:
        if remark not in self.texts:
            self.texts.append(remark)
        return f"[{self.texts.index(remark) + 1}]"

    def lines(self) -> list[Table]:
        """The texts with their marks, for the terminal."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right")
        grid.add_column(overflow="fold")
        for number, text in enumerate(self.texts, start=1):
            grid.add_row(Text(f"  [{number}]", style="dim"), Text(text, style="dim"))
        return [grid] if self.texts else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A cell with the name of its column; the stacked layout puts `below` under the one before."""

    column: str
    text: str
    below: bool = False
    is_figure: bool = False
    style: str = ""


def _cells(line: TableLine, sides: Sequence[str], remark: str) -> list[_Cell]:
    row = line.row
    counts = zip(sides, line.counts, strict=True)
    cells = [
        _Cell(column="collective", text=row.kind),
        _Cell(column="array", text=array_words(row), below=True),
        _Cell(column="stage", text="" if row.stage is None else str(row.stage)),
        _Cell(column="part", text=row.part or UNKNOWN),
        _Cell(column="layers", text=layer_ranges(line.layers), below=True),
        _Cell(column="axis", text=row.axis or UNKNOWN),
        _Cell(column="groups", text=group_words(row), below=True),
        *(
            _Cell(column=side, text=_count(count), below=i > 0, is_figure=True)
            for i, (side, count) in enumerate(counts)
        ),
        _Cell(column="payload", text=format_bytes(row.payload_bytes), is_figure=True),
        _Cell(column="wire", text=format_bytes(row.wire_bytes), below=True, is_figure=True),
    ]
    if line.verdict is not None:
        cells.append(_Cell(column="verdict", text=line.verdict, style=STYLES[line.verdict]))
    return [*cells, _Cell(column="remarks", text=remark, below=line.verdict is not None)]


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _flat(rows: Iterable[Sequence[_Cell]]) -> Table:
    """Every cell in a column of its own; a column without any text is left out."""
    found = list(rows)
    kept = [i for i, column in enumerate(zip(*found, strict=True)) if any(c.text for c in column)]
    return _drawn([[[row[i]] for i in kept] for row in found])


def _stacked(rows: Sequence[Sequence[_Cell]]) -> Table:
    """Two cells in each column, one below the other; stages and remarks only where there are some."""
    stacks: list[list[list[_Cell]]] = []
    told = {cell.column for row in rows for cell in row if cell.text}
    for row in rows:
        stacks.append([])
        for cell in row:
            if cell.column in {"stage", "remarks"} - told:
                continue
            if cell.below:
                stacks[-1][-1].append(replace(cell, style="dim"))
            else:
                stacks[-1].append([cell])
    return _drawn(stacks)


def _drawn(rows: Sequence[Sequence[Sequence[_Cell]]]) -> Table:
    table = new_table()
    for stack in rows[0]:
        add_column(table, "\n".join(c.column for c in stack), is_figure=stack[0].is_figure)
    for row in rows:
        table.add_row(*(_stack_text(stack) for stack in row))
    return table


def _stack_text(stack: Sequence[_Cell]) -> Text:
    return Text("\n").join(Text(short(cell.text), cell.style) for cell in stack)


def _own_remarks(row: Collective) -> tuple[str, ...]:
    """The algorithm, and whatever the compiler did that the kind does not say."""
    opcode = opcode_words(row)
    remarks = (
        row.algorithm,
        f"as {opcode}" if opcode else None,
        "async" if row.is_async else None,
        row.axis_reason,
    )
    return tuple(short(remark) for remark in remarks if remark)


def _remarks(match: Match) -> tuple[str, ...]:
    notes = [match.note, _cost_remark(match)]
    if match.verdict in {Verdict.CHANGED, Verdict.EXTRA}:
        notes.append(_origin(match.shown))
    return (*(short(note) for note in notes if note), *_own_remarks(match.shown))


def _origin(row: Collective) -> str | None:
    """Who put the operation there, and for which line of the program."""
    words = [
        f"by the {row.inserted_by}" if row.inserted_by else "",
        f"at {source_words(row.source_line)}" if row.source_line else "",
    ]
    return " ".join(filter(None, words)) or None


def _cost_remark(match: Match) -> str | None:
    """What the left side sends, where the right one sends something else for the same meaning."""
    left, right = match.left, match.right
    if left is None or right is None or left.wire_bytes == right.wire_bytes:
        return None
    is_same = left.kind is right.kind and left.payload_bytes == right.payload_bytes
    return f"{format_bytes(left.wire_bytes)} on the wire would do" if is_same else None
