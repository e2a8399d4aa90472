"""The traffic of some collectives of a step: counts and bytes by phase, kind and axis, by meaning.

A row counts for what it does, however the compiler wrote it: asynchronous, combined with others, or
decomposed into permutes. A row that the reader could not attribute counts for every axis, and a kernel that
chooses its targets counts for every kind, so that a filter never reads as zero what it does not know.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase

T = TypeVar("T", int, float, Fraction)

OPAQUE = "custom-call"  # opcode of a kernel that communicates by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects collectives; None selects all. `axis` is one name, or several joined by `+`."""

    kind: Kind | None = None
    axis: str | None = None
    phase: Phase | None = None

    def matches(self, row: Collective) -> bool:
        """Whether the row may be one of these: unknown axes and opaque kernels are.

        What stays on its device crosses no axis.
        """
        if self.axis is not None and row.group_size == 1 and row.wire_bytes == 0:
            return False
        is_kind = self.kind in {None, row.kind} or row.opcode == OPAQUE
        is_phase = self.phase in {None, row.phase} or row.phase is None
        return is_kind and is_phase and self._crosses(row.axis)

    def _crosses(self, axis: str | None) -> bool:
        if self.axis is None or axis is None:
            return True
        return set(self.axis.split("+")) <= set(axis.split("+"))

    def __str__(self) -> str:
        """`all_gather over dp in decode`."""
        words = [self.kind.value if self.kind else "collectives"]
        words += [f"over {self.axis}"] if self.axis else []
        words += [f"in {self.phase}"] if self.phase else []
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives in one step on one device. Bytes and times that a row lacks make the sum None."""

    rows: tuple[Collective, ...]

    @property
    def count(self) -> int:
        """Executions."""
        return sum(row.count for row in self.rows)

    @property
    def payload_bytes(self) -> int | None:
        """Bytes of the logical arrays."""
        return self._sum("payload_bytes", 0)

    @property
    def wire_bytes(self) -> Fraction | None:
        """Bytes that the device sends."""
        return self._sum("wire_bytes", Fraction(0))

    @property
    def exposed_s(self) -> float | None:
        """Seconds in which the core waits for them."""
        return self._sum("exposed_s", 0)

    def _sum(self, name: str, zero: T) -> T | None:
        """The sum over all executions; None if a row does not know it."""
        values = [(getattr(row, name), row.count) for row in self.rows]
        if any(value is None for value, _ in values):
            return None
        return sum((value * count for value, count in values), zero)


def traffic_of(rows: Iterable[Collective], chosen: Filter) -> Traffic:
    """The traffic of the rows that match, the largest sender first."""
    matching = [row for row in rows if chosen.matches(row)]
    matching.sort(key=lambda row: -(row.wire_bytes or 0) * row.count)
    return Traffic(rows=tuple(matching))
