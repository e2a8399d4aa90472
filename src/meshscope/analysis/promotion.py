"""Detects 16-bit collectives that a backend performs in float32."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from meshscope.events.collective import Collective
from meshscope.units import DTYPE_BITS

NARROW = frozenset({"bf16", "f16"})
WIDE = "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """The predicted rows as the backend performs them; `count` operations of one step are promoted."""

    rows: tuple[Collective, ...]
    count: int


def promotion_of(predicted: Iterable[Collective], compiled: Iterable[Collective]) -> Promotion:
    """The predicted rows, in float32 if `compiled` has the same collective in float32 only."""
    dtypes: dict[tuple[Hashable, ...], set[str | None]] = {}
    for row in compiled:
        dtypes.setdefault(_identity(row), set()).add(row.dtype)
    rows: list[Collective] = []
    count = 0
    for row in predicted:
        is_wide = row.dtype in NARROW and dtypes.get(_identity(row)) == {WIDE}
        rows.append(_widened(row) if is_wide else row)
        count += row.count * is_wide
    return Promotion(rows=tuple(rows), count=count)


def _identity(row: Collective) -> tuple[Hashable, ...]:
    return (row.phase, row.part, row.kind, row.axis, row.shape)


def _widened(row: Collective) -> Collective:
    assert row.dtype is not None
    factor = DTYPE_BITS[WIDE] // DTYPE_BITS[row.dtype]
    return replace(
        row,
        dtype=WIDE,
        payload_bytes=None if row.payload_bytes is None else row.payload_bytes * factor,
        wire_bytes=None if row.wire_bytes is None else row.wire_bytes * factor,
    )
