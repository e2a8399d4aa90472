"""Algorithm and bus bandwidth of collectives as nccl-tests defines them, and fractions of link peaks."""

from collections.abc import Sequence

import polars as pl

from meshscope.analysis.volume import WHERE, collectives
from meshscope.events.enums import Kind, Source
from meshscope.events.measured import CollectiveTime, TransferTime
from meshscope.hardware.chips import Chip

GROUP_KEYS = ("axis", "kind", "group_size", "payload_bytes")
_TIMES_SCHEMA = {
    **dict.fromkeys(("phase", "part", "kind", "axis"), pl.String),
    **dict.fromkeys(("measured_dur_s", "measured_wire_s"), pl.Float64),
}
_TRANSFERS_SCHEMA = {
    **dict.fromkeys(("source", "phase", "kind", "axis"), pl.String),
    "payload_bytes": pl.Int64,
    "wire_s": pl.Float64,
}
# What crosses the links in the time of a row: a receiver sends nothing, but waits for the array.
_MOVED = (
    pl.when(pl.col("kind") == Kind.RECV.value)
    .then("payload_bytes")
    .otherwise("wire_bytes")
    .alias("wire_bytes")
)


def bandwidth(
    events: pl.DataFrame, chip: Chip | None = None, transfers: Sequence[TransferTime] = ()
) -> pl.DataFrame:
    """Mean duration and bandwidth of collectives that are equal in axis, kind, group size and payload.

    `algbw_bytes_per_s` = payload / duration. `busbw_bytes_per_s` = wire bytes / duration, where the wire
    bytes of the executed opcode are the payload times 2(n-1)/n for all-reduce, (n-1)/n for all-gather,
    reduce-scatter and all-to-all, and 1 for point to point, at either end. `link_frac` = busbw / peak of one link in one
    direction; a device that uses several links or both directions of a ring exceeds 1. Collectives without
    durations are excluded. Durations include waiting (see `waiting`), except in traces of all ranks of a
    group: there algbw and busbw are of the rank that comes last, which does not wait.

    Source: nccl-tests doc/PERFORMANCE.md, "Bandwidth"; link peaks: `meshscope.hardware.chips`.
    """
    rows = collectives(events).filter(pl.col("dur_s") > 0, pl.col("wire_bytes").is_not_null())
    rows = rows.with_columns(_MOVED)
    times = pl.col("count").cast(pl.Int64)
    keys = ["source", "phase", "kind", "axis", "payload_bytes"]
    known = pl.DataFrame(
        [
            (Source.MEASURED.value, t.label.phase, t.kind, t.axis, t.payload_bytes, t.wire_s)
            for t in transfers
        ],
        schema=_TRANSFERS_SCHEMA,
        orient="row",
    )
    known = known.group_by(keys).agg(pl.col("wire_s").mean())
    rows = rows.join(known, on=keys, how="left", nulls_equal=True, maintain_order="left")
    mean_s, sent_s = (
        (seconds * times).sum() / times.sum()
        for seconds in (pl.col("dur_s"), pl.coalesce("wire_s", "dur_s"))
    )
    table = rows.group_by(*WHERE, *GROUP_KEYS, maintain_order=True).agg(
        times.sum().alias("count"),
        mean_s.alias("mean_dur_s"),
        (pl.col("payload_bytes").first() / sent_s).alias("algbw_bytes_per_s"),
        ((pl.col("wire_bytes") * times).sum() / times.sum() / sent_s).alias("busbw_bytes_per_s"),
        pl.col("time_basis").first(),
    )
    return table.with_columns(_link_frac(chip))


def _link_frac(chip: Chip | None) -> pl.Expr:
    peak = None if chip is None else chip.link_bytes_per_s
    fraction = pl.lit(None, pl.Float64) if peak is None else pl.col("busbw_bytes_per_s") / peak
    return fraction.alias("link_frac")


def measured_bandwidth(
    events: pl.DataFrame, times: Sequence[CollectiveTime], chip: Chip | None = None
) -> pl.DataFrame:
    """Bandwidth of profiled collectives by phase, part, kind and axis.

    `measured_wire_s` is the duration of the fastest participant, which excludes waiting for the others.
    `algbw` and `busbw` divide the mean payload and wire bytes by it. `dur_busbw_bytes_per_s` divides by the
    mean duration of all participants, as nccl-tests does.

    Source: as `bandwidth`; TraceLens (`comm_latency`) and nsys-jax also take the fastest participant.
    """
    keys = ("phase", "part", "kind", "axis")
    durations = pl.DataFrame(
        [(t.phase, t.part, t.kind, t.axis, t.dur_s, t.wire_s) for t in times],
        schema=_TIMES_SCHEMA,
        orient="row",
    )
    n = pl.col("count").cast(pl.Int64)
    rows = collectives(events).filter(
        pl.col("source") == Source.MEASURED.value, pl.col("wire_bytes").is_not_null()
    )
    means = (
        rows.with_columns(_MOVED)
        .group_by(*WHERE, *keys[1:], maintain_order=True)
        .agg(
            n.sum().alias("count"),
            ((pl.col("payload_bytes") * n).sum() / n.sum()).alias("payload_bytes"),
            ((pl.col("wire_bytes") * n).sum() / n.sum()).alias("wire_bytes"),
        )
    )
    joined = means.join(durations, on=keys, how="inner", nulls_equal=True, maintain_order="left")
    return (
        joined.filter(pl.col("measured_wire_s") > 0)
        .with_columns(
            (pl.col("payload_bytes") / pl.col("measured_wire_s")).alias("algbw_bytes_per_s"),
            (pl.col("wire_bytes") / pl.col("measured_wire_s")).alias("busbw_bytes_per_s"),
            (pl.col("wire_bytes") / pl.col("measured_dur_s")).alias("dur_busbw_bytes_per_s"),
        )
        .with_columns(_link_frac(chip))
    )
