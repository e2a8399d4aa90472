"""The sections on collectives: all of them, the comparison of sources, and the compiler's decisions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import polars as pl

from meshscope.analysis.comparison import compare_sides, compare_sources
from meshscope.analysis.grouping import grouped
from meshscope.analysis.sides import source_side
from meshscope.analysis.volume import volume
from meshscope.events.enums import Source
from meshscope.units import format_bytes
from meshscope.views.collectives import Footnotes, TableLine, collectives_view, line_identity
from meshscope.views.frames import metric_table
from meshscope.views.html.blocks import Block, Paragraph, page_table, unknown
from meshscope.views.html.page_run import PageRun
from meshscope.views.model import CellValue, Unit, ViewTable, figure_column, text_column
from meshscope.views.plain import short
from meshscope.views.summary import totals_table
from meshscope.views.text import phase_lines, phases_of
from meshscope.views.words import counted, phase_label, verdict_sentence

MAX_REMARK = 400  # characters
MAX_FINDINGS = 8

Durations = Mapping[tuple[object, ...], tuple[float | None, float | None]]


def collectives_block(run: PageRun) -> Block:
    """Every collective of the run with the counts of its sources, its time and its verdict."""
    comparison = compare_sources(run.run)
    lines: list[TableLine] = []
    sides: Sequence[str] = ()
    for phase in phases_of(run.run):
        sides, of_phase = phase_lines(run.run, phase, comparison)
        lines += of_phase
    if not lines:
        return unknown("the run has no collectives")
    footnotes = Footnotes()
    marks = [footnotes.marks(short(text, MAX_REMARK) for text in line.remarks) for line in lines]
    view = collectives_view(lines, sides=sides, remarks=marks)
    view = replace(_with_times(view, lines, _durations(run)), title="Collectives")
    return page_table(run.html_id("rows"), view, footnotes=footnotes.texts)


def _durations(run: PageRun) -> Durations:
    """Mean duration and exposed time of one execution, by line of the table."""
    return {
        line_identity(group.row, group.layers): (group.row.dur_s, group.row.exposed_s)
        for group in grouped(run.run.rows_of(run.source))
    }


def _with_times(view: ViewTable, lines: Sequence[TableLine], durations: Durations) -> ViewTable:
    """The table with the phase as its first column, and time columns if any time is known."""
    times = [durations.get(line_identity(line.row, line.layers), (None, None)) for line in lines]
    labels = ("duration", "exposed")
    kept = [i for i in range(len(labels)) if any(pair[i] is not None for pair in times)]
    rows: list[tuple[CellValue, ...]] = [
        (phase_label(line.row.phase), *row, *(pair[i] for i in kept))
        for line, row, pair in zip(lines, view.rows, times, strict=True)
    ]
    time_columns = (figure_column(labels[i], Unit.SECONDS) for i in kept)
    return ViewTable(columns=(text_column("phase"), *view.columns, *time_columns), rows=tuple(rows))


def source_blocks(run: PageRun) -> Iterator[Block]:
    """The verdict on each pair of sources, and the totals of each source."""
    sources = run.run.sources
    if len(sources) == 1:
        yield unknown(f"agreement of sources: the run has only {sources[0]} collectives")
    for i, left in enumerate(sources):
        for right in sources[i + 1 :]:
            yield from _verdict(run, left, right)
    yield page_table(run.html_id("totals"), totals_table(run.run))
    if run.inputs.measured is not None:
        for finding in run.inputs.measured.findings[:MAX_FINDINGS]:
            text = f"Profile: {short(finding, MAX_REMARK)}"
            yield Paragraph(text=text, class_name="note warn")
        yield run.table("waiting", "Waiting and transfer time, measured")


def _verdict(run: PageRun, left: Source, right: Source) -> Iterator[Block]:
    comparison = compare_sides(source_side(run.run, left), source_side(run.run, right))
    sentence = verdict_sentence(comparison, left=left.value, right=right.value)
    head, *findings = sentence.split("; ")
    if comparison.is_exact:
        class_name = "verdict is-equal"
    else:
        class_name = "verdict" if comparison.is_same_meaning else "verdict is-different"
    yield Paragraph(text=f"{head[0].upper()}{head[1:]}.", class_name=class_name)
    for finding in findings:
        yield Paragraph(text=short(finding, MAX_REMARK))


def inserted_blocks(run: PageRun) -> Iterator[Block]:
    """Collectives by inserter, opcode and algorithm, from the compiled or measured program."""
    events = run.inputs.events.filter(pl.col("source") != Source.PREDICTED.value)
    compiled = events.filter(pl.col("source") == Source.COMPILED.value)
    events = compiled if len(compiled) else events
    by_inserter = volume(events, ("inserted_by", "kind", "opcode", "algorithm", "is_async"))
    if by_inserter.is_empty():
        yield unknown("the compiler's decisions: the run is only predicted. Compile it to see them")
        return
    yield Paragraph(text=_inserted_sentence(by_inserter))
    request_columns = (c for c in by_inserter.columns if c.startswith("request_"))
    per_step = by_inserter.drop("source", "n_unsized", *request_columns)
    view = metric_table("volume", per_step, title="By inserter, opcode and algorithm")
    yield page_table(run.html_id("inserted"), view)


def _inserted_sentence(by_inserter: pl.DataFrame) -> str:
    partitioner = by_inserter.filter(pl.col("inserted_by") == "partitioner")
    n = int(partitioner["count"].sum())
    if not n:
        return "The partitioner inserted no collectives: all of them are written in the program."
    sent = format_bytes(float(partitioner["wire_bytes"].sum()))
    count = counted(n, "collective")
    return f"The partitioner inserted {count} per step over all phases, {sent} on the wire."
