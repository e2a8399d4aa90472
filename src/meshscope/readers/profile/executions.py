"""Merges the events of one execution: `-start`, `-done`, and the transfer between them.

An op counts once, however many events it left. Containers are dropped, because their time is that
of the ops inside them.
"""

import polars as pl

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
