"""Volume of a request and sizes of its collectives, by phase, axis and kind."""

from dataclasses import dataclass

import polars as pl

from meshscope.events.enums import Source
from meshscope.views.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL

_LABELS = (
    pl.col("phase").fill_null(UNKNOWN_PHASE_LABEL),
    pl.col("axis").fill_null(UNKNOWN_AXIS_LABEL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeBar:
    """Wire bytes and operations of one kind over one axis, in all steps of a phase."""

    phase: str
    axis: str
    kind: str
    request_wire_bytes: float
    request_count: int


def volume_bars(volume: pl.DataFrame, source: Source) -> tuple[VolumeBar, ...]:
    """The metric `volume` of one source, summed over the parts, without unknown sizes."""
    rows = volume.filter(pl.col("source") == source.value, pl.col("wire_bytes").is_not_null())
    sums = rows.group_by("phase", "axis", "kind", maintain_order=True).agg(
        pl.col("request_wire_bytes").sum(), pl.col("request_count").sum()
    )
    return tuple(VolumeBar(**row) for row in sums.with_columns(_LABELS).iter_rows(named=True))


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
    ).with_columns(_LABELS)
    return tuple(SizeCount(**row) for row in rows.drop("source").iter_rows(named=True))
