"""How often each payload size occurs in a step."""

from dataclasses import dataclass

import polars as pl

from meshscope.events.enums import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCount:
    """Collectives of one kind, axis and payload in one step of the phase."""

    phase: str
    axis: str
    kind: str
    payload_bytes: int
    count: int


def size_counts(distribution: pl.DataFrame, source: Source) -> tuple[SizeCount, ...]:
    """The metric `size_distribution` of one source; unknown sizes have no place on the axis and are left out."""
    own = distribution.filter(
        pl.col("source") == source.value, pl.col("payload_bytes").is_not_null()
    )
    return tuple(
        SizeCount(
            phase="unknown phase" if row["phase"] is None else row["phase"],
            axis="no axis" if row["axis"] is None else row["axis"],
            kind=row["kind"],
            payload_bytes=row["payload_bytes"],
            count=row["count"],
        )
        for row in own.iter_rows(named=True)
    )
