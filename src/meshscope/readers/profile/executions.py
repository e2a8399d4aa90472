"""Executions of instructions: asynchronous halves merged, joined with the HLO of the programs that ran.

An op counts once, however many events it left. Containers are dropped, because their time is that
of the ops inside them. The facts of the HLO, by (module, instruction name), take precedence over
the facts in the profile, which fill the rest.

A late participant keeps the others waiting inside the collective. So the shortest duration of all
participants is the transfer time (`wire_s`), and what a device spends beyond it is waiting. If
even the last participant waits, for a link in use, that time counts as transfer.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.events.enums import Kind, Source, wire_factor
from meshscope.events.intervals import CoveredTime
from meshscope.events.schema import POLARS_SCHEMA
from meshscope.readers.profile.ops import CONTAINERS, ROLES, Ops, in_schema, own_groups

Instructions = Mapping[tuple[str, str], Mapping[str, Any]]  # facts by module and name

KEYS = ("module", "hlo_name")
# Facts of an instruction that are not columns of the event table.
EXTRA_FACTS: dict[str, Any] = {"layers": pl.List(pl.Int32), "starts": pl.String}
# Columns after the event table's, for metrics over runs, steps and devices.
EXTRA_SCHEMA: dict[str, Any] = {
    "module": pl.String,
    "run_id": pl.Int64,
    "step": pl.Int64,
    "host": pl.UInt16,
    "core": pl.Int8,
    "line": pl.UInt32,
    "is_paired": pl.Boolean,
    "is_joined": pl.Boolean,
}
TIME_BASIS = "measured"


def with_hlo(ops: Ops, instructions: Instructions) -> Ops:
    """The ops with facts from the HLO instead of the profile.

    Ops that the HLO calls `while`, `call` or `conditional` become containers.
    """
    facts = _facts_frame(instructions)
    shared = [name for name in ops.instructions.columns if name in facts.columns]
    merged = _joined(ops.instructions, facts.select(shared)).select(ops.instructions.columns)
    containers = merged.filter(pl.col("opcode").is_in(list(CONTAINERS)))["op"]
    is_container = pl.col("op").is_in(containers.implode()) & (pl.col("role") == "leaf")
    role = pl.when(is_container).then(pl.lit("container", ROLES)).otherwise("role")
    return Ops(events=ops.events.with_columns(role.alias("role")), instructions=merged)


def join_hlo(ops: Ops, instructions: Instructions) -> pl.DataFrame:
    """One row per execution of an op on a device: the event table, then EXTRA_SCHEMA.

    `count` and `n_steps` are 1. An instruction in a loop over layers may have `layers`, in the
    order of iterations; its executions in one run get them in turn. Ops without an instruction
    stay, with `is_joined` false and the reason. TraceError if profile and instructions have no
    module in common.
    """
    facts = _facts_frame(instructions)
    measured, given = set(ops.instructions["module"].drop_nulls()), set(facts["module"])
    if measured and given and not measured & given:
        raise TraceError(
            f"profile and HLO are of different programs: the profile ran {_some(measured)}, the HLO "
            f"is of {_some(given)}. Pass the HLO of the run that was profiled."
        )
    runs = executions(with_hlo(ops, instructions))
    names = [n for n in facts.columns if n not in runs.columns or n in {*KEYS, "phase"}]
    rows = _joined(runs, facts.select(*names, pl.lit(value=True).alias("is_joined")))
    unknown = pl.lit("the HLO has no such instruction")
    turn = pl.int_range(pl.len()).over("module", "hlo_name", "host", "device", "run_id")
    n_layers = pl.col("layers").list.len().cast(pl.Int64)
    in_turn = pl.when(n_layers > 0).then(
        pl.col("layers").list.get(turn % n_layers, null_on_oob=True)
    )
    rows = rows.with_columns(
        pl.col("is_joined").fill_null(value=False),
        pl.col("group_size").fill_null(pl.col("groups").list.first().list.len().cast(pl.Int32)),
        pl.col("n_groups").fill_null(pl.col("groups").list.len().cast(pl.Int32)),
        pl.coalesce("layer", in_turn).alias("layer"),
        pl.when("is_joined").then("axis_reason").otherwise(unknown).alias("axis_reason"),
        source=pl.lit(Source.MEASURED.value),
        count=1,
        n_steps=1,
        time_basis=pl.lit(TIME_BASIS),
    )
    pairs = rows.select("kind", "group_size").unique().drop_nulls()
    factors = [float(wire_factor(Kind(kind), size)) for kind, size in pairs.iter_rows()]
    factor_of = pairs.with_columns(pl.Series("factor", factors, dtype=pl.Float64))
    wired = rows.join(factor_of, on=["kind", "group_size"], how="left", maintain_order="left")
    wire_bytes = pl.col("wire_bytes").fill_null(pl.col("payload_bytes") * pl.col("factor"))
    return in_schema(wired.with_columns(wire_bytes), {**POLARS_SCHEMA, **EXTRA_SCHEMA})


def _facts_frame(instructions: Instructions) -> pl.DataFrame:
    records = [
        {"module": module, "hlo_name": name, **facts}
        for (module, name), facts in instructions.items()
    ]
    return pl.DataFrame(records, schema={"module": pl.String, **POLARS_SCHEMA, **EXTRA_FACTS})


def _joined(rows: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """The rows with the facts of their instruction, which replace what is known under the same name."""
    joined = rows.join(facts, on=list(KEYS), how="left", suffix="_hlo", maintain_order="left")
    both = [name for name in facts.columns if f"{name}_hlo" in joined]
    replaced = joined.with_columns(pl.coalesce(f"{name}_hlo", name).alias(name) for name in both)
    return replaced.drop(f"{name}_hlo" for name in both)


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
    columns = [*ops.events.columns, "exposed_s", "is_async", "is_paired"]
    pairs = _pairs(events.filter(~is_single)).select(columns)
    rows = pl.concat([single.select(columns), pairs], how="vertical_relaxed")
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


PS_PER_S = 1e12


def participants(rows: pl.DataFrame) -> pl.DataFrame:
    """The measured collectives, with the waiting time of each device; `rows` as of `join_hlo`.

    `group` has device ids; null if groups are unknown, then all devices that ran it take part.
    `occurrence` is how often the device ran it before, `wire_s` the duration on the fastest
    participant, `wait_s` the rest of the device's duration; null if no other participant was
    recorded or the device is unknown.
    """
    runs = rows.filter(pl.col("kind").is_not_null()).sort("start_s", maintain_order=True)
    is_pairs = pl.col("kind").is_in([Kind.PERMUTE.value, Kind.SEND.value, Kind.RECV.value])
    numbered = runs.with_row_index("row")
    group_of = own_groups(numbered.filter(~is_pairs), "row")  # null for pairs, which form chains
    keyed = numbered.join(group_of, on="row", how="left", maintain_order="left").with_columns(
        pl.int_range(pl.len()).over("module", "hlo_name", "device", "core").alias("occurrence"),
        group_key=pl.col("group").cast(pl.List(pl.String)).list.join(",").fill_null(""),
    )
    collective = ["module", "hlo_name", "occurrence", "group_key"]
    wire_s, n_participants = pl.col("dur_s").min().over(collective), pl.len().over(collective)
    is_alone = (n_participants == 1) & (pl.col("group_size") > 1).fill_null(value=False)
    is_known = ~is_alone & pl.col("device").is_not_null()
    wait_s = pl.when(is_known).then(pl.col("dur_s") - wire_s)
    return keyed.with_columns(wire_s=wire_s, wait_s=wait_s).drop("row", "group_key")


def loads(rows: pl.DataFrame) -> pl.DataFrame:
    """Busy, collective, waiting and idle time of each device, from the first start to the last end on any.

    Times are in s. `busy_s` is the time in which at least one op runs, `collective_s` the time in
    which a collective runs, `wait_s` the waiting part of collectives. Background transfers and
    SparseCores do not count.
    """
    end_s = (pl.col("start_s") + pl.col("dur_s")).max().alias("end_s")
    begin_s, end_s = rows.select(pl.col("start_s").min(), end_s).fill_null(0.0).row(0)
    is_known = pl.col("wait_s").is_not_null().any()
    waits = (
        participants(rows).group_by("device").agg(pl.when(is_known).then(pl.col("wait_s").sum()))
    )
    records: list[dict[str, Any]] = []
    for of_device in rows.partition_by("device", maintain_order=False):
        blocking = of_device.filter(pl.col("exposed_s").is_not_null(), pl.col("core").is_null())
        collectives = blocking.filter(pl.col("kind").is_not_null())
        busy_s, collective_s = (_covered_s(o, begin_s, end_s) for o in (blocking, collectives))
        record = {"device": of_device["device"][0], "n_ops": len(of_device)}
        record |= {"busy_s": busy_s, "collective_s": collective_s, "window_s": end_s - begin_s}
        records.append({**record, "idle_s": end_s - begin_s - busy_s})
    schema: dict[str, Any] = {"device": pl.Int32, "n_ops": pl.UInt32}
    schema |= dict.fromkeys(("busy_s", "collective_s", "idle_s", "window_s"), pl.Float64)
    table = pl.DataFrame(records, schema=schema)
    return table.join(waits, on="device", how="left", nulls_equal=True).sort("device")


def _covered_s(rows: pl.DataFrame, begin_s: float, end_s: float) -> float:
    """Length of the union of blocking times in s; a pair blocks at its end, not in between."""
    dur, exposed = rows["dur_s"].to_numpy(), rows["exposed_s"].to_numpy()
    start = rows["start_s"].to_numpy()
    blocked = np.minimum(exposed, dur)
    first = np.where(rows["is_async"].to_numpy(), start + dur - blocked, start)
    bounds = np.clip(np.stack([first, start + dur]), begin_s, end_s)
    ps = np.rint((bounds - begin_s) * PS_PER_S).astype(np.int64)
    return CoveredTime.of(ps[0], ps[1]).total() / PS_PER_S
