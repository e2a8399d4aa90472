"""Turns the ops of a profile (XPlane, or the TPU profiler's Chrome trace) into the frame of traces.

Start and done of an asynchronous op become one event. Without the HLO of the program a trace has
neither trip counts nor layers; groups are those that the event's text lists.
"""

from collections.abc import Sequence

import polars as pl

from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.ops import Ops
from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.steps import ops_in_steps
from meshscope.readers.traces.trace import (
    EVENTS_SCHEMA,
    OPS_SCHEMA,
    STEPS_SCHEMA,
    Category,
    Trace,
    TraceFormat,
)

NS_PER_S = 1e9
_MOVES = (
    "copy",
    "copy-start",
    "copy-done",
    "async-start",
    "async-done",
    "slice-start",
    "slice-done",
)


def trace_of_profile(
    profile: Profile, kind: TraceFormat, *, n_events: int, findings: Sequence[str] = ()
) -> Trace:
    """The trace of all hosts of a profile, with the positions of the profile as devices."""
    ops = ops_in_steps(profile)
    rows = executions(ops).filter(pl.col("device").is_not_null())
    steps, step_of = _steps(rows)
    events = rows.select(
        "op",
        "device",
        pl.col("line").cast(pl.Int64).alias("stream"),
        (pl.col("start_s") * NS_PER_S).round().cast(pl.Int64).alias("start_ns"),
        (pl.col("dur_s") * NS_PER_S).round().cast(pl.Int64).alias("dur_ns"),
        step_of.alias("step"),
    )
    return Trace(
        path=profile.spaces[0].path,
        format=kind,
        events=events.select(pl.col(n).cast(t) for n, t in EVENTS_SCHEMA.items()),
        ops=_ops_table(ops),
        steps=steps,
        n_events=n_events,
        findings=tuple(findings),
    )


def _ops_table(ops: Ops) -> pl.DataFrame:
    """The instructions as ops; `groups` are the device ids of all groups."""
    is_collective = pl.col("kind").is_not_null()
    is_move = pl.col("opcode").is_in(_MOVES).fill_null(value=False)
    category = (
        pl.when(is_collective).then(pl.lit(Category.COLLECTIVE.value))
        .when(is_move).then(pl.lit(Category.COPY.value))
        .otherwise(pl.lit(Category.COMPUTE.value))
    )  # fmt: skip
    table = ops.instructions.with_columns(
        pl.col("hlo_name").alias("name"),
        category.alias("category"),
        pl.when(is_collective).then(pl.col("groups")).alias("groups"),
        pl.lit(None, pl.List(pl.Int32)).alias("group"),
        pl.col("groups").list.first().list.len().cast(pl.Int32).alias("group_size"),
        pl.lit(None, pl.String).alias("group_name"),
    )
    return table.select(pl.col(n).cast(t) for n, t in OPS_SCHEMA.items())


def _steps(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """The steps by phase and number, and the row of the step of each op."""
    keys = ["phase", "step", "device"]
    is_inside = pl.col("phase").is_not_null() | pl.col("step").is_not_null()
    table = (
        rows.filter(is_inside)
        .group_by(keys, maintain_order=True)
        .agg(
            (pl.col("start_s").min() * NS_PER_S).round().cast(pl.Int64).alias("start_ns"),
            ((pl.col("start_s") + pl.col("dur_s")).max() * NS_PER_S).round().cast(pl.Int64).alias("end_ns"),
        )
        .with_row_index("row")
    )  # fmt: skip
    row_of = rows.select(keys).join(
        table.select(*keys, "row"), on=keys, how="left", nulls_equal=True, maintain_order="left"
    )["row"]
    name = pl.format("{} {}", pl.col("phase").fill_null("step"), pl.col("step").fill_null(0))
    steps = table.with_columns(
        name.alias("name"),
        pl.col("phase").alias("kind"),
        (pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"),
        pl.lit(None, pl.Int64).alias("prefill_tokens"),
        pl.lit(None, pl.Int64).alias("decode_tokens"),
        pl.col("row").alias("step"),
    )
    return steps.select(pl.col(n).cast(t) for n, t in STEPS_SCHEMA.items()), row_of
