"""Joins measured ops to the HLO instructions of the programs that ran: rows of the event table.

The caller passes the facts of the HLO by (module, instruction name). They take precedence over the
facts in the profile, which fill the rest.
"""

from collections.abc import Mapping
from typing import Any

import polars as pl

from meshscope.errors import TraceError
from meshscope.events.enums import Kind, Source, wire_factor
from meshscope.events.schema import POLARS_SCHEMA
from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.hlo_line import CONTAINERS
from meshscope.readers.profile.ops import ROLES, Ops

Instructions = Mapping[tuple[str, str], Mapping[str, Any]] | pl.DataFrame

KEYS = ("module", "hlo_name")
# Facts of an instruction that are not columns of the event table.
EXTRA_FACTS: dict[str, Any] = {"layers": pl.List(pl.Int32), "starts": pl.String}
# Columns after those of the event table, for metrics over runs, steps and devices.
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


def join_hlo(ops: Ops, instructions: Instructions) -> pl.DataFrame:
    """One row per execution of an op on a device: the event table, then EXTRA_SCHEMA.

    `count` and `n_steps` are 1. An instruction in a loop over layers may have `layers`, in the
    order of iterations; its executions in one run get them in turn. Ops without an instruction
    stay, with `is_joined` false and the reason. TraceError if profile and instructions have no
    module in common.
    """
    facts = _facts_frame(instructions)
    _check_modules(ops, facts)
    rows = executions(with_hlo(ops, facts))
    rows = _with_layers(_with_groups(_with_other_facts(rows, facts)))
    rows = rows.with_columns(pl.col("is_joined").fill_null(value=False))
    filled = rows.with_columns(
        pl.lit(Source.MEASURED.value).alias("source"),
        pl.lit(1).alias("count"),
        pl.lit(1).alias("n_steps"),
        pl.lit(TIME_BASIS).alias("time_basis"),
        _reason(rows).alias("axis_reason"),
    )
    return _in_schema(filled, {**POLARS_SCHEMA, **EXTRA_SCHEMA})


def with_hlo(ops: Ops, instructions: Instructions) -> Ops:
    """The ops with the facts of the HLO instead of those of the profile.

    Ops that the HLO calls `while`, `call` or `conditional` become containers.
    """
    facts = _facts_frame(instructions)
    shared = [n for n in facts.columns if n in ops.instructions.columns and n not in KEYS]
    joined = ops.instructions.join(
        facts.select(*KEYS, *shared),
        on=list(KEYS),
        how="left",
        suffix="_hlo",
        maintain_order="left",
    )
    merged = joined.with_columns(pl.coalesce(f"{n}_hlo", n).alias(n) for n in shared)
    merged = merged.select(ops.instructions.columns)
    containers = merged.filter(pl.col("opcode").is_in(list(CONTAINERS)))["op"]
    is_container = pl.col("op").is_in(containers.implode()) & (pl.col("role") == "leaf")
    role = pl.when(is_container).then(pl.lit("container", ROLES)).otherwise("role")
    return Ops(events=ops.events.with_columns(role.alias("role")), instructions=merged)


def _facts_frame(instructions: Instructions) -> pl.DataFrame:
    """One row per (module, hlo_name), with columns of the event table and EXTRA_FACTS."""
    schema = {**POLARS_SCHEMA, **EXTRA_FACTS, "module": pl.String}
    if isinstance(instructions, pl.DataFrame):
        frame = instructions
    else:
        records = [
            {"module": module, "hlo_name": name, **facts}
            for (module, name), facts in instructions.items()
        ]
        names = {name for record in records for name in record} | set(KEYS)
        frame = pl.DataFrame(records, schema={n: t for n, t in schema.items() if n in names})
    known = frame.select(pl.col(n).cast(schema[n]) for n in frame.columns if n in schema)
    return known.unique(list(KEYS), keep="first", maintain_order=True)


def _check_modules(ops: Ops, facts: pl.DataFrame) -> None:
    measured = set(ops.instructions["module"].drop_nulls())
    given = set(facts["module"])
    if measured and given and not measured & given:
        raise TraceError(
            f"profile and HLO are of different programs: the profile ran {_some(measured)}, the HLO "
            f"is of {_some(given)}. Pass the HLO of the run that was profiled."
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _with_other_facts(rows: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    in_ops = {
        "opcode",
        "kind",
        "dtype",
        "shape",
        "payload_bytes",
        "groups",
        "source_line",
        "starts",
    }
    timed = {"start_s", "dur_s", "exposed_s", "is_async", "time_basis", "device", "source"}
    kept = [n for n in facts.columns if n not in in_ops | timed]
    other = facts.select(kept).with_columns(pl.lit(value=True).alias("is_joined"))
    joined = rows.join(other, on=list(KEYS), how="left", suffix="_hlo", maintain_order="left")
    both = [
        n for n in kept if f"{n}_hlo" in joined
    ]  # phase, which also comes from the steps of the profile
    return joined.with_columns(pl.coalesce(f"{n}_hlo", n).alias(n) for n in both)


def _with_groups(rows: pl.DataFrame) -> pl.DataFrame:
    for name in ("group_size", "n_groups", "wire_bytes", "phase"):
        if name not in rows:
            rows = rows.with_columns(pl.lit(None, POLARS_SCHEMA[name]).alias(name))
    sized = rows.with_columns(
        pl.col("group_size").fill_null(pl.col("groups").list.first().list.len().cast(pl.Int32)),
        pl.col("n_groups").fill_null(pl.col("groups").list.len().cast(pl.Int32)),
    )
    pairs = sized.select("kind", "group_size").unique().drop_nulls()
    factors = pairs.with_columns(
        pl.Series(
            "factor",
            [float(wire_factor(Kind(kind), size)) for kind, size in pairs.iter_rows()],
            dtype=pl.Float64,
        )
    )
    wired = sized.join(factors, on=["kind", "group_size"], how="left", maintain_order="left")
    return wired.with_columns(
        pl.col("wire_bytes").fill_null(pl.col("payload_bytes") * pl.col("factor"))
    )


def _with_layers(rows: pl.DataFrame) -> pl.DataFrame:
    """Assigns layers to the executions of one instruction in one run, in order of iteration."""
    if "layers" not in rows:
        return rows
    turn = pl.int_range(pl.len()).over("module", "hlo_name", "host", "device", "run_id")
    n_layers = pl.col("layers").list.len()
    in_turn = pl.when(n_layers > 0).then(
        pl.col("layers").list.get(turn % n_layers.cast(pl.Int64), null_on_oob=True)
    )
    layer = pl.coalesce("layer", in_turn) if "layer" in rows else in_turn
    return rows.with_columns(layer.cast(pl.Int32).alias("layer"))


def _reason(rows: pl.DataFrame) -> pl.Expr:
    reason = pl.col("axis_reason") if "axis_reason" in rows else pl.lit(None, pl.String)
    missing = pl.lit("the HLO has no such instruction")
    return pl.when(pl.col("is_joined")).then(reason).otherwise(missing)


def _in_schema(rows: pl.DataFrame, schema: Mapping[str, Any]) -> pl.DataFrame:
    return rows.select(
        (pl.col(name) if name in rows else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )
