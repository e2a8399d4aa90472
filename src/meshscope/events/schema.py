"""Schema of the event table: type, unit and meaning of every column.

Compute, copies and idle spans are rows of the same table with null collective columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from meshscope.errors import RunError
from meshscope.events.collective import Collective

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the event table."""

    name: str
    dtype: Any  # a polars data type
    unit: str = ""
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column(name="source", dtype=pl.String, meaning="predicted, compiled or measured"),
    Column(
        name="phase", dtype=pl.String, meaning="prefill, decode, or step: a program that is neither"
    ),
    Column(name="layer", dtype=pl.Int32, meaning="layer index; null outside layers"),
    Column(
        name="part", dtype=pl.String, meaning="part of the model: embed, attn, mlp, lm_head, ..."
    ),
    Column(name="kind", dtype=pl.String, meaning="kind of collective: all_reduce, all_gather, ..."),
    Column(name="opcode", dtype=pl.String, meaning="name used by the compiler or library"),
    Column(name="axis", dtype=pl.String, meaning="plan axis; several axes are joined by +"),
    Column(
        name="axis_reason",
        dtype=pl.String,
        meaning="why axis, phase or part is null, or how groups are parts of the axis",
    ),
    Column(
        name="parallelism",
        dtype=pl.String,
        meaning="tp, sp, pp, dp, cp, ep or fsdp, whichever causes the traffic; null if axis is null or of no plan",
    ),
    Column(name="group_size", dtype=pl.Int32, unit="devices", meaning="devices per group"),
    Column(
        name="n_groups",
        dtype=pl.Int32,
        unit="groups",
        meaning="groups that run the operation concurrently",
    ),
    Column(
        name="groups",
        dtype=pl.List(pl.List(pl.Int32)),
        unit="device ids",
        meaning="row-major mesh positions; (source, target) pairs for point to point",
    ),
    Column(name="dtype", dtype=pl.String, meaning="dtype of the payload"),
    Column(
        name="shape",
        dtype=pl.List(pl.Int64),
        unit="elements",
        meaning="payload shape as written in the program",
    ),
    Column(
        name="payload_bytes",
        dtype=pl.Int64,
        unit="bytes",
        meaning="size of the logical array, as in nccl-tests (all-gather: output; reduce-scatter: input)",
    ),
    Column(
        name="wire_bytes",
        dtype=pl.Float64,
        unit="bytes",
        meaning="bytes one device sends, given the opcode (nccl-tests bus bandwidth factors)",
    ),
    Column(
        name="stage",
        dtype=pl.Int32,
        meaning="pipeline stage; null without a pipeline or if all stages take part",
    ),
    Column(
        name="count",
        dtype=pl.Int32,
        unit="times",
        meaning="executions on one device per step of the phase",
    ),
    Column(
        name="n_steps", dtype=pl.Int32, unit="steps", meaning="steps of the phase in the request"
    ),
    Column(name="is_async", dtype=pl.Boolean, meaning="issued as a start/done pair"),
    Column(
        name="algorithm", dtype=pl.String, meaning="emitter and strategy chosen by the compiler"
    ),
    Column(
        name="inserted_by", dtype=pl.String, meaning="program, partitioner or rematerialization"
    ),
    Column(
        name="crosses_slices", dtype=pl.Boolean, meaning="whether a group spans slices and uses DCN"
    ),
    Column(
        name="start_s",
        dtype=pl.Float64,
        unit="s",
        meaning="start time relative to the start of the step or trace",
    ),
    Column(name="dur_s", dtype=pl.Float64, unit="s", meaning="duration"),
    Column(
        name="exposed_s",
        dtype=pl.Float64,
        unit="s",
        meaning="part of the duration not hidden by compute",
    ),
    Column(name="time_basis", dtype=pl.String, meaning="source of the times"),
    Column(name="device", dtype=pl.Int32, unit="device id", meaning="device that ran the event"),
    Column(name="hlo_name", dtype=pl.String, meaning="instruction name in the HLO text"),
    Column(
        name="hlo_shape",
        dtype=pl.String,
        meaning="shape of the instruction, if different from the payload shape",
    ),
    Column(name="source_line", dtype=pl.String, meaning="file:line in the program"),
)

POLARS_SCHEMA: dict[str, Any] = {c.name: c.dtype for c in COLUMNS}


def table_of(rows: Iterable[Collective]) -> pl.DataFrame:
    """The collectives as an event table with all columns in schema order."""
    records = [_record(row) for row in rows]
    return pl.DataFrame(records, schema=POLARS_SCHEMA, orient="row")


def _record(row: Collective) -> tuple[Any, ...]:
    values: dict[str, Any] = {
        name: getattr(row, name) for name in Collective.__slots__ if name in POLARS_SCHEMA
    }
    values["n_groups"] = row.n_groups
    values["groups"] = [list(g) for g in row.groups]
    values["shape"] = None if row.shape is None else list(row.shape)
    values["wire_bytes"] = None if row.wire_bytes is None else float(row.wire_bytes)
    return tuple(values.get(name) for name in POLARS_SCHEMA)


def checked_table(frame: pl.DataFrame, origin: str) -> pl.DataFrame:
    """Return `frame` if it has exactly this schema, else raise RunError.

    The parallelism of a table of an older version is null.
    """
    if "parallelism" not in frame.columns:
        frame = frame.with_columns(pl.lit(None, pl.String).alias("parallelism"))
    if dict(frame.schema) != dict(pl.Schema(POLARS_SCHEMA)):
        missing = sorted(set(POLARS_SCHEMA) - set(frame.columns))
        unknown = sorted(set(frame.columns) - set(POLARS_SCHEMA))
        raise RunError(
            f"{origin}: not an event table of schema {SCHEMA_VERSION} "
            f"(missing columns {missing}, unknown columns {unknown}). "
            "Rebuild the run with the command in its manifest.json, with --force."
        )
    return frame.select(*POLARS_SCHEMA)
