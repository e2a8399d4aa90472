"""Runs and comparisons as text for people; the command line prints what these functions return."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from meshscope.analysis.comparison import compare_sides, compare_sources
from meshscope.analysis.explanation import explain
from meshscope.analysis.join import Comparison, Match, Verdict, left_rows, right_rows
from meshscope.analysis.sides import Side, source_side
from meshscope.analysis.totals import Total, request_totals, step_totals
from meshscope.analysis.unattributed import unattributed
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.store.run import RunRecord
from meshscope.views.collectives import (
    LEGEND,
    STYLES,
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
from meshscope.views.plain import plain, short
from meshscope.views.summary import memory_table, totals_table, unattributed_lines
from meshscope.views.tables import new_table
from meshscope.views.times import time_lines
from meshscope.views.words import count_words, one_total, phase_words, signed_bytes, verdict_words

COUNT = "count"


def run_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """Everything that `show` tells about a run, from the conditions to the verdict."""
    source = run.manifest.source
    comparison = compare_sources(run)
    yield conditions(run)
    yield Text("")
    yield from live_lines(run)
    for phase in phases_of(run):
        sides, lines = phase_lines(run, phase, comparison)
        yield _heading(phase_words(phase), phase, run.rows)
        yield (
            collectives_table(lines, sides=sides, console=console)
            if lines
            else Text("no collectives")
        )
        yield Text("")
    yield Text(LEGEND, style="dim")
    yield Text("")
    yield totals_table(run)
    yield Text("")
    yield from time_lines(run)
    if run.times:
        yield Text("")
    dispatch = run.manifest.experiment.dispatch
    if dispatch is not None:
        yield from dispatch_lines(dispatch)
        yield Text("")
    if run.memory:
        yield memory_table(run.memory)
        yield Text("")
    yield from unattributed_lines(unattributed(run.rows_of(source)))
    yield from own_verdicts(run)


def own_verdicts(run: RunRecord) -> Iterator[Text]:
    """Predicted against the strongest source; where that was measured, compiled against it, too."""
    strongest = run.manifest.source
    for left in (Source.PREDICTED, Source.COMPILED):
        if left is not strongest and {left, strongest} <= set(run.sources):
            found = compare_sides(source_side(run, left), source_side(run, strongest))
            yield _verdict(found, left=left.value, right=strongest.value)


def phases_of(run: RunRecord) -> list[Phase | None]:
    """The phases of the request, and then what has no phase."""
    found: list[Phase | None] = [*run.manifest.phases, *(row.phase for row in run.rows)]
    return sorted(dict.fromkeys(found), key=lambda phase: phase is None)


def phase_lines(
    run: RunRecord, phase: Phase | None, comparison: Comparison | None
) -> tuple[Sequence[str], list[TableLine]]:
    """The names of the counts, and the lines of one phase; `comparison` is the run's own, if it has one."""
    source = run.manifest.source
    if comparison is None:
        return (COUNT,), lines_of_rows(r for r in run.rows_of(source) if r.phase is phase)
    matches = (match for match in comparison.matches if match.shown.phase is phase)
    lines = lines_of_matches(matches)
    between = compare_sources(run, Source.COMPILED) if source is Source.MEASURED else None
    if between is None:
        return (Source.PREDICTED.value, source.value), lines
    middle = lines_of_matches(match for match in between.matches if match.shown.phase is phase)
    return tuple(source.value for source in Source), with_middle(lines, middle)


def _heading(words: str, phase: Phase | None, rows: Iterable[Collective]) -> Text:
    n_steps = next((row.n_steps for row in rows if row.phase is phase), None)
    steps = "" if n_steps is None else f", {n_steps} step{'' if n_steps == 1 else 's'} a request"
    return Text.assemble((words, "bold"), steps)


def _verdict(comparison: Comparison, *, left: str, right: str) -> Text:
    """The verdict, first its head, then each phase's findings on a line of its own."""
    head, *findings = verdict_words(comparison, left=plain(left), right=plain(right)).split("; ")
    style = "bold green" if comparison.is_exact else "bold yellow"
    if not comparison.is_same_meaning:
        style = "bold red"
    return Text.assemble((head, style), *(f"\n  {finding}" for finding in findings))


def comparison_text(
    comparison: Comparison, left: Side, right: Side, console: Console
) -> Iterator[RenderableType]:
    """What the right side does that the left one did not ask for: rows, then their bytes."""
    yield from _two_conditions(left, right)
    for phase in comparison.phases:
        matches = [match for match in comparison.matches if match.shown.phase is phase]
        different = [match for match in matches if match.verdict is not Verdict.EQUAL]
        n_equal = sum(match.count for match in matches if match.verdict is Verdict.EQUAL)
        yield _heading(phase_words(phase), phase, right.run.rows or left.run.rows)
        yield Text(f"  {count_words(n_equal)} equal in one step")
        if different:
            sides, lines = _different_lines(left, right, matches)
            yield collectives_table(lines, sides=sides, console=console)
            yield Text("")
            yield Text(f"{right.name} minus {left.name}")
            yield _bytes_table(different)
        yield Text("")
    yield Text(LEGEND, style="dim")
    yield Text("")
    if left.run is right.run:
        yield from own_verdicts(right.run)
        return
    if not comparison.is_exact or not _takes_as_long(left.run, right.run):
        yield from _why(left, right)
        yield Text("")
    yield _verdict(comparison, left=left.name, right=right.name)


def _takes_as_long(left: RunRecord, right: RunRecord) -> bool:
    """Whether nothing that was timed or modelled differs."""
    return (left.times, left.measured) == (right.times, right.measured)


def _why(left: Side, right: Side) -> Iterator[Text]:
    """What makes the difference, in sentences."""
    yield Text("why", style="bold")
    yield from (Text(f"- {text}") for text in sentences(explain(left, right)))


def _different_lines(
    left: Side, right: Side, matches: Sequence[Match]
) -> tuple[Sequence[str], list[TableLine]]:
    """What is not equal among the matches of a phase; of a measured run, with what was compiled between."""
    lines = lines_of_matches(matches)
    is_own = left.run is right.run and right.source is Source.MEASURED
    between = compare_sources(right.run, Source.COMPILED) if is_own else None
    if between is None:
        return (left.name, right.name), [line for line in lines if _is_different(line)]
    shown = {match.shown.phase for match in matches}
    middle = [match for match in between.matches if match.shown.phase in shown]
    joined = with_middle(lines, lines_of_matches(middle))
    return [source.value for source in Source], [line for line in joined if _is_different(line)]


def _is_different(line: TableLine) -> bool:
    return len(set(line.counts)) > 1 or line.verdict is not Verdict.EQUAL


def _two_conditions(left: Side, right: Side) -> Iterator[RenderableType]:
    """The conditions that the sides share, then those in which they differ."""
    if left.run is right.run:
        yield conditions(left.run)
        yield Text("")
        return
    ours, theirs = _side_conditions(left), _side_conditions(right)
    names = [*ours, *(name for name in theirs if name not in ours)]
    table = new_table("", left.name, right.name, n_words=3)
    for name in names:
        same = ours.get(name) == theirs.get(name)
        cells = ours.get(name, "-"), "(same)" if same else theirs.get(name, "-")
        table.add_row(Text(name, style="dim"), *(Text(short(cell, MAX_VALUE)) for cell in cells))
    yield table
    yield Text("")


def _side_conditions(side: Side) -> dict[str, str]:
    return {**dict(condition_lines(side.run)), "source": side.source.value}


def _bytes_table(matches: Sequence[Match]) -> RenderableType:
    """Payload and wire bytes of what differs, by verdict, in one step and in the request."""
    table = new_table(
        "verdict", "count", "payload a step", "wire a step", "payload a request", "wire a request"
    )
    for verdict in Verdict:
        found = [match for match in matches if match.verdict is verdict]
        if found:
            step, request = _change(found, step_totals), _change(found, request_totals)
            count = sum(match.count for match in found)
            table.add_row(Text(verdict, STYLES[verdict]), f"{count:,}", *step, *request)
    return table


def _change(
    matches: Sequence[Match],
    totals: Callable[[Iterable[Collective]], dict[Phase | None, Total]],
) -> tuple[str, str]:
    """Right minus left; what is missing counts negative."""
    left, right = one_total(totals(left_rows(matches))), one_total(totals(right_rows(matches)))
    return (
        signed_bytes(right.payload_bytes - left.payload_bytes),
        signed_bytes(right.wire_bytes - left.wire_bytes),
    )
