"""Totals of the collectives of each phase, in one step and in the whole request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from meshscope.events.collective import Collective
from meshscope.events.enums import Phase


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
