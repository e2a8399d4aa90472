"""Executions of instructions: asynchronous halves merged, joined with the HLO of the programs that ran.

An op counts once, however many events it left. Containers are dropped, because their time is that
of the ops inside them. The facts of the HLO, by (module, instruction name), take precedence over
the facts in the profile, which fill the rest.
"""

from collections.abc import Mapping
from typing import Any

import polars as pl

from meshscope.errors import TraceError
from meshscope.events.enums import Source
from meshscope.events.schema import POLARS_SCHEMA, schema_of
from meshscope.readers.profile.ops import (
    CONTAINERS,
    COPY_KERNEL,
    EVENTS_SCHEMA,
    MOVES,
    ROLES,
    Ops,
)
from meshscope.readers.traces.trace import Category

Instructions = Mapping[tuple[str, str], Mapping[str, Any]]  # facts by module and name

OPS_SCHEMA = POLARS_SCHEMA | schema_of("profile_executions")
_OF_EXECUTIONS = (*EVENTS_SCHEMA, "exposed_s", "is_async", "is_paired")
FACTS_SCHEMA: dict[str, Any] = {"layers": pl.List(pl.Int32)} | {
    name: dtype for name, dtype in OPS_SCHEMA.items() if name not in _OF_EXECUTIONS
}


def with_hlo(ops: Ops, instructions: Instructions) -> Ops:
    """The ops with facts from the HLO, which replace the profile's, and `is_joined`.

    Ops that the HLO calls `while`, `call` or `conditional` become containers. TraceError if
    profile and HLO have no module in common.
    """
    records = [
        {"module": module, "hlo_name": name, "is_joined": True, **facts}
        for (module, name), facts in instructions.items()
    ]
    facts = pl.DataFrame(records, schema=FACTS_SCHEMA)
    recorded, given = set(ops.instructions["module"].drop_nulls()), set(facts["module"])
    if recorded and given and not recorded & given:
        raise TraceError(
            f"profile and HLO are of different programs: the profile ran {_some(recorded)}, the HLO "
            f"is of {_some(given)}. Pass the HLO of the run that was profiled."
        )
    joined = ops.instructions.join(
        facts, on=["module", "hlo_name"], how="left", suffix="_hlo", maintain_order="left"
    )
    both = [name for name in facts.columns if f"{name}_hlo" in joined]
    replaced = joined.with_columns(pl.coalesce(f"{name}_hlo", name).alias(name) for name in both)
    merged = replaced.drop(f"{name}_hlo" for name in both)
    containers = merged.filter(pl.col("opcode").is_in(list(CONTAINERS)))["op"]
    is_container = pl.col("op").is_in(containers.implode()) & (pl.col("role") == "leaf")
    role = pl.when(is_container).then(pl.lit("container", ROLES)).otherwise("role")
    return Ops(events=ops.events.with_columns(role.alias("role")), instructions=merged)


def categorized(ops: Ops) -> Ops:
    """The ops with the category of each instruction; what SparseCores alone run does not hide collectives."""
    opcode = pl.col("opcode").str.replace("-(start|done|update)$", "")
    sparse = ops.events.group_by("op").agg(pl.col("core").is_not_null().all()).filter("core")["op"]
    is_copy = opcode.is_in(list(MOVES)) | pl.col("text").str.contains(COPY_KERNEL)
    is_copy |= pl.col("op").is_in(sparse.implode())
    collective, compute, copy = (pl.lit(one.value) for one in Category)
    is_collective = pl.col("kind").is_not_null()
    category = pl.when(is_collective).then(collective).when(is_copy).then(copy)
    instructions = ops.instructions.with_columns(category.otherwise(compute).alias("category"))
    return Ops(events=ops.events, instructions=instructions)


def measured_executions(ops: Ops) -> pl.DataFrame:
    """The `executions` of ops `with_hlo` as rows of the event table: columns of OPS_SCHEMA and others.

    `count` and `n_steps` are 1. An instruction in a loop over layers may have `layers`, in the
    order of iterations; its executions in one run get them in turn. Ops without an instruction
    stay, with `is_joined` false and the reason.
    """
    turn = pl.int_range(pl.len()).over("module", "hlo_name", "host", "device", "run_id")
    n_layers = pl.col("layers").list.len().cast(pl.Int64)
    in_turn = pl.when(n_layers > 0).then(
        pl.col("layers").list.get(turn % n_layers, null_on_oob=True)
    )
    unknown = pl.lit("the HLO has no such instruction")
    return executions(ops).with_columns(
        pl.col("is_joined").fill_null(value=False),
        pl.coalesce("layer", in_turn).alias("layer"),
        pl.when("is_joined").then("axis_reason").otherwise(unknown).alias("axis_reason"),
        source=pl.lit(Source.MEASURED.value),
        count=1,
        n_steps=1,
        time_basis=pl.lit(Source.MEASURED.value),
    )


def _some(names: set[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


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
        exposed_s="dur_s", is_async=pl.lit(value=False), is_paired=pl.lit(value=True)
    )
    pairs = _pairs(events.filter(~is_single)).select(_OF_EXECUTIONS)
    rows = pl.concat([single.select(_OF_EXECUTIONS), pairs], how="vertical_relaxed")
    named = rows.join(ops.instructions.drop("text"), on="op", how="left")
    return named.sort("start_s", "device", maintain_order=True)


def _pairs(events: pl.DataFrame) -> pl.DataFrame:
    """Asynchronous executions: each start with the done after it and with its transfer.

    A transfer, if recorded, has more precise times than its pair. One without a pair has no known
    exposed time.
    """
    keyed = events.with_columns(
        pl.col("device", "core").fill_null(-1), pl.col("module").fill_null("")
    ).sort("start_s", maintain_order=True)
    is_transfer = pl.col("role") == "transfer"
    paired = _paired(keyed.filter(~is_transfer).with_row_index("row"))
    name = pl.lit("transfer ") + pl.col("op").cast(pl.String)
    transfers = (
        keyed.filter(is_transfer)
        .with_columns(pl.col("starts").fill_null(name), is_async=True, is_paired=True)
        .with_row_index("transfer_row")
    )
    times = transfers.select(
        *_PAIR, "transfer_row", at_s="start_s", transfer_start_s="start_s", transfer_dur_s="dur_s"
    )
    middles = paired.with_columns(at_s=pl.col("start_s") + pl.col("dur_s") / 2).sort("at_s")
    matched = _each_once(
        middles.join_asof(times, on="at_s", by=_PAIR, strategy="nearest", check_sortedness=False),
        "transfer_row",
    )
    has_transfer = pl.col("transfer_row").is_not_null()
    end_s = pl.max_horizontal("end_s", pl.col("start_s") + pl.col("dur_s"))
    pair_s = end_s - pl.col("start_s")
    spans = matched.with_columns(
        start_s=pl.when(has_transfer).then("transfer_start_s").otherwise("start_s"),
        dur_s=pl.when(has_transfer).then("transfer_dur_s").otherwise(pair_s),
        exposed_s=pl.col("dur_s") + pl.col("done_exposed_s").fill_null(0.0),
        is_async=True,
        is_paired=has_transfer | pl.col("end_s").is_not_null(),
    )
    used = matched["transfer_row"].drop_nulls()
    alone = transfers.filter(~pl.col("transfer_row").is_in(used.implode()))
    alone = alone.with_columns(exposed_s=pl.lit(None, pl.Float64))
    both = pl.concat([spans, alone], how="diagonal_relaxed")
    return both.with_columns(pl.when(pl.col(n) >= 0).then(n).alias(n) for n in ("device", "core"))


def _paired(halves: pl.DataFrame) -> pl.DataFrame:
    """A row per start with the end of its done, and a row per done without a start."""
    is_done = pl.col("opcode").str.ends_with("-done")
    starts = halves.filter(~is_done)
    earlier = starts.select(*_PAIR, "start_s", start_row="row")
    matched = _each_once(
        halves.filter(is_done).join_asof(earlier, on="start_s", by=_PAIR, check_sortedness=False),
        "start_row",
    )
    ends = matched.filter(pl.col("start_row").is_not_null()).select(
        "start_row",
        (pl.col("start_s") + pl.col("dur_s")).alias("end_s"),
        pl.when(pl.col("role") == "covered").then(0.0).otherwise("dur_s").alias("done_exposed_s"),
    )
    both = starts.join(ends, left_on="row", right_on="start_row", how="left")
    lone = matched.filter(pl.col("start_row").is_null()).drop("start_row")
    return pl.concat([both, lone], how="diagonal_relaxed")


def _each_once(matched: pl.DataFrame, column: str) -> pl.DataFrame:
    """Keeps each match for the first row that claims it; other rows lose it."""
    is_first = pl.int_range(pl.len()).over(column) == 0
    return matched.with_columns(pl.when(is_first).then(column).alias(column))
