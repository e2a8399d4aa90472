"""Collectives across their participants, and what devices did: wire, wait, load and idle.

A participant that comes late keeps the others waiting inside the collective, so that the shortest
duration is the time on the wire, and what a device spends beyond it is waiting. It errs where
even the last one waits (for a link that others use): that stays in the wire time.
Pure functions over rows of measured events, as `joining.join_hlo` makes them.
"""

import numpy as np
import polars as pl

from meshscope.events.enums import Kind
from meshscope.readers.profile.nesting import covered_length

PS_PER_S = 1e12


def participants(rows: pl.DataFrame) -> pl.DataFrame:
    """The measured collectives, with what each device waited in each of them.

    Added columns: `group` (device ids; null where groups are not known: then all devices that ran
    it), `occurrence` (how often the device ran it before), `n_participants` (measured),
    `wire_s` (of the fastest participant), `wait_s` (the device's own time beyond it; null where
    no other participant was recorded, or
    ops do not tell their device), `late_s` (how much later than the first it came).
    """
    runs = rows.filter(pl.col("kind").is_not_null()).sort("start_s", maintain_order=True)
    own = runs.with_columns(
        pl.int_range(pl.len()).over("module", "hlo_name", "device", "core").alias("occurrence"),
        _own_group(runs).alias("group"),
    )
    meeting = ["module", "hlo_name", "occurrence", "group_key"]
    keyed = own.with_columns(
        pl.col("group").cast(pl.List(pl.String)).list.join(",").fill_null("").alias("group_key")
    )
    wire_s, n_participants = pl.col("dur_s").min().over(meeting), pl.len().over(meeting)
    is_seen_alone = (n_participants == 1) & (pl.col("group_size") > 1).fill_null(value=False)
    is_known = ~is_seen_alone & pl.col("device").is_not_null()
    return keyed.with_columns(
        n_participants.alias("n_participants"),
        wire_s.alias("wire_s"),
        pl.when(is_known).then(pl.col("dur_s") - wire_s).alias("wait_s"),
        (pl.col("start_s") - pl.col("start_s").min().over(meeting)).alias("late_s"),
    ).drop("group_key")


def wire_rates(rows: pl.DataFrame) -> pl.DataFrame:
    """For each collective instruction: how often, and bytes a second that one device sends.

    `wire_s` is the mean time of the fastest participants; `wire_bytes_per_s` the bytes that one
    device sends, over that time: of one direction, all links of the device together.
    """
    meetings = participants(rows)
    told = ["module", "hlo_name"]
    return meetings.group_by(told, maintain_order=True).agg(
        pl.col("kind", "opcode", "group_size", "payload_bytes", "wire_bytes").first(),
        pl.len().alias("n_events"),
        pl.col("device").n_unique().alias("n_devices"),
        pl.col("wire_s").mean(),
        pl.col("wait_s").mean(),
        pl.col("wait_s").max().alias("longest_wait_s"),
        (pl.col("wire_bytes").first() / pl.col("wire_s").mean()).alias("wire_bytes_per_s"),
    )


def loads(rows: pl.DataFrame, *, window_s: tuple[float, float] | None = None) -> pl.DataFrame:
    """What each device did in the window (s; by default from the first op of any to the last).

    `busy_s` is the time in which at least one op kept the device, `collective_s` that in which a
    collective did, `idle_s` the rest of the window; `wait_s` the part of the collectives in which
    the device waited for others. Transfers beside compute and SparseCores keep no device.
    """
    begin_s, end_s = window_s or _window(rows)
    known = pl.col("wait_s").is_not_null().any()
    wait_s = pl.when(known).then(pl.col("wait_s").sum())
    waits = participants(rows).group_by("device").agg(wait_s)
    found: list[dict[str, float | int | None]] = []
    for own in rows.partition_by("device", maintain_order=False):
        kept = own.filter(pl.col("exposed_s").is_not_null(), pl.col("core").is_null())
        busy_s = _covered_s(kept, begin_s, end_s)
        collective = kept.filter(pl.col("kind").is_not_null())
        found.append(
            {
                "device": own["device"][0],
                "n_ops": len(own),
                "busy_s": busy_s,
                "collective_s": _covered_s(collective, begin_s, end_s),
                "idle_s": end_s - begin_s - busy_s,
                "window_s": end_s - begin_s,
            }
        )
    empty = {"device": pl.Int32, "n_ops": pl.UInt32}
    times = dict.fromkeys(("busy_s", "collective_s", "idle_s", "window_s"), pl.Float64)
    table = pl.DataFrame(found, schema={**empty, **times})
    return table.join(waits, on="device", how="left", nulls_equal=True).sort("device")


def _window(rows: pl.DataFrame) -> tuple[float, float]:
    if rows.is_empty():
        return 0.0, 0.0
    ends = rows["start_s"] + rows["dur_s"]
    return float(rows["start_s"].min() or 0.0), float(ends.max() or 0.0)  # type: ignore[arg-type]


def _covered_s(rows: pl.DataFrame, begin_s: float, end_s: float) -> float:
    """Length of the union of the times in which the ops kept the device: the ends of a pair, not its middle."""
    dur, exposed = rows["dur_s"].to_numpy(), rows["exposed_s"].to_numpy()
    start = rows["start_s"].to_numpy()
    waited = np.minimum(exposed, dur)
    first = np.where(rows["is_async"].to_numpy(), start + dur - waited, start)
    bounds = np.clip(np.stack([first, start + dur]), begin_s, end_s)
    ps = np.rint((bounds - begin_s) * PS_PER_S).astype(np.int64)
    return covered_length(ps[0], ps[1]) / PS_PER_S


def _own_group(rows: pl.DataFrame) -> pl.Series:
    """The group that holds the row's device; null for pairs, where chains of devices meet."""
    is_pairs = pl.col("kind").is_in([kind.value for kind in (Kind.PERMUTE, Kind.SEND, Kind.RECV)])
    exploded = (
        rows.with_row_index("row")
        .filter(~is_pairs)
        .select("row", "device", "groups")
        .explode("groups")
        .filter(pl.col("groups").list.contains(pl.col("device")))
        .unique("row", keep="first")
    )
    found = rows.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row")).join(
        exploded.select("row", pl.col("groups").alias("group")),
        on="row",
        how="left",
        maintain_order="left",
    )
    return found["group"]
