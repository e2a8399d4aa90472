"""Counts collectives whose phase, part or axis is unknown, with the reasons."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshscope.events.collective import Collective

NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattributed:
    """Operations of one step of each phase that could not be attributed, and why.

    `payload_bytes` excludes operations of unknown payload. `reasons` holds (reason, operations).
    """

    count: int
    payload_bytes: int
    reasons: tuple[tuple[str, int], ...]


def is_attributed(row: Collective) -> bool:
    """Whether phase, part and axis are known and the reader noted no caveat."""
    return None not in (row.phase, row.part, row.axis) and row.axis_reason is None


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
