"""The collectives of a run as tables: with their sources side by side, and what the compiler made of them."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, replace

import polars as pl

from meshscope.analysis.comparison import compare_sides, compare_sources
from meshscope.analysis.grouping import grouped, layer_ranges
from meshscope.analysis.sides import source_side
from meshscope.analysis.totals import Total, request_totals, step_totals
from meshscope.analysis.volume import volume
from meshscope.events.collective import Collective
from meshscope.events.enums import Source
from meshscope.units import format_bytes, format_seconds
from meshscope.views.collectives import Footnotes, TableLine
from meshscope.views.html.blocks import (
    Block,
    Cell,
    Paragraph,
    cell,
    figure,
    shown,
    table_of_frame,
    table_of_rows,
    unknown,
)
from meshscope.views.html.side import PageRun
from meshscope.views.text import phase_lines, phases_of
from meshscope.views.words import UNKNOWN, array_words, group_words, phase_words, verdict_words

_BEFORE = ("phase", "stage", "part", "layers", "collective", "array", "axis", "groups")
_BEHIND = ("verdict", "payload", "wire", "each takes", "exposed", "remarks")


Durations = Mapping[Hashable, tuple[float | None, float | None]]


def collectives_block(run: PageRun) -> Block:
    """Every collective of the run, the counts of its sources side by side, with times and verdict."""
    comparison = compare_sources(run.run)
    durations = _durations(run)
    rows: list[list[Cell]] = []
    notes = Footnotes()
    sides: tuple[str, ...] = ()
    for phase in phases_of(run.run):
        names, lines = phase_lines(run.run, phase, comparison)
        sides = tuple(names)
        rows += [[Cell(text=phase_words(phase)), *_cells(line, durations, notes)] for line in lines]
    if not rows:
        return unknown("the run has no collectives: nothing travels between devices")
    names = [*_BEFORE, *(f"{side}" for side in sides), *_BEHIND]
    table = table_of_rows(run.key("rows"), "Collectives", *_without_empty(names, rows))
    return replace(table, footnotes=tuple(notes.texts))


def _without_empty(names: list[str], rows: list[list[Cell]]) -> tuple[list[str], list[list[Cell]]]:
    """Columns in which any row has something."""
    kept = [i for i in range(len(names)) if any(row[i].text not in {"", "-"} for row in rows)]
    return [names[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _durations(run: PageRun) -> Durations:
    """Mean duration and exposed time of one execution, by what tells the lines of the table apart."""
    return {
        _identity(group.row, group.layers): (group.row.dur_s, group.row.exposed_s)
        for group in grouped(run.run.rows_of(run.source))
    }


def _identity(row: Collective, layers: tuple[int, ...]) -> Hashable:
    place = (row.phase, row.stage, row.part, layers)
    return (*place, row.kind, row.axis, row.groups, row.dtype, row.shape)


def _cells(line: TableLine, durations: Durations, notes: Footnotes) -> list[Cell]:
    row = line.row
    dur_s, exposed_s = durations.get(_identity(row, line.layers), (None, None))
    verdict = "" if line.verdict is None else line.verdict.value
    return [
        Cell(text="" if row.stage is None else str(row.stage)),
        Cell(text=row.part or UNKNOWN),
        Cell(text=layer_ranges(line.layers)),
        Cell(text=row.kind.value),
        Cell(text=shown(array_words(row), 80)),
        Cell(text=shown(row.axis or UNKNOWN, 40)),
        Cell(text=group_words(row)),
        *(Cell(text="-") if n is None else cell("count", n) for n in line.counts),
        Cell(text=verdict, class_name=f"is-{verdict}" if verdict else ""),
        _bytes(row.payload_bytes),
        _bytes(None if row.wire_bytes is None else float(row.wire_bytes)),
        _seconds(dur_s),
        _seconds(exposed_s),
        Cell(text=notes.marks(shown(remark, 400) for remark in line.remarks)),
    ]


def _bytes(n_bytes: float | None) -> Cell:
    return figure(format_bytes(n_bytes), n_bytes)


def _seconds(seconds: float | None) -> Cell:
    return Cell(text="-") if seconds is None else figure(format_seconds(seconds), seconds)


def source_blocks(run: PageRun) -> Iterator[Block]:
    """The verdict on each pair of sources, and the totals of each source."""
    sources = run.run.sources
    if not sources:
        yield unknown("the run has no collectives to compare")
        return
    if len(sources) == 1:
        yield unknown(
            f"the run holds only what was {sources[0]}; there is nothing to compare it with"
        )
    for i, left in enumerate(sources):
        for right in sources[i + 1 :]:
            yield from _verdict(run, left, right)
    yield _totals(run)
    if run.subject.measured is not None:
        for finding in run.subject.measured.findings[:8]:
            yield Paragraph(text=f"Profile: {shown(finding, 400)}", class_name="note warn")
        yield run.table("waiting", "Waiting against wire, measured")


def _verdict(run: PageRun, left: Source, right: Source) -> Iterator[Block]:
    comparison = compare_sides(source_side(run.run, left), source_side(run.run, right))
    head, *findings = verdict_words(comparison, left=left.value, right=right.value).split("; ")
    look = "equal" if comparison.is_exact else "different" if not comparison.is_same_meaning else ""
    yield Paragraph(text=f"{head}.", class_name=f"verdict {look}".strip())
    for finding in findings:
        yield Paragraph(text=shown(finding, 400))


def _totals(run: PageRun) -> Block:
    rows: list[list[Cell]] = []
    for source in run.run.sources:
        step, request = (f(run.run.rows_of(source)) for f in (step_totals, request_totals))
        for phase, total in step.items():
            whole = request[phase]
            rows.append(
                [
                    Cell(text=phase_words(phase)),
                    Cell(text=source.value),
                    *_total_cells(total),
                    *_total_cells(whole),
                ]
            )
    names = (
        "phase",
        "source",
        *(
            f"{what} a {span}"
            for span in ("step", "request")
            for what in ("count", "payload", "wire")
        ),
    )
    return table_of_rows(run.key("totals"), "Totals of one device", names, rows)


def _total_cells(total: Total) -> list[Cell]:
    values = asdict(total)
    wire = float(values["wire_bytes"])
    return [cell("count", total.count), _bytes(total.payload_bytes), _bytes(wire)]


def inserted_blocks(run: PageRun) -> Iterator[Block]:
    """Collectives by who inserted them, opcode and algorithm, of the source that the compiler gave."""
    own = run.subject.events.filter(pl.col("source") != Source.PREDICTED.value)
    compiled = own.filter(pl.col("source") == Source.COMPILED.value)
    events = compiled if len(compiled) else own
    found = volume(events, ("inserted_by", "kind", "opcode", "algorithm", "is_async"))
    if found.is_empty():
        yield unknown(
            "the run holds only what was predicted; compile it, and the compiler's choices stand here"
        )
        return
    partitioner = found.filter(pl.col("inserted_by") == "partitioner")
    n = int(partitioner["count"].sum())
    text = "The partitioner inserted nothing: every collective is written in the program."
    if n:
        sent = float(partitioner["wire_bytes"].sum())
        text = f"The partitioner inserted {n:,} collectives of a step over all phases, {format_bytes(sent)} on the wire."
    yield Paragraph(text=text)
    kept = found.drop(
        "source", "n_unsized", *(c for c in found.columns if c.startswith("request_"))
    )
    yield table_of_frame(run.key("made"), "By inserter, opcode and algorithm", kept)
