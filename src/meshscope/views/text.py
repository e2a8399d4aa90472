"""Runs and comparisons as terminal output."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from meshscope.analysis.comparison import compare_sides, compare_sources
from meshscope.analysis.explanation import explain
from meshscope.analysis.join import Comparison, Match, Verdict, left_rows, right_rows
from meshscope.analysis.sides import Side, source_side
from meshscope.analysis.totals import Total, request_total, step_total, unattributed
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.store.run import RunRecord
from meshscope.views.collectives import (
    LEGEND,
    TableLine,
    collectives_table,
    lines_of_matches,
    lines_of_rows,
    with_middle,
)
from meshscope.views.conditions import MAX_VALUE, condition_lines, conditions
from meshscope.views.dispatch import dispatch_lines
from meshscope.views.explanation import sentences
from meshscope.views.live import live_lines
from meshscope.views.model import EMPTY_LABEL, ViewTable, view_columns
from meshscope.views.plain import plain, short
from meshscope.views.summary import memory_table, totals_table, unattributed_lines
from meshscope.views.tables import new_table, rich_table
from meshscope.views.times import time_lines
from meshscope.views.words import (
    counted,
    phase_label,
    signed_bytes,
    verdict_label,
    verdict_sentence,
)

COUNT = "count"


def run_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """The output of `show`, from the conditions of the run to the verdict."""
    yield conditions(run)
    yield Text("")
    yield from live_lines(run)
    yield from _collectives(run, console)
    yield rich_table(totals_table(run))
    yield Text("")
    yield from time_lines(run)
    if run.times:
        yield Text("")
    dispatch = run.manifest.experiment.dispatch
    if dispatch is not None:
        yield from dispatch_lines(dispatch)
        yield Text("")
    if run.memory:
        yield rich_table(memory_table(run.memory))
        yield Text("")
    yield from unattributed_lines(unattributed(run.rows_of(run.manifest.source)))
    yield from source_verdicts(run)


def _collectives(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """The collectives of each phase, with the counts of all sources, and the legend."""
    comparison = compare_sources(run)
    for phase in phases_of(run):
        sides, lines = phase_lines(run, phase, comparison)
        yield _heading(phase_label(phase), phase, run.rows)
        if lines:
            yield collectives_table(lines, sides=sides, console=console)
        else:
            yield Text("no collectives")
        yield Text("")
    yield Text(LEGEND, style="dim")
    yield Text("")


def source_verdicts(run: RunRecord) -> Iterator[Text]:
    """Predicted against the strongest source; for a measured run also compiled against measured."""
    strongest = run.manifest.source
    for left in (Source.PREDICTED, Source.COMPILED):
        if left is not strongest and {left, strongest} <= set(run.sources):
            comparison = compare_sides(source_side(run, left), source_side(run, strongest))
            yield _verdict(comparison, left=left.value, right=strongest.value)


def phases_of(run: RunRecord) -> list[Phase | None]:
    """The phases of the run; None comes last."""
    phases: list[Phase | None] = [*run.manifest.phases, *(row.phase for row in run.rows)]
    return sorted(dict.fromkeys(phases), key=lambda phase: phase is None)


def phase_lines(
    run: RunRecord, phase: Phase | None, comparison: Comparison | None
) -> tuple[Sequence[str], list[TableLine]]:
    """The labels of the counts and the lines of one phase.

    `comparison` is predicted against the strongest source, if the run has both.
    """
    source = run.manifest.source
    if comparison is None:
        return (COUNT,), lines_of_rows(r for r in run.rows_of(source) if r.phase is phase)
    matches = (match for match in comparison.matches if match.shown.phase is phase)
    lines = lines_of_matches(matches)
    compiled = compare_sources(run, Source.COMPILED) if source is Source.MEASURED else None
    if compiled is None:
        return (Source.PREDICTED.value, source.value), lines
    middle = lines_of_matches(match for match in compiled.matches if match.shown.phase is phase)
    return tuple(source.value for source in Source), with_middle(lines, middle)


def _heading(words: str, phase: Phase | None, rows: Iterable[Collective]) -> Text:
    n_steps = next((row.n_steps for row in rows if row.phase is phase), None)
    steps = "" if n_steps is None else f", {counted(n_steps, 'step')} per request"
    return Text.assemble((words, "bold"), steps)


def _verdict(comparison: Comparison, *, left: str, right: str) -> Text:
    """The verdict, then the findings of each phase on its own line."""
    head, *findings = verdict_sentence(comparison, left=plain(left), right=plain(right)).split("; ")
    style = "bold green" if comparison.is_exact else "bold yellow"
    if not comparison.is_same_meaning:
        style = "bold red"
    return Text.assemble((head, style), *(f"\n  {finding}" for finding in findings))


def comparison_text(
    comparison: Comparison, left: Side, right: Side, console: Console
) -> Iterator[RenderableType]:
    """The conditions of both sides, the collectives that differ with their bytes, and the verdict."""
    yield from _two_conditions(left, right)
    for phase in comparison.phases:
        matches = [match for match in comparison.matches if match.shown.phase is phase]
        different = [match for match in matches if match.verdict is not Verdict.EQUAL]
        n_equal = sum(match.count for match in matches if match.verdict is Verdict.EQUAL)
        yield _heading(phase_label(phase), phase, right.run.rows or left.run.rows)
        yield Text(f"  {counted(n_equal, 'collective')} equal per step")
        if different:
            sides, lines = _different_lines(left, right, matches)
            yield collectives_table(lines, sides=sides, console=console)
            yield Text("")
            yield Text(f"{right.name} minus {left.name}")
            yield rich_table(_bytes_table(different))
        yield Text("")
    yield Text(LEGEND, style="dim")
    yield Text("")
    if left.run is right.run:
        yield from source_verdicts(right.run)
        return
    if not comparison.is_exact or not _has_same_times(left.run, right.run):
        yield from _why(left, right)
        yield Text("")
    yield _verdict(comparison, left=left.name, right=right.name)


def _has_same_times(left: RunRecord, right: RunRecord) -> bool:
    """Whether all modeled and measured times are equal."""
    return (left.times, left.measured) == (right.times, right.measured)


def _why(left: Side, right: Side) -> Iterator[Text]:
    """The reasons for the differences."""
    yield Text("why", style="bold")
    yield from (Text(f"- {text}") for text in sentences(explain(left, right)))


def _different_lines(
    left: Side, right: Side, matches: Sequence[Match]
) -> tuple[Sequence[str], list[TableLine]]:
    """The matches of a phase that differ; a measured run also shows the compiled counts."""
    lines = lines_of_matches(matches)
    is_measured = left.run is right.run and right.source is Source.MEASURED
    compiled = compare_sources(right.run, Source.COMPILED) if is_measured else None
    if compiled is None:
        return (left.name, right.name), [line for line in lines if _is_different(line)]
    phases = {match.shown.phase for match in matches}
    middle = [match for match in compiled.matches if match.shown.phase in phases]
    joined = with_middle(lines, lines_of_matches(middle))
    return [source.value for source in Source], [line for line in joined if _is_different(line)]


def _is_different(line: TableLine) -> bool:
    return len(set(line.counts)) > 1 or line.verdict is not Verdict.EQUAL


def _two_conditions(left: Side, right: Side) -> Iterator[RenderableType]:
    """The conditions of both sides; equal ones are marked."""
    if left.run is right.run:
        yield conditions(left.run)
        yield Text("")
        return
    left_values, right_values = _side_conditions(left), _side_conditions(right)
    table = new_table("", left.name, right.name, n_words=3)
    for name in dict.fromkeys((*left_values, *right_values)):
        values = left_values.get(name, EMPTY_LABEL), right_values.get(name, EMPTY_LABEL)
        cells = (values[0], "(same)") if values[0] == values[1] else values
        table.add_row(Text(name, style="dim"), *(Text(short(cell, MAX_VALUE)) for cell in cells))
    yield table
    yield Text("")


def _side_conditions(side: Side) -> dict[str, str]:
    return {**dict(condition_lines(side.run)), "source": side.source.value}


def _bytes_table(matches: Sequence[Match]) -> ViewTable:
    """The change in payload and wire bytes by verdict, per step and per request."""
    rows: list[tuple[str | int, ...]] = []
    for verdict in Verdict:
        of_verdict = [match for match in matches if match.verdict is verdict]
        if of_verdict:
            count = sum(match.count for match in of_verdict)
            changes = (*_change(of_verdict, step_total), *_change(of_verdict, request_total))
            rows.append((verdict_label(verdict), count, *changes))
    spans = (f"{name} per {span}" for span in ("step", "request") for name in ("payload", "wire"))
    return ViewTable(columns=view_columns(("verdict",), ("count", *spans)), rows=tuple(rows))


def _change(
    matches: Sequence[Match],
    total: Callable[[Iterable[Collective]], Total],
) -> tuple[str, str]:
    """Payload and wire bytes of the right side minus the left side."""
    left, right = total(left_rows(matches)), total(right_rows(matches))
    return (
        signed_bytes(right.payload_bytes - left.payload_bytes),
        signed_bytes(right.wire_bytes - left.wire_bytes),
    )
