"""Totals of the collectives of each phase, and counts of those whose phase, part or axis is unknown."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from meshscope.events.collective import SUBSETS, Collective
from meshscope.events.enums import Phase

NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Operations and bytes of one device; with a pipeline, the sum over one device of every stage.

    Collectives without stage, which all stages perform together, count once. `n_unsized` operations
    have unknown payload or wire bytes and are excluded from the byte sums.
    """

    count: int
    payload_bytes: int
    wire_bytes: Fraction
    n_unsized: int


def step_total(rows: Iterable[Collective]) -> Total:
    """The total of one step."""
    return _total(list(rows), lambda row: row.count)


def request_total(rows: Iterable[Collective]) -> Total:
    """The total of all steps."""
    return _total(list(rows), lambda row: row.count * row.n_steps)


def step_totals(rows: Iterable[Collective]) -> dict[Phase | None, Total]:
    """The total of one step of each phase; the key None holds collectives of unknown phase."""
    return {phase: step_total(of_phase) for phase, of_phase in _by_phase(rows).items()}


def request_totals(rows: Iterable[Collective]) -> dict[Phase | None, Total]:
    """The total of all steps of each phase; the key None holds collectives of unknown phase."""
    return {phase: request_total(of_phase) for phase, of_phase in _by_phase(rows).items()}


def _by_phase(rows: Iterable[Collective]) -> dict[Phase | None, list[Collective]]:
    by_phase: dict[Phase | None, list[Collective]] = {}
    for row in rows:
        by_phase.setdefault(row.phase, []).append(row)
    return by_phase


def _total(rows: list[Collective], times: Callable[[Collective], int]) -> Total:
    unsized = [r for r in rows if r.payload_bytes is None or r.wire_bytes is None]
    return Total(
        count=sum(map(times, rows)),
        payload_bytes=sum(times(r) * (r.payload_bytes or 0) for r in rows),
        wire_bytes=sum((times(r) * (r.wire_bytes or Fraction(0)) for r in rows), start=Fraction(0)),
        n_unsized=sum(map(times, unsized)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattributed:
    """Operations of one step of each phase that could not be attributed, and why.

    `payload_bytes` excludes operations of unknown payload. `reasons` holds (reason, operations).
    """

    count: int
    payload_bytes: int
    reasons: tuple[tuple[str, int], ...]


def is_attributed(row: Collective) -> bool:
    """Whether phase, part and axis are known and the reader noted no caveat.

    A row of a user's function needs no part.
    """
    needed = (row.axis,) if row.phase is Phase.STEP else (row.phase, row.part, row.axis)
    reasons = row.axis_reason.split("; ") if row.axis_reason else []
    return None not in needed and all(SUBSETS in reason for reason in reasons)


def unattributed(rows: Iterable[Collective]) -> Unattributed:
    """The rows that could not be attributed; the most frequent reason first."""
    lost = [row for row in rows if not is_attributed(row)]
    reasons: Counter[str] = Counter()
    for row in lost:
        reasons[row.axis_reason or NO_REASON] += row.count
    return Unattributed(
        count=sum(row.count for row in lost),
        payload_bytes=sum((row.payload_bytes or 0) * row.count for row in lost),
        reasons=tuple(reasons.most_common()),
    )
