"""Collectives that differ only in their layer as one, totals of each phase, and counts of what is unknown."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from meshscope.events.collective import SUBSETS, Collective
from meshscope.events.enums import Phase

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Collectives of one or more layers that are equal in everything else.

    In `row`, `count` is the number of executions in one step of the phase over all `layers`, and `layer`
    and `hlo_name` are null if the members differ in them. `layers` is empty outside layers. `dur_s` and
    `exposed_s` are means over all executions, null if one is unknown; `start_s` is the earliest start.
    """

    row: Collective
    layers: tuple[int, ...]


def grouped(rows: Iterable[Collective]) -> list[Group]:
    """The groups of the rows, in the order of their first members."""
    members: dict[tuple[Collective, bool], list[Collective]] = {}
    for row in rows:
        members.setdefault((without_place(row), row.layer is None), []).append(row)
    return [_group(shared, rows_of_key) for (shared, _), rows_of_key in members.items()]


def without_place(row: Collective) -> Collective:
    """The row without layer, instruction name, count and times, which differ within a group."""
    untimed = replace(row, start_s=None, dur_s=None, exposed_s=None, time_basis=None)
    return replace(untimed, layer=None, hlo_name=None, count=1)


def _group(shared: Collective, members: Sequence[Collective]) -> Group:
    count = sum(member.count for member in members)

    def mean(seconds: Sequence[float | None]) -> float | None:
        known = [m.count * s for m, s in zip(members, seconds, strict=True) if s is not None]
        return sum(known) / count if count and len(known) == len(members) else None

    def common(values: Sequence[T]) -> T | None:
        return values[0] if len(set(values)) == 1 else None

    row = replace(
        shared,
        layer=common([member.layer for member in members]),
        hlo_name=common([member.hlo_name for member in members]),
        count=count,
        time_basis=common([member.time_basis for member in members]),
        start_s=min((m.start_s for m in members if m.start_s is not None), default=None),
        dur_s=mean([member.dur_s for member in members]),
        exposed_s=mean([member.exposed_s for member in members]),
    )
    return Group(row=row, layers=tuple(sorted({m.layer for m in members if m.layer is not None})))


def layer_ranges(layers: Sequence[int]) -> str:
    """Sorted layer indices as ranges, e.g. `0-31, 40`; empty without layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)


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

    @property
    def is_sized(self) -> bool:
        """Whether the bytes mean something: False if no operation has a known size."""
        return not self.count or self.n_unsized < self.count


def step_total(rows: Iterable[Collective]) -> Total:
    """The total of one step."""
    counted = [(row.count, row) for row in rows]
    unsized = [n for n, r in counted if r.payload_bytes is None or r.wire_bytes is None]
    return Total(
        count=sum(n for n, _ in counted),
        payload_bytes=sum(n * (r.payload_bytes or 0) for n, r in counted),
        wire_bytes=sum((n * (r.wire_bytes or Fraction(0)) for n, r in counted), Fraction(0)),
        n_unsized=sum(unsized),
    )


def request_total(rows: Iterable[Collective]) -> Total:
    """The total of all steps."""
    return step_total(replace(row, count=row.count * row.n_steps) for row in rows)


def step_totals(rows: Iterable[Collective]) -> dict[Phase | None, Total]:
    """The total of one step of each phase; the key None holds collectives of unknown phase."""
    by_phase: dict[Phase | None, list[Collective]] = {}
    for row in rows:
        by_phase.setdefault(row.phase, []).append(row)
    return {phase: step_total(of_phase) for phase, of_phase in by_phase.items()}


def request_totals(rows: Iterable[Collective]) -> dict[Phase | None, Total]:
    """The total of all steps of each phase; the key None holds collectives of unknown phase."""
    return step_totals(replace(row, count=row.count * row.n_steps) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattributed:
    """Operations of one step of each phase that could not be attributed, and why.

    `payload_bytes` excludes operations of unknown payload; None if all are. `reasons` holds (reason, operations).
    """

    count: int
    payload_bytes: int | None
    reasons: tuple[tuple[str, int], ...]


def _is_attributed(row: Collective) -> bool:
    """A row of a user's function needs no part."""
    needed = (row.axis,) if row.phase is Phase.STEP else (row.phase, row.part, row.axis)
    reasons = row.axis_reason.split("; ") if row.axis_reason else []
    return None not in needed and all(SUBSETS in reason for reason in reasons)


def unattributed(rows: Iterable[Collective]) -> Unattributed:
    """The rows without phase, part or axis, or with a caveat of the reader; the most frequent reason first."""
    lost = [row for row in rows if not _is_attributed(row)]
    reasons: Counter[str] = Counter()
    known = [row.payload_bytes * row.count for row in lost if row.payload_bytes is not None]
    for row in lost:
        reasons[row.axis_reason or NO_REASON] += row.count
    return Unattributed(
        count=sum(row.count for row in lost),
        payload_bytes=sum(known) if known or not lost else None,
        reasons=tuple(reasons.most_common()),
    )
