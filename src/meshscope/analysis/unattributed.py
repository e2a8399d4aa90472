"""Collectives that are not told in full: counted with their reasons, never dropped."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshscope.events.collective import Collective

NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattributed:
    """How many operations in one step of each phase could not be placed, and why.

    `payload_bytes` leaves out operations whose payload is unknown; `reasons` counts operations.
    """

    count: int
    payload_bytes: int
    reasons: tuple[tuple[str, int], ...]


def is_attributed(row: Collective) -> bool:
    """Whether phase, part and axis of the row are known, and its reader left no doubt."""
    return None not in (row.phase, row.part, row.axis) and row.axis_reason is None


def unattributed(rows: Iterable[Collective]) -> Unattributed:
    """What of these rows could not be attributed; the most frequent reason first."""
    lost = [row for row in rows if not is_attributed(row)]
    reasons: Counter[str] = Counter()
    for row in lost:
        reasons[row.axis_reason or NO_REASON] += row.count
    return Unattributed(
        count=sum(row.count for row in lost),
        payload_bytes=sum((row.payload_bytes or 0) * row.count for row in lost),
        reasons=tuple(reasons.most_common()),
    )
