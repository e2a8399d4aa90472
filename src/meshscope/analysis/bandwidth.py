"""How fast collectives were: algorithm and bus bandwidth by nccl-tests, and shares of link peaks."""

from collections.abc import Sequence

import polars as pl

from meshscope.analysis.volume import WHERE, collectives
from meshscope.events.enums import Source
from meshscope.events.measured import CollectiveTime
from meshscope.spec.hardware.chips import Chip

SORT = ("axis", "kind", "group_size", "payload_bytes")
_TIMES_SCHEMA = {
    **dict.fromkeys(("phase", "part", "kind", "axis"), pl.String),
    **dict.fromkeys(("measured_dur_s", "measured_wire_s"), pl.Float64),
}


def bandwidth(events: pl.DataFrame, chip: Chip | None = None) -> pl.DataFrame:
    """Bandwidth of each sort of collective that has times: mean duration, algbw, busbw, share of a link.

    `algbw_bytes_per_s` is payload over duration, `busbw_bytes_per_s` wire bytes over duration: payload
    times 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for point to
    point, by the opcode that was carried out. `link_frac` is busbw over the peak of ONE link in ONE
    direction; a device that uses several links, or both directions of a ring, exceeds 1. Rows without
    times are left out. A duration includes waiting (see `waiting`).

    Source: nccl-tests doc/PERFORMANCE.md, "Bandwidth"; link peaks: `meshscope.spec.hardware.chips`.
    """
    rows = collectives(events).filter(pl.col("dur_s") > 0, pl.col("wire_bytes").is_not_null())
    times = pl.col("count").cast(pl.Int64)
    mean_s = (pl.col("dur_s") * times).sum() / times.sum()
    table = rows.group_by(*WHERE, *SORT, maintain_order=True).agg(
        times.sum().alias("count"),
        mean_s.alias("mean_dur_s"),
        (pl.col("payload_bytes").first() / mean_s).alias("algbw_bytes_per_s"),
        ((pl.col("wire_bytes") * times).sum() / times.sum() / mean_s).alias("busbw_bytes_per_s"),
        pl.col("time_basis").first(),
    )
    return table.with_columns(_link_frac(chip))


def _link_frac(chip: Chip | None) -> pl.Expr:
    peak = None if chip is None else chip.link_bytes_per_s
    share = pl.lit(None, pl.Float64) if peak is None else pl.col("busbw_bytes_per_s") / peak
    return share.alias("link_frac")


def measured_bandwidth(
    events: pl.DataFrame, times: Sequence[CollectiveTime], chip: Chip | None = None
) -> pl.DataFrame:
    """Bandwidth that a profile shows, by phase, part, kind and axis: over wire time and whole duration.

    `wire_s` is the time of the fastest participant, so that waiting for others is left out; `algbw` and
    `busbw` are over it, `dur_busbw_bytes_per_s` over the mean duration of all participants, which is what
    nccl-tests would print. Bytes are means over the operations of a sort.

    Source: as `bandwidth`; the fastest participant as TraceLens (`comm_latency`) and nsys-jax take it.
    """
    keys = ("phase", "part", "kind", "axis")
    told = pl.DataFrame(
        [(t.phase, t.part, t.kind, t.axis, t.dur_s, t.wire_s) for t in times],
        schema=_TIMES_SCHEMA,
        orient="row",
    )
    n = pl.col("count").cast(pl.Int64)
    rows = collectives(events).filter(
        pl.col("source") == Source.MEASURED.value, pl.col("wire_bytes").is_not_null()
    )
    means = rows.group_by(*WHERE, *keys[1:], maintain_order=True).agg(
        n.sum().alias("count"),
        ((pl.col("payload_bytes") * n).sum() / n.sum()).alias("payload_bytes"),
        ((pl.col("wire_bytes") * n).sum() / n.sum()).alias("wire_bytes"),
    )
    joined = means.join(told, on=keys, how="inner", nulls_equal=True, maintain_order="left")
    return (
        joined.filter(pl.col("measured_wire_s") > 0)
        .with_columns(
            (pl.col("payload_bytes") / pl.col("measured_wire_s")).alias("algbw_bytes_per_s"),
            (pl.col("wire_bytes") / pl.col("measured_wire_s")).alias("busbw_bytes_per_s"),
            (pl.col("wire_bytes") / pl.col("measured_dur_s")).alias("dur_busbw_bytes_per_s"),
        )
        .with_columns(_link_frac(chip))
    )
