"""The content of the sections on collectives, sources and conditions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import polars as pl

from meshscope.analysis.catalog import METRICS, Unavailable
from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.join import Agreement
from meshscope.analysis.totals import grouped, unattributed
from meshscope.analysis.volume import volume
from meshscope.events.collective import Collective
from meshscope.events.enums import Source
from meshscope.reports.charts.cost import step_breakdowns
from meshscope.reports.collectives import Footnotes, TableLine, collectives_view, line_identity
from meshscope.reports.conditions import condition_lines
from meshscope.reports.frames import metric_table
from meshscope.reports.html.blocks import (
    Block,
    DescriptionList,
    PageTable,
    Paragraph,
    page_table,
)
from meshscope.reports.html.page_run import PageRun, n_decode_steps
from meshscope.reports.html.times import waterfall_blocks
from meshscope.reports.model import CellValue, ViewTable, view_columns
from meshscope.reports.plain import short
from meshscope.reports.summary import memory_table, totals_table
from meshscope.reports.text import phase_lines, phases_of
from meshscope.reports.words import counted, phase_label
from meshscope.units import format_bytes

AGREEMENT_CLASSES = {
    Agreement.EQUAL: " is-equal",
    Agreement.SAME_MEANING: "",
    Agreement.DIFFERENT: " is-different",
}
MAX_FINDINGS = 8
MAX_REMARK, MAX_CONDITION = 400, 600  # characters


def condition_blocks(run: PageRun) -> Iterator[Block]:
    """The experiment, versions, flags, the command, unattributed collectives and unavailable metrics."""
    pairs = [(name, short(value, MAX_CONDITION)) for name, value in condition_lines(run.run)]
    manifest = run.run.manifest
    command = short(" ".join(manifest.command), MAX_CONDITION)
    yield DescriptionList(
        pairs=(*pairs, ("created", short(manifest.created)), ("command", command))
    )
    lost = unattributed(run.run.rows_of(run.source))
    if lost.count:
        reasons = "; ".join(f"{n} x {short(text, 200)}" for text, n in lost.reasons[:MAX_FINDINGS])
        text = f"Unattributed: {counted(lost.count, 'collective')}. {reasons}"
        yield Paragraph(text=text, class_name="note warn")
    titles: dict[str, list[str]] = {}
    for metric in METRICS:
        result = run.metrics[metric.name]
        if isinstance(result, Unavailable):
            titles.setdefault(result.reason, []).append(metric.title)
    for reason, names in titles.items():
        text = f"Unknown: {', '.join(names)}: {short(reason, 600)}."
        yield Paragraph(text=text, class_name="unknown")


def collective_blocks(run: PageRun) -> Iterator[Block]:
    """Every collective of the run with the counts of its sources, its time and its verdict."""
    comparison = compare_sources(run.run)
    lines: list[TableLine] = []
    sides: Sequence[str] = ()
    for phase in phases_of(run.run):
        sides, of_phase = phase_lines(run.run, phase, comparison)
        lines += of_phase
    if not lines:
        return
    footnotes = Footnotes()
    marks = [footnotes.marks(short(text, MAX_REMARK) for text in line.remarks) for line in lines]
    view = _with_times(run, lines, collectives_view(lines, sides=sides, remarks=marks))
    yield page_table(run.html_id("rows"), view, footnotes=footnotes.texts)


def _with_times(run: PageRun, lines: Sequence[TableLine], view: ViewTable) -> ViewTable:
    """The table after a column `phase`, with mean duration and exposed time if any is known."""
    durations = {
        _size_identity(group.row, group.layers): (group.row.dur_s, group.row.exposed_s)
        for group in grouped(run.run.rows_of(run.source))
    }
    times = [durations.get(_size_identity(line.row, line.layers), (None, None)) for line in lines]
    kept = [i for i in range(2) if any(pair[i] is not None for pair in times)]
    rows: list[tuple[CellValue, ...]] = [
        (phase_label(line.row.phase), *row, *(pair[i] for i in kept))
        for line, row, pair in zip(lines, view.rows, times, strict=True)
    ]
    phase, *time_columns = view_columns(["phase"], [("duration_s", "exposed_s")[i] for i in kept])
    columns = (phase, *view.columns, *time_columns)
    return replace(view, title="Collectives", columns=columns, rows=tuple(rows))


def _size_identity(row: Collective, layers: tuple[int, ...]) -> tuple[object, ...]:
    """The identity of a line; traces of GPUs tell sizes without shapes."""
    return (*line_identity(row, layers), row.payload_bytes)


def source_blocks(run: PageRun) -> Iterator[Block]:
    """The verdicts on collectives and times of each pair of sources, and the totals of each source."""
    for agreement in run.answer.agreements:
        head, *findings = agreement.collectives.split("; ")
        style = AGREEMENT_CLASSES[agreement.agreement]
        yield Paragraph(text=f"{head[0].upper()}{head[1:]}.", class_name=f"verdict{style}")
        yield from (Paragraph(text=short(finding, MAX_REMARK)) for finding in findings)
        style = " is-different" if agreement.is_time_within is False else " is-equal"
        for sentence in agreement.time_sentences:
            text = f"Time: {short(sentence, MAX_REMARK)}."
            yield Paragraph(text=text, class_name=f"verdict{style}")
    yield from waterfall_blocks(
        [
            (source.value, step_breakdowns(run.inputs, of_source))
            for source in run.run.sources
            if (of_source := {bar.phase: bar for bar in run.costs if bar.source is source})
        ],
        n_decode_steps=n_decode_steps(run),
        table_id=run.html_id("differences"),
    )
    if run.run.rows:
        yield page_table(run.html_id("totals"), totals_table(run.run))
    if run.run.memory:
        view = replace(memory_table(run.run.memory), title="Memory of one device")
        yield page_table(run.html_id("memory"), view)
    if run.inputs.measured is not None:
        for finding in run.inputs.measured.findings[:MAX_FINDINGS]:
            text = f"Profile: {short(finding, MAX_REMARK)}"
            yield Paragraph(text=text, class_name="note warn")
        yield from run.tables("waiting", "Waiting and transfer time, measured")


def inserted_blocks(run: PageRun) -> Iterator[Block]:
    """Collectives by inserter, opcode and algorithm, from the compiled or measured program."""
    events = run.inputs.events.filter(pl.col("source") != Source.PREDICTED.value)
    compiled = events.filter(pl.col("source") == Source.COMPILED.value)
    events = compiled if len(compiled) else events
    by_inserter = volume(events, ("inserted_by", "kind", "opcode", "algorithm", "is_async"))
    if by_inserter.is_empty():
        return
    partitioner = by_inserter.filter(pl.col("inserted_by") == "partitioner")
    count = counted(int(partitioner["count"].sum()), "collective")
    sent = format_bytes(float(partitioner["wire_bytes"].sum()))
    yield Paragraph(
        text=f"The partitioner inserted {count} per step over all phases, {sent} on the wire."
        if len(partitioner)
        else "The partitioner inserted no collectives: all of them are written in the program."
    )
    per_step = by_inserter.select(pl.exclude("source", "n_unsized", "^request_.*$"))
    yield _inserted_table(run, per_step)


def _inserted_table(run: PageRun, per_step: pl.DataFrame) -> PageTable:
    view = metric_table("volume", per_step, title="By inserter, opcode and algorithm")
    return page_table(run.html_id("inserters"), view)
