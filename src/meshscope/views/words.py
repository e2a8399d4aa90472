"""Short phrases for collectives and comparisons, shared by text and JSON."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import assert_never

from meshscope.analysis.join import Comparison, Match, Verdict, left_rows, right_rows
from meshscope.analysis.totals import Total, step_totals
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase
from meshscope.units import format_bytes, format_shape

UNKNOWN = "?"


def phase_words(phase: Phase | None) -> str:
    """The phase, or that it is not known."""
    return "unknown phase" if phase is None else phase.value


def array_words(row: Collective) -> str:
    """`bf16[8,1024,5120]`."""
    return f"{row.dtype or UNKNOWN}{format_shape(row.shape) if row.shape is not None else '[?]'}"


def group_words(row: Collective) -> str:
    """`2 x 4` is two groups of four devices; groups that span slices are marked `DCN`."""
    match row.kind:
        case Kind.PERMUTE | Kind.SEND | Kind.RECV:
            words = f"{row.n_groups} pairs"
        case (
            Kind.ALL_REDUCE
            | Kind.ALL_GATHER
            | Kind.REDUCE_SCATTER
            | Kind.ALL_TO_ALL
            | Kind.GATHER
            | Kind.BROADCAST
        ):
            words = f"{row.n_groups} x {row.group_size}"
        case _:
            assert_never(row.kind)
    return f"{words} DCN" if row.crosses_slices else words


def opcode_words(row: Collective) -> str | None:
    """The opcode where it is not the one that the kind has by itself; None otherwise."""
    if row.opcode is None or row.opcode.replace("-", "_") == row.kind.value:
        return None
    return None if row.opcode == "collective-permute" and row.kind is Kind.PERMUTE else row.opcode


def source_words(source_line: str) -> str:
    """Where in a program: files of this package from the package on, others as they are."""
    _, package, rest = source_line.rpartition("/meshscope/")
    return f"{package.removeprefix('/')}{rest}"


def count_words(count: int) -> str:
    """`1 collective`, `129 collectives`."""
    return f"{count:,} collective{'' if count == 1 else 's'}"


def one_total(totals: Mapping[Phase | None, Total]) -> Total:
    """The total of rows that are all of one phase; zero without rows."""
    zero = Total(count=0, payload_bytes=0, wire_bytes=Fraction(0), n_unsized=0)
    return next(iter(totals.values()), zero)


def verdict_words(comparison: Comparison, *, left: str, right: str) -> str:
    """The verdict on two tables in one sentence, with the bytes of every difference in one step."""
    if comparison.is_exact:
        return f"{left} = {right}, exactly"
    findings = [
        f"{phase_words(phase)}: {', '.join(_phase_findings(comparison, phase))}"
        for phase in comparison.phases
        if any(m.verdict is not Verdict.EQUAL for m in comparison.matches if m.shown.phase is phase)
    ]
    head = (
        f"{left} = {right} in meaning, not in cost"
        if comparison.is_same_meaning
        else (f"{left} and {right} differ")
    )
    return f"{head}; {'; '.join(findings)}"


def _phase_findings(comparison: Comparison, phase: Phase | None) -> Iterable[str]:
    for verdict in Verdict:
        matches = comparison.with_verdict(verdict, phase)
        if matches and verdict is not Verdict.EQUAL:
            yield f"{count_words(sum(m.count for m in matches))} {_finding(verdict, matches)}"


def _finding(verdict: Verdict, matches: list[Match]) -> str:
    left = one_total(step_totals(left_rows(matches)))
    right = one_total(step_totals(right_rows(matches)))
    match verdict:
        case Verdict.MISSING:
            return f"missing ({_bytes_words(left)})"
        case Verdict.EXTRA:
            return f"extra ({_bytes_words(right)})"
        case Verdict.EQUAL | Verdict.MORE_BYTES | Verdict.FEWER_BYTES | Verdict.CHANGED:
            return f"{verdict} ({signed_bytes(right.wire_bytes - left.wire_bytes)} on the wire)"
        case _:
            assert_never(verdict)


def _bytes_words(total: Total) -> str:
    return (
        f"{format_bytes(total.payload_bytes)} payload, {format_bytes(total.wire_bytes)} on the wire"
    )


def signed_bytes(n_bytes: float | Fraction) -> str:
    """`+147 MB`, `-3.2 kB`, `0 B`."""
    return f"+{format_bytes(n_bytes)}" if n_bytes > 0 else format_bytes(n_bytes)
