"""Runs and comparisons as terminal output."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from rich.console import Console, RenderableType
from rich.text import Text

from meshscope.analysis.comparison import Side, compare_sources, explain
from meshscope.analysis.join import Comparison, Match, Verdict, left_rows, right_rows
from meshscope.analysis.totals import request_total, step_total, unattributed
from meshscope.cost.memory import capacity_of_run
from meshscope.events.enums import Phase, Source
from meshscope.reports.answer import answer_of, request_of, source_answer, title_of
from meshscope.reports.answer_text import answer_lines, answer_table, collectives_lines
from meshscope.reports.collectives import (
    LEGEND,
    TableLine,
    collectives_table,
    lines_of_matches,
    lines_of_rows,
    short_legend,
    with_middle,
)
from meshscope.reports.conditions import MAX_VALUE, condition_lines, conditions
from meshscope.reports.explanation import sentences
from meshscope.reports.measured import live_lines, trace_text
from meshscope.reports.model import EMPTY_LABEL, CellValue, ViewTable, short, table
from meshscope.reports.speculation import speculation_lines
from meshscope.reports.summary import dispatch_lines, memory_table, totals_table, unattributed_lines
from meshscope.reports.tables import bullets, first_block, new_table, rich_table
from meshscope.reports.times import caveat_lines, time_lines
from meshscope.reports.words import (
    phase_label,
    signed_bytes,
    traffic_text,
    verdict_label,
    verdict_sentence,
)
from meshscope.store.run import RunRecord
from meshscope.units import counted

COUNT = "count"


def answer_text(
    run: RunRecord, _: Console, *, n_findings: int | None = None
) -> Iterable[RenderableType]:
    """The answer of a run alone, with what it rests on."""
    if run.is_trace:
        return trace_text(run, is_full=False)
    return answer_lines(answer_of(run, n_findings=n_findings))


def rows_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """The answer of a run, the collectives of each phase, then the request and its caveats."""
    if run.is_trace:
        yield from trace_text(run, is_full=False)
        return
    comparison = compare_sources(run)
    is_exact = comparison is None or comparison.is_exact
    yield from answer_lines(answer_of(run), others=["--full"])
    yield Text("")
    yield from speculation_lines(run)
    yield from live_lines(run)
    legend = "" if is_exact else short_legend([source.value for source in run.sources])
    yield from _collectives(run, console, legend, is_short=True)
    yield from _dispatch(run, max_parts=1)
    if (lost := unattributed(run.rows_of(run.manifest.source))).count:
        yield from unattributed_lines(lost)
        yield Text("")
    yield from caveat_lines(run, is_full=False)


def full_text(run: RunRecord, console: Console) -> Iterator[RenderableType]:
    """The answer of a run, then everything that is known about it."""
    if run.is_trace:
        yield from trace_text(run, is_full=True)
        return
    yield from answer_lines(answer_of(run), is_full=True)
    yield Text("")
    yield from speculation_lines(run)
    yield conditions(run)
    yield Text("")
    yield from live_lines(run)
    yield from _collectives(run, console, LEGEND)
    yield rich_table(totals_table(run))
    yield Text("")
    yield from time_lines(run)
    yield from caveat_lines(run)
    if run.times:
        yield Text("")
    yield from _dispatch(run)
    if run.memory:
        yield rich_table(memory_table(run.memory))
        yield Text("")
    yield from unattributed_lines(unattributed(run.rows_of(run.manifest.source)))


def _dispatch(run: RunRecord, max_parts: int | None = None) -> Iterator[RenderableType]:
    dispatch = run.manifest.experiment.dispatch
    if dispatch is not None:
        yield from islice(dispatch_lines(dispatch), max_parts)
        yield Text("")


def _collectives(
    run: RunRecord, console: Console, legend: str, *, is_short: bool = False
) -> Iterator[RenderableType]:
    comparison = compare_sources(run)
    for phase in phases_of(run) or [None]:
        sides, lines = phase_lines(run, phase, comparison)
        rows, figures = [row for row in run.rows_of(run.manifest.source) if row.phase is phase], ""
        if rows:
            figures = f": {traffic_text(step_total(rows))}; {counted(rows[0].n_steps, 'step')} per request"
        yield Text.assemble((phase_label(phase), "bold"), figures)
        if lines:
            yield collectives_table(lines, sides=sides, console=console, is_short=is_short)
        else:
            others = [str(other) for other in run.open_operations if other.phase in {phase, None}]
            unread = f"no collective is known: {', '.join(others)}"
            yield Text(short(unread if others else "no collectives"))
        yield Text("")
    if legend:
        yield Text(legend, style="dim")
        yield Text("")


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
    lines = lines_of_matches(m for m in comparison.matches if m.shown.phase is phase)
    names = (Source.PREDICTED.value, source.value)
    return _with_compiled(run, phase, names, lines) if source is Source.MEASURED else (names, lines)


def _with_compiled(
    run: RunRecord, phase: Phase | None, sides: Sequence[str], lines: list[TableLine]
) -> tuple[Sequence[str], list[TableLine]]:
    compiled = compare_sources(run, Source.COMPILED)
    if compiled is None:
        return sides, lines
    middle = lines_of_matches(match for match in compiled.matches if match.shown.phase is phase)
    return tuple(source.value for source in Source), with_middle(lines, middle)


def comparison_text(
    comparison: Comparison,
    left: Side,
    right: Side,
    console: Console,
    *,
    missing: Sequence[str] = (),
) -> Iterator[RenderableType]:
    """The answer: what differs and why; then the collectives that differ with their bytes.

    `missing` are the sums that a compiled program uses without their reduction, which comes before any cost.
    """
    if left.run is right.run:
        others = ("show --rows",) if comparison.is_exact else ()
        yield from answer_lines(answer_of(left.run, faults=missing), others=others)
        if others:
            return
    else:
        yield from _two_answers(comparison, left, right, missing)
    yield Text("")
    for phase in comparison.phases:
        yield from _phase_differences(comparison, left, right, phase, console)
    if not comparison.is_exact:
        yield Text(LEGEND, style="dim")
        yield Text("")
    if left.run is not right.run:
        values = [{**dict(condition_lines(s.run)), "source": s.source.value} for s in (left, right)]
        table = new_table("conditions", left.name, right.name, n_words=3)
        for name in dict.fromkeys((*values[0], *values[1])):
            cells = [of_side.get(name, EMPTY_LABEL) for of_side in values]
            if cells[0] != cells[1]:
                table.add_row(Text(name, "dim"), *(Text(short(cell, MAX_VALUE)) for cell in cells))
        yield table


def _two_answers(
    comparison: Comparison, left: Side, right: Side, missing: Sequence[str]
) -> Iterator[RenderableType]:
    """Both sides and the verdicts in the first block, with the sentences that it holds; then the others."""
    sides, head = (left, right), list[RenderableType]()
    requests = [f"   {short(request_of(side.run))}" for side in sides]
    is_one = requests[0] == requests[1]
    for side, request in zip(sides, requests, strict=True):
        title = f"{side.name}: {short(title_of(side.run))} ({side.source})"
        head.append(Text(title if is_one else f"{title}\n{request}", style="bold"))
    if is_one and requests[0].strip():
        head.append(Text(requests[0], style="bold"))
    answers = (source_answer(side.run, side.source, capacity_of_run(side.run)) for side in sides)
    columns = dict(zip((side.name for side in sides), answers, strict=True))
    head.append(answer_table(columns, has_room=False))
    verdict = verdict_sentence(comparison, left=left.name, right=right.name)
    verdict_line, *findings = collectives_lines(verdict, comparison.agreement)
    compiled = (side for side in sides if side.source is Source.COMPILED)
    unread = [f"{s.name}: {other}" for s in compiled for other in s.run.open_operations]
    explanation = explain(left, right)
    times = [(side.run.times, side.run.measured) for side in sides]
    is_same = comparison.is_exact and times[0] == times[1]
    is_explained = explanation.forms is not None or not is_same
    first, *more = sentences(explanation) if is_explained else [None]
    unread = [*missing, *unread]
    texts = [bullets([text]) for text in (*unread, first, *more) if text is not None]
    said: list[RenderableType] = [*texts[: len(unread) + 1], *findings, *texts[len(unread) + 1 :]]
    shown, others = first_block([*head, verdict_line], said)
    yield from (*head, verdict_line, *shown)
    if others:
        yield Text("")
        yield from others


def _phase_differences(
    comparison: Comparison, left: Side, right: Side, phase: Phase | None, console: Console
) -> Iterator[RenderableType]:
    matches = [match for match in comparison.matches if match.shown.phase is phase]
    different = [match for match in matches if match.verdict is not Verdict.EQUAL]
    n_equal = sum(match.count for match in matches if match.verdict is Verdict.EQUAL)
    equal = f": {counted(n_equal, 'collective')} equal per step"
    yield Text.assemble((phase_label(phase), "bold"), equal)
    if different:
        sides, lines = (left.name, right.name), lines_of_matches(matches)
        if left.run is right.run and right.source is Source.MEASURED:
            sides, lines = _with_compiled(right.run, phase, sides, lines)
        shown = [n for n in lines if len(set(n.counts)) > 1 or n.verdict is not Verdict.EQUAL]
        yield collectives_table(shown, sides=sides, console=console)
        yield Text("")
        yield Text(f"{right.name} minus {left.name}")
        yield rich_table(_bytes_table(different))
    yield Text("")


def _bytes_table(matches: Sequence[Match]) -> ViewTable:
    changes = [f"{n} per {s}#" for s in ("step", "request") for n in ("payload", "wire")]
    rows: list[list[CellValue]] = []
    for verdict in sorted({match.verdict for match in matches}, key=list(Verdict).index):
        changed = [match for match in matches if match.verdict is verdict]
        rows.append([verdict_label(verdict), sum(match.count for match in changed)])
        for total in (step_total, request_total):
            before, after = total(left_rows(changed)), total(right_rows(changed))
            rows[-1].append(signed_bytes(after.payload_bytes - before.payload_bytes))
            rows[-1].append(signed_bytes(after.wire_bytes - before.wire_bytes))
    return table(("verdict", "count#", *changes), rows)
