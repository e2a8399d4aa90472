"""Executions of instructions: asynchronous halves merged, and collectives split into transfer and waiting.

An op counts once, however many events it left. Containers are dropped, because their time is that
of the ops inside them.

A late participant keeps the others waiting inside the collective. So the shortest duration of all
participants is the transfer time (`wire_s`), and what a device spends beyond it is waiting. If
even the last participant waits, for a link in use, that time counts as transfer.
The input rows come from `joining.join_hlo`.
"""

import numpy as np
import polars as pl

from meshscope.events.enums import Kind
from meshscope.readers.profile.nesting import CoveredTime
from meshscope.readers.profile.ops import Ops

_PAIR = ["host", "device", "core", "module", "starts"]


def executions(ops: Ops) -> pl.DataFrame:
    """One row per execution of an instruction on a device, with the columns of the instruction.

    `dur_s` covers start to end, `exposed_s` the time in which the op blocked its line, both in s.
    `is_async` marks start and done pairs; `is_paired` is false if one half is missing.
    """
    instructions = ops.instructions.select("op", "module", "starts", "opcode")
    events = ops.events.filter(pl.col("role") != "container").join(
        instructions, on="op", how="left"
    )
    is_single = pl.col("starts").is_null() & (pl.col("role") == "leaf")
    single = events.filter(is_single).with_columns(
        pl.col("dur_s").alias("exposed_s"),
        pl.lit(value=False).alias("is_async"),
        pl.lit(value=True).alias("is_paired"),
    )
    pairs = _pairs(events.filter(~is_single))
    columns = [*ops.events.columns, "exposed_s", "is_async", "is_paired"]
    rows = pl.concat([single.select(columns), pairs.select(columns)], how="vertical_relaxed")
    return rows.join(ops.instructions.drop("text"), on="op", how="left").sort(
        "start_s", "device", maintain_order=True
    )


def _pairs(events: pl.DataFrame) -> pl.DataFrame:
    """Asynchronous executions: each start with the done after it and with its transfer."""
    keyed = events.with_columns(
        pl.col("device").fill_null(-1), pl.col("core").fill_null(-1), pl.col("module").fill_null("")
    ).sort("start_s", maintain_order=True)
    transfers = keyed.filter(pl.col("role") == "transfer").with_columns(
        pl.col("starts").fill_null(pl.lit("transfer ") + pl.col("op").cast(pl.String))
    )
    paired = _paired(keyed.filter(pl.col("role") != "transfer").with_row_index("row"))
    return _spans(paired, transfers).with_columns(
        pl.when(pl.col("device") >= 0).then("device").alias("device"),
        pl.when(pl.col("core") >= 0).then("core").alias("core"),
    )


def _paired(halves: pl.DataFrame) -> pl.DataFrame:
    """A row per start with the end of its done, and a row per done without a start."""
    is_done = pl.col("opcode").str.ends_with("-done")
    starts = halves.filter(~is_done)
    earlier = starts.select(*_PAIR, "start_s", start_row="row")
    matched = _each_once(
        halves.filter(is_done).join_asof(earlier, on="start_s", by=_PAIR, check_sortedness=False),
        "start_row",
    )
    both = starts.join(_ends(matched), left_on="row", right_on="start_row", how="left")
    lone = matched.filter(pl.col("start_row").is_null()).with_columns(
        pl.lit(None, pl.Float64).alias("end_s"), pl.lit(0.0).alias("done_exposed_s")
    )
    return pl.concat([both, lone.drop("start_row")], how="diagonal_relaxed")


def _each_once(matched: pl.DataFrame, column: str) -> pl.DataFrame:
    """Keeps each match for the first row that claims it; other rows lose it."""
    is_first = pl.int_range(pl.len()).over(column) == 0
    return matched.with_columns(pl.when(is_first).then(column).alias(column))


def _ends(matched: pl.DataFrame) -> pl.DataFrame:
    is_covered = pl.col("role") == "covered"
    return matched.filter(pl.col("start_row").is_not_null()).select(
        "start_row",
        (pl.col("start_s") + pl.col("dur_s")).alias("end_s"),
        pl.when(is_covered).then(0.0).otherwise("dur_s").alias("done_exposed_s"),
    )


def _spans(paired: pl.DataFrame, transfers: pl.DataFrame) -> pl.DataFrame:
    """Each pair from start to end; a transfer, if recorded, has the more precise times."""
    numbered = transfers.with_row_index("transfer_row").select(
        *_PAIR,
        pl.col("start_s").alias("transfer_start_s"),
        pl.col("dur_s").alias("transfer_dur_s"),
        "transfer_row",
        pl.col("start_s").alias("at_s"),
    )
    matched = _each_once(
        paired.with_columns((pl.col("start_s") + pl.col("dur_s") / 2).alias("at_s"))
        .sort("at_s")
        .join_asof(numbered, on="at_s", by=_PAIR, strategy="nearest", check_sortedness=False),
        "transfer_row",
    )
    has_transfer = pl.col("transfer_row").is_not_null()
    end_s = pl.max_horizontal("end_s", pl.col("start_s") + pl.col("dur_s"))
    spans = matched.with_columns(
        pl.when(has_transfer).then("transfer_start_s").otherwise("start_s").alias("start_s"),
        pl.when(has_transfer)
        .then("transfer_dur_s")
        .otherwise(end_s - pl.col("start_s"))
        .alias("dur_s"),
        (pl.col("dur_s") + pl.col("done_exposed_s").fill_null(0.0)).alias("exposed_s"),
        pl.lit(value=True).alias("is_async"),
        (has_transfer | pl.col("end_s").is_not_null()).alias("is_paired"),
    )
    used = matched["transfer_row"].drop_nulls()
    return pl.concat([spans, _without_pair(transfers, used)], how="diagonal_relaxed")


def _without_pair(transfers: pl.DataFrame, used: pl.Series) -> pl.DataFrame:
    """Transfers without start and done; their exposed time is not known."""
    rest = transfers.with_row_index("transfer_row").filter(
        ~pl.col("transfer_row").is_in(used.implode())
    )
    return rest.with_columns(
        pl.lit(None, pl.Float64).alias("exposed_s"),
        pl.lit(value=True).alias("is_async"),
        pl.lit(value=True).alias("is_paired"),
    )


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
    return CoveredTime.of(ps[0], ps[1]).total() / PS_PER_S


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
