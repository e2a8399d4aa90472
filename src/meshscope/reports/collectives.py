"""The collectives of a phase as a table, in the widest layout that fits the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.insertion import OWN_PROGRAMS, Insertion
from meshscope.analysis.join import Match, Verdict
from meshscope.analysis.totals import grouped, layer_ranges, without_place
from meshscope.events.collective import REMATERIALIZATION, SUBSETS, WINDOWED_EINSUM, Collective
from meshscope.events.enums import Kind, Phase, Source
from meshscope.reports import model
from meshscope.reports.budget import row_line
from meshscope.reports.model import CellValue, Unit, ViewColumn, ViewTable, column, plain, short
from meshscope.reports.tables import add_column, cell_text, fits_console, new_table, rich_table
from meshscope.reports.words import (
    array_text,
    group_text,
    short_source_line,
    unusual_opcode,
    verdict_label,
)
from meshscope.units import counted, format_bytes, format_seconds

UNITS = "GB: 10^9 bytes. GiB: 2^30 bytes."

# The meaning of the columns, printed below the tables.
LEGEND = (
    "groups: number x devices of each; DCN marks groups that span slices. "
    "count: executions per step on one device. payload: the full array of one operation. "
    "wire: bytes that one device sends for it. " + UNITS
)

_ARROW = " -> "
_INSERTERS = {
    "": "",
    "program": "written in the program",
    REMATERIALIZATION: "repeated by the compiler to save HBM (rematerialized)",
}
# Columns that narrow layouts put below another.
_STACKED = ("array", "layers", "groups", "wire_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """One line of the table; `counts` has one entry for each compared side."""

    row: Collective
    layers: tuple[int, ...]
    counts: tuple[int | None, ...]
    verdict: Verdict | None = None
    remarks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # the remarks that explain the verdict


def lines_of_rows(rows: Iterable[Collective]) -> list[TableLine]:
    """The rows of one source, grouped over layers."""
    groups = ((group.row, group.layers) for group in grouped(rows))
    return _merged(
        TableLine(row=row, layers=layers, counts=(row.count,), remarks=_row_remarks(row))
        for row, layers in groups
    )


def lines_of_matches(matches: Iterable[Match]) -> list[TableLine]:
    """The matches of a comparison, each a line with the counts of both sides and its verdict."""
    lines: list[TableLine] = []
    for match in matches:
        row, left = match.shown, match.left
        is_new = match.verdict in {Verdict.CHANGED, Verdict.EXTRA}
        instead = None  # the wire bytes of the left side, if nothing else differs
        if left and match.right and left.wire_bytes != match.right.wire_bytes:
            is_same = left.kind is row.kind and left.payload_bytes == match.right.payload_bytes
            sent = format_bytes(left.wire_bytes)
            instead = f"instead of {sent} on the wire" if is_same else None
        remarks = (match.note, instead, _origin(row) if is_new else None)
        notes = tuple(short(note) for note in remarks if note)
        opcode = None if match.verdict is Verdict.EQUAL else _opcode_remark(row)
        is_shapeless = row.shape is None and left is not None
        lines.append(
            TableLine(
                row=replace(row, shape=left.shape) if left and is_shapeless else row,
                layers=match.layers,
                counts=(match.count if left else None, match.count if match.right else None),
                verdict=match.verdict,
                remarks=(*notes, *_row_remarks(row)),
                notes=notes if opcode is None else (*notes, short(opcode)),
            )
        )
    return _merged(lines)


def with_middle(lines: Iterable[TableLine], middle: Iterable[TableLine]) -> list[TableLine]:
    """Joins lines with counts (left, right) and (left, middle) into (left, middle, right).

    Lines that only the middle has are appended.
    """
    remaining = {line_identity(line.row, line.layers): line for line in middle}
    joined: list[TableLine] = []
    for line in lines:
        partner = remaining.pop(line_identity(line.row, line.layers), None)
        left, right = line.counts
        joined.append(replace(line, counts=(left, partner.counts[1] if partner else None, right)))
    return [*joined, *(replace(line, counts=(*line.counts, None)) for line in remaining.values())]


def line_identity(row: Collective, layers: tuple[int, ...]) -> tuple[object, ...]:
    """The fields that distinguish the lines of a table."""
    place = (row.phase, row.stage, row.part, layers)
    return (*place, row.kind, row.axis, row.groups, row.dtype, row.shape)


def _merged(lines: Iterable[TableLine]) -> list[TableLine]:
    """Lines that look the same become one with the sum of their counts; None if a line lacks a side."""
    hidden = dict.fromkeys(("source_line", "hlo_shape", "inserted_by", "opcode"))
    members: dict[TableLine, list[TableLine]] = {}
    for line in lines:
        looks = replace(line, row=replace(without_place(line.row), **hidden), counts=())
        members.setdefault(looks, []).append(line)
    merged: list[TableLine] = []
    for first, *others in members.values():
        sides = zip(first.counts, *(line.counts for line in others), strict=True)
        sums = (None if None in side else sum(filter(None, side)) for side in sides)
        merged.append(replace(first, counts=tuple(sums)))
    return merged


def collectives_view(
    lines: Sequence[TableLine], *, sides: Sequence[str], remarks: Sequence[str]
) -> ViewTable:
    """The table without empty columns. `sides` names the counts; `remarks` has a text per line."""
    places = ("collective", "array", "stage", "part", "layers", "axis", "groups")
    counts = (ViewColumn(key=f"count {side}", label=side, unit=Unit.NUMBER) for side in sides)
    tail = ("payload_bytes", "wire_bytes", "verdict", "remarks")
    columns = (*map(column, places), *counts, *map(column, tail))
    rows = tuple(_cells(line, remark) for line, remark in zip(lines, remarks, strict=True))
    view = ViewTable(columns=columns, rows=rows)
    return view.only(lambda i: any(row[i] not in {"", None} for row in rows))


def axis_text(row: Collective) -> str:
    """`tp`, `subsets of tp` or `unknown`."""
    is_part = SUBSETS in (row.axis_reason or "")
    return f"subsets of {row.axis}" if is_part else row.axis or model.UNKNOWN_LABEL


def _cells(line: TableLine, remark: str) -> tuple[CellValue, ...]:
    row = line.row
    wire_bytes = None if row.wire_bytes is None else float(row.wire_bytes)
    return (
        row.kind.value,
        array_text(row),
        "" if row.stage is None else str(row.stage),
        row.part or ("" if row.phase is Phase.STEP else model.UNKNOWN_LABEL),
        layer_ranges(line.layers),
        axis_text(row),
        group_text(row),
        *line.counts,
        model.known(row.payload_bytes),
        model.known(wire_bytes),
        "" if line.verdict is None else verdict_label(line.verdict),
        remark,
    )


def short_legend(sources: Sequence[str]) -> str:
    """The meaning of the columns of the short table; several sources have counts that differ."""
    differing = f", {_ARROW.join(sources)} if they differ" if len(sources) > 1 else ""
    return (
        f"count: per step of a device{differing}. wire: bytes it sends for one operation. {UNITS}"
    )


def collectives_table(
    lines: Sequence[TableLine], *, sides: Sequence[str], console: Console, is_short: bool = False
) -> RenderableType:
    """The table with its remarks as footnotes; columns share a place if the console is too narrow for all.

    The short table has one count, and no payload, groups inside one slice, or remarks on equal lines.
    """
    footnotes = Footnotes()
    marks = [footnotes.marks(line.notes if is_short else line.remarks) for line in lines]
    if is_short:
        lines = [replace(n, verdict=None) if n.verdict is Verdict.EQUAL else n for n in lines]
    view = collectives_view(lines, sides=sides, remarks=marks)
    view = _shortened(view, lines) if is_short else view
    flat = rich_table(view)
    return Group(flat if fits_console(flat, console) else _stacked(view), *footnotes.lines())


def _shortened(whole: ViewTable, lines: Sequence[TableLine]) -> ViewTable:
    """The table with one column for the counts of all sides, `64`, or `- -> 1` if they differ."""
    hidden = {"payload_bytes", *([] if any(n.row.crosses_slices for n in lines) else ["groups"])}
    view = whole.only(lambda i: whole.columns[i].key not in hidden)
    counts = [i for i, one in enumerate(view.columns) if one.key.startswith("count ")]
    first, end = counts[0], counts[-1] + 1
    rows: list[tuple[CellValue, ...]] = []
    for row, line in zip(view.rows, lines, strict=True):
        shown = line.counts[:1] if len(set(line.counts)) == 1 else line.counts
        text = _ARROW.join(model.EMPTY_LABEL if n is None else f"{n:,}" for n in shown)
        rows.append((*row[:first], text, *row[end:]))
    columns = (*view.columns[:first], column("count#"), *view.columns[end:])
    return replace(view, columns=columns, rows=tuple(rows))


@dataclass(slots=True)
class Footnotes:
    """The numbered texts below a table, each once."""

    texts: list[str] = field(default_factory=list[str])

    def marks(self, remarks: Iterable[str]) -> str:
        """Adds the remarks and returns their marks: `[1] [3]`."""
        marked = list(remarks)
        self.texts += [text for text in dict.fromkeys(marked) if text not in self.texts]
        return " ".join(f"[{self.texts.index(text) + 1}]" for text in marked)

    def lines(self) -> Iterator[Table]:
        """The footnotes for a terminal; none without texts."""
        grid = Table.grid("", "", padding=(0, 1))
        grid.columns[0].justify, grid.columns[1].overflow = "right", "fold"
        for number, text in enumerate(self.texts, start=1):
            grid.add_row(Text(f"  [{number}]", style="dim"), Text(text, style="dim"))
        yield from [grid] if self.texts else ()


def _stacked(view: ViewTable) -> Table:
    keys = [column.key for column in view.columns]
    counts = [i for i, key in enumerate(keys) if key.startswith("count ")]
    below = {keys.index(key) for key in _STACKED if key in keys} | set(counts[1:])
    if "verdict" in keys and "remarks" in keys:
        below.add(keys.index("remarks"))
    starts = [i for i in range(len(keys)) if i not in below]
    stacks = list(map(range, starts, [*starts[1:], len(keys)]))
    stacked = new_table()
    for stack in stacks:
        labels = "\n".join(view.columns[i].label for i in stack)
        add_column(stacked, labels, is_figure=view.columns[stack[0]].is_figure)
    for row in view.rows:
        cells: list[Text] = []
        for stack in stacks:
            first, *others = (cell_text(view.columns[i], row[i]) for i in stack)
            for text in others:
                text.style = "dim"
            cells.append(Text("\n").join([first, *others]))
        stacked.add_row(*cells)
    return stacked


def _row_remarks(row: Collective) -> tuple[str, ...]:
    is_async = "async" if row.is_async else None
    origin = _origin(row) if row.phase is Phase.STEP else None
    remarks = (row.algorithm, _opcode_remark(row), is_async, row.axis_reason, origin)
    return tuple(short(remark) for remark in remarks if remark)


def _opcode_remark(row: Collective) -> str | None:
    opcode = unusual_opcode(row)
    verb = "runs" if row.source is Source.MEASURED else "compiled"
    return None if opcode is None else f"{verb} as {opcode}"


def _origin(row: Collective) -> str | None:
    words = [
        _INSERTERS.get(row.inserted_by or "", f"inserted by the {row.inserted_by}"),
        f"at {short_source_line(row.source_line)}" if row.source_line else "",
    ]
    return " ".join(filter(None, words)) or None


def insertion_lines(explained: Sequence[Insertion]) -> Iterator[str]:
    """The sum first, then each collective with its cost, its shardings and what avoids it.

    Collectives that the plan has are only counted. Those of the program that move more than it keeps come last.
    """
    wasted = [one for one in explained if one.row.inserted_by == "program"]
    yield from _inserted_lines([one for one in explained if one.row.inserted_by != "program"])
    if wasted:
        n = sum(one.row.count for one in wasted)
        move = "moves" if n == 1 else "move"
        yield from ("", f"{counted(n, 'collective')} of the program {move} more than is kept")
        yield from _insertion_details(wasted)


def _inserted_lines(explained: Sequence[Insertion]) -> Iterator[str]:
    beyond = [one for one in explained if not one.is_planned]
    n, n_beyond = (sum(one.row.count for one in some) for some in (explained, beyond))
    if not n:
        yield "the partitioner inserted no collective"
        return
    is_planned = len(beyond) < len(explained)
    if is_planned:
        yield (
            f"{n - n_beyond} of the {counted(n, 'collective')} of the partitioner are in the plan; "
            "compare lists them"
        )
    if not n_beyond:
        return
    exposed = [one.exposed_s for one in beyond]
    exposed_s = sum(s for s in exposed if s is not None)
    cost = "" if None in exposed else f", exposed {format_seconds(exposed_s)} per step"
    words = f"{counted(n_beyond, 'collective')}{' beyond the plan' if is_planned else ''}"
    yield f"the partitioner inserted {words}{cost}"
    yield from _insertion_details(beyond)


def _insertion_details(explained: Sequence[Insertion]) -> Iterator[str]:
    for one in explained:
        yield ""
        is_own = OWN_PROGRAMS in (one.row.source_line or "")
        row = replace(one.row, source_line=None) if is_own else one.row
        yield from model.wrapped(row_line(row))
        for line in _details(one):
            yield from model.wrapped(plain(line), indent=2)


def _details(one: Insertion) -> Iterator[str]:
    if one.exposed_s is not None and one.total_s is not None:
        hidden = "" if one.hidden_frac is None else f", {one.hidden_frac:.0%} hidden behind compute"
        yield f"cost: {format_seconds(one.total_s)} per step{hidden}"
    if one.row.algorithm == WINDOWED_EINSUM:
        yield "a collective matmul: decomposed into permutes between the pieces of the product"
    elif one.is_of_product and one.row.kind is Kind.ALL_GATHER:
        yield "no collective matmul: the product waits for the whole array"
    elif one.is_of_product:
        yield "no collective matmul: nothing is sent before the product is whole"
    yield f"operand: {one.operand}; wanted: {one.wanted}"
    if one.remedy is not None:
        yield f"remedy: {one.remedy}"
