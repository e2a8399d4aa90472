"""Executed instructions: the halves of an asynchronous pair, and its transfer, put together.

An op counts once, whatever number of events it left: `-start`, `-done`, and the transfer that the
profiler keeps on a line of its own. Containers are left out, since they add nothing to what they hold.
"""

import polars as pl

from meshscope.readers.profile.ops import Ops

_PAIR = ["host", "device", "core", "module", "starts"]


def executions(ops: Ops) -> pl.DataFrame:
    """One row for each execution of an instruction on a device, with the facts of the instruction.

    `start_s` and `dur_s` tell from the start to the end, `exposed_s` how long the op itself kept its
    line (in s), `is_async` whether it was a pair; `is_paired` is false where one half is missing.
    """
    told = ops.instructions.select("op", "module", "starts", "opcode")
    events = ops.events.filter(pl.col("role") != "container").join(told, on="op", how="left")
    apart = pl.col("starts").is_null() & (pl.col("role") == "leaf")
    alone = events.filter(apart).with_columns(
        pl.col("dur_s").alias("exposed_s"),
        pl.lit(value=False).alias("is_async"),
        pl.lit(value=True).alias("is_paired"),
    )
    pairs = _pairs(events.filter(~apart))
    columns = [*ops.events.columns, "exposed_s", "is_async", "is_paired"]
    every = pl.concat([alone.select(columns), pairs.select(columns)], how="vertical_relaxed")
    facts = ops.instructions.drop("text")
    return every.join(facts, on="op", how="left").sort("start_s", "device", maintain_order=True)


def _pairs(events: pl.DataFrame) -> pl.DataFrame:
    """The asynchronous ones: each start with the done behind it, and with its transfer."""
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
    """A row for each start, with the end of its done; and one for each done without a start."""
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
    """Keeps a match only for the first that claims it; the others stand alone."""
    is_first = pl.int_range(pl.len()).over(column) == 0
    return matched.with_columns(pl.when(is_first).then(column).alias(column))


def _ends(matched: pl.DataFrame) -> pl.DataFrame:
    covered = pl.col("role") == "covered"
    return matched.filter(pl.col("start_row").is_not_null()).select(
        "start_row",
        (pl.col("start_s") + pl.col("dur_s")).alias("end_s"),
        pl.when(covered).then(0.0).otherwise("dur_s").alias("done_exposed_s"),
    )


def _spans(paired: pl.DataFrame, transfers: pl.DataFrame) -> pl.DataFrame:
    """Each pair from its start to its end; the transfer, where there is one, tells both better."""
    numbered = transfers.with_row_index("transfer_row").select(
        *_PAIR,
        pl.col("start_s").alias("moved_s"),
        pl.col("dur_s").alias("moving_s"),
        "transfer_row",
        pl.col("start_s").alias("at_s"),
    )
    found = _each_once(
        paired.with_columns((pl.col("start_s") + pl.col("dur_s") / 2).alias("at_s"))
        .sort("at_s")
        .join_asof(numbered, on="at_s", by=_PAIR, strategy="nearest", check_sortedness=False),
        "transfer_row",
    )
    own = pl.col("transfer_row").is_not_null()
    end_s = pl.max_horizontal("end_s", pl.col("start_s") + pl.col("dur_s"))
    spans = found.with_columns(
        pl.when(own).then("moved_s").otherwise("start_s").alias("start_s"),
        pl.when(own).then("moving_s").otherwise(end_s - pl.col("start_s")).alias("dur_s"),
        (pl.col("dur_s") + pl.col("done_exposed_s").fill_null(0.0)).alias("exposed_s"),
        pl.lit(value=True).alias("is_async"),
        (own | pl.col("end_s").is_not_null()).alias("is_paired"),
    )
    taken = found["transfer_row"].drop_nulls()
    return pl.concat([spans, _alone(transfers, taken)], how="diagonal_relaxed")


def _alone(transfers: pl.DataFrame, taken: pl.Series) -> pl.DataFrame:
    """Transfers without a pair: how long they kept the op's line is not known."""
    rest = transfers.with_row_index("transfer_row").filter(
        ~pl.col("transfer_row").is_in(taken.implode())
    )
    return rest.with_columns(
        pl.lit(None, pl.Float64).alias("exposed_s"),
        pl.lit(value=True).alias("is_async"),
        pl.lit(value=True).alias("is_paired"),
    )
