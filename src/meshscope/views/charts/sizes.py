"""Number of collectives of each payload size in a step."""

from dataclasses import dataclass

import polars as pl

from meshscope.events.enums import Source
from meshscope.views.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCount:
    """The collectives of one kind, axis and payload size in one step of the phase."""

    phase: str
    axis: str
    kind: str
    payload_bytes: int
    count: int


def size_counts(distribution: pl.DataFrame, source: Source) -> tuple[SizeCount, ...]:
    """The metric `size_distribution` of one source, without unknown sizes."""
    rows = distribution.filter(
        pl.col("source") == source.value, pl.col("payload_bytes").is_not_null()
    )
    return tuple(
        SizeCount(
            phase=row["phase"] or UNKNOWN_PHASE_LABEL,
            axis=row["axis"] or UNKNOWN_AXIS_LABEL,
            kind=row["kind"],
            payload_bytes=row["payload_bytes"],
            count=row["count"],
        )
        for row in rows.iter_rows(named=True)
    )
