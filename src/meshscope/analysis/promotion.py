"""16-bit collectives that a backend carries out in float32: seen by comparing what was asked with what was found."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from meshscope.events.collective import Collective
from meshscope.units import DTYPE_BITS

NARROW = frozenset({"bf16", "f16"})
WIDE = "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """The rows asked for, as they were carried out; `count` of them, in one step each, are wider."""

    rows: tuple[Collective, ...]
    count: int


def promotion_of(asked: Iterable[Collective], found: Iterable[Collective]) -> Promotion:
    """The rows of `asked` in float32 where `found` has the same collective in float32 alone."""
    dtypes: dict[tuple[Hashable, ...], set[str | None]] = {}
    for row in found:
        dtypes.setdefault(_what(row), set()).add(row.dtype)
    rows: list[Collective] = []
    count = 0
    for row in asked:
        is_wide = row.dtype in NARROW and dtypes.get(_what(row)) == {WIDE}
        rows.append(_widened(row) if is_wide else row)
        count += row.count * is_wide
    return Promotion(rows=tuple(rows), count=count)


def _what(row: Collective) -> tuple[Hashable, ...]:
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
