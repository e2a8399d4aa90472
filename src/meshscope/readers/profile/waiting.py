"""Splits measured collectives into transfer and waiting, and device time into busy and idle.

A late participant keeps the others waiting inside the collective. So the shortest duration of all
participants is the transfer time (`wire_s`), and what a device spends beyond it is waiting. If
even the last participant waits, for a link in use, that time counts as transfer.
The input rows come from `joining.join_hlo`.
"""

import numpy as np
import polars as pl

from meshscope.events.enums import Kind
from meshscope.readers.profile.nesting import covered_length

PS_PER_S = 1e12


def participants(rows: pl.DataFrame) -> pl.DataFrame:
    """The measured collectives, with the waiting time of each device.

    Added columns: `group` (device ids; null if groups are unknown, then all devices that ran it
    take part), `occurrence` (how often the device ran it before), `n_participants` (recorded),
    `wire_s` (duration on the fastest participant), `wait_s` (the rest of the device's duration;
    null if no other participant was recorded or the device is unknown), `late_s` (start after the
    first participant).
    """
    runs = rows.filter(pl.col("kind").is_not_null()).sort("start_s", maintain_order=True)
    counted = runs.with_columns(
        pl.int_range(pl.len()).over("module", "hlo_name", "device", "core").alias("occurrence"),
        _group_of_device(runs).alias("group"),
    )
    collective = ["module", "hlo_name", "occurrence", "group_key"]
    keyed = counted.with_columns(
        pl.col("group").cast(pl.List(pl.String)).list.join(",").fill_null("").alias("group_key")
    )
    wire_s, n_participants = pl.col("dur_s").min().over(collective), pl.len().over(collective)
    is_alone = (n_participants == 1) & (pl.col("group_size") > 1).fill_null(value=False)
    is_known = ~is_alone & pl.col("device").is_not_null()
    return keyed.with_columns(
        n_participants.alias("n_participants"),
        wire_s.alias("wire_s"),
        pl.when(is_known).then(pl.col("dur_s") - wire_s).alias("wait_s"),
        (pl.col("start_s") - pl.col("start_s").min().over(collective)).alias("late_s"),
    ).drop("group_key")


def loads(rows: pl.DataFrame, *, window_s: tuple[float, float] | None = None) -> pl.DataFrame:
    """Busy, collective, waiting and idle time of each device in the window.

    The window is in s and defaults to the first start to the last end on any device. `busy_s` is
    the time in which at least one op runs, `collective_s` the time in which a collective runs,
    `wait_s` the waiting part of collectives. Background transfers and SparseCores do not count.
    """
    begin_s, end_s = window_s or _window(rows)
    is_known = pl.col("wait_s").is_not_null().any()
    wait_s = pl.when(is_known).then(pl.col("wait_s").sum())
    waits = participants(rows).group_by("device").agg(wait_s)
    records: list[dict[str, float | int | None]] = []
    for of_device in rows.partition_by("device", maintain_order=False):
        blocking = of_device.filter(pl.col("exposed_s").is_not_null(), pl.col("core").is_null())
        busy_s = _covered_s(blocking, begin_s, end_s)
        collective = blocking.filter(pl.col("kind").is_not_null())
        records.append(
            {
                "device": of_device["device"][0],
                "n_ops": len(of_device),
                "busy_s": busy_s,
                "collective_s": _covered_s(collective, begin_s, end_s),
                "idle_s": end_s - begin_s - busy_s,
                "window_s": end_s - begin_s,
            }
        )
    empty = {"device": pl.Int32, "n_ops": pl.UInt32}
    times = dict.fromkeys(("busy_s", "collective_s", "idle_s", "window_s"), pl.Float64)
    table = pl.DataFrame(records, schema={**empty, **times})
    return table.join(waits, on="device", how="left", nulls_equal=True).sort("device")


def _window(rows: pl.DataFrame) -> tuple[float, float]:
    if rows.is_empty():
        return 0.0, 0.0
    ends = rows["start_s"] + rows["dur_s"]
    return float(rows["start_s"].min() or 0.0), float(ends.max() or 0.0)  # type: ignore[arg-type]


def _covered_s(rows: pl.DataFrame, begin_s: float, end_s: float) -> float:
    """Length of the union of blocking times in s; a pair blocks at its end, not in between."""
    dur, exposed = rows["dur_s"].to_numpy(), rows["exposed_s"].to_numpy()
    start = rows["start_s"].to_numpy()
    blocked = np.minimum(exposed, dur)
    first = np.where(rows["is_async"].to_numpy(), start + dur - blocked, start)
    bounds = np.clip(np.stack([first, start + dur]), begin_s, end_s)
    ps = np.rint((bounds - begin_s) * PS_PER_S).astype(np.int64)
    return covered_length(ps[0], ps[1]) / PS_PER_S


def _group_of_device(rows: pl.DataFrame) -> pl.Series:
    """The group that contains the device of each row; null for pairs, which form chains."""
    is_pairs = pl.col("kind").is_in([kind.value for kind in (Kind.PERMUTE, Kind.SEND, Kind.RECV)])
    exploded = (
        rows.with_row_index("row")
        .filter(~is_pairs)
        .select("row", "device", "groups")
        .explode("groups")
        .filter(pl.col("groups").list.contains(pl.col("device")))
        .unique("row", keep="first")
    )
    numbered = rows.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row")).join(
        exploded.select("row", pl.col("groups").alias("group")),
        on="row",
        how="left",
        maintain_order="left",
    )
    return numbered["group"]
