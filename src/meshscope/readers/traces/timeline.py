"""The executions of a trace in the form of `events.trace_timeline`, as a run keeps them."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from meshscope.events.enums import Kind, wire_factor
from meshscope.events.trace_timeline import DISTINCT_OPS_SCHEMA, EXECUTIONS_SCHEMA
from meshscope.readers.traces.trace import Category

COPY = "copy"
# Ops of XPlanes are named `program/instruction`; no kernel has a name of this form.
_INSTRUCTION = r"^[^/\s]*/([^/\s]+)$"

Places = Mapping[str, Mapping[str, Any]]  # layer, part and shape, by the name of the op


def executions_of(events: pl.DataFrame) -> pl.DataFrame:
    """The executed ops as numbers; `events` are those of `TraceRows` with `step_number`."""
    exposed = pl.when("is_collective").then("exposed_ns").alias("exposed_ns")
    named = events.with_columns(
        pl.col("label").alias("step_class"), pl.col("step_number").alias("step"), exposed
    )
    return named.select(pl.col(name).cast(type_) for name, type_ in EXECUTIONS_SCHEMA.items())


def distinct_ops_of(ops: pl.DataFrame, places: Places) -> pl.DataFrame:
    """The facts of the distinct ops, with those that the HLO of their program adds."""
    is_copy = pl.col("category") == Category.COPY.value
    names = ops["name"].to_list()
    wires = [
        _wire_bytes(kind, payload, size)
        for kind, payload, size in ops.select("kind", "payload_bytes", "group_size").iter_rows()
    ]
    known = ops.with_columns(
        pl.when(is_copy).then(pl.lit(COPY)).otherwise(pl.coalesce("opcode", "name")).alias("opcode"),
        pl.col("name").str.extract(_INSTRUCTION).alias("hlo_name"),
        pl.col("groups").list.len().cast(pl.Int32).alias("n_groups"),
        pl.Series("wire_bytes", wires, dtype=pl.Float64),
        *(
            pl.Series(fact, [places.get(name, {}).get(fact) for name in names], dtype=DISTINCT_OPS_SCHEMA[fact])
            for fact in ("layer", "part", "shape")
        ),
    )  # fmt: skip
    return known.select(pl.col(n).cast(t) for n, t in DISTINCT_OPS_SCHEMA.items())


def _wire_bytes(kind: str | None, payload: int | None, size: int | None) -> float | None:
    if kind is None or payload is None or size is None:
        return None
    return float(payload * wire_factor(Kind(kind), size))
