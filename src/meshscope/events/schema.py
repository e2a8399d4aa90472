"""Schema of the event table: type, unit and meaning of every column.

Compute, copies and idle spans are rows of the same table with null collective columns.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import polars as pl

from meshscope.errors import RunError
from meshscope.events.collective import Collective

SCHEMA_VERSION = 1


class Column(NamedTuple):
    """A column of the event table."""

    name: str
    dtype: Any  # a polars data type
    unit: str
    meaning: str


COLUMNS = (
    Column("source", pl.String, "", "predicted, compiled or measured"),
    Column("phase", pl.String, "", "prefill, decode, or step: a program that is neither"),
    Column("layer", pl.Int32, "", "layer index; null outside layers"),
    Column("part", pl.String, "", "part of the model: embed, attn, mlp, lm_head, ..."),
    Column("kind", pl.String, "", "kind of collective: all_reduce, all_gather, ..."),
    Column("opcode", pl.String, "", "name used by the compiler or library"),
    Column("axis", pl.String, "", "plan axis; several axes are joined by +"),
    Column(
        "axis_reason",
        pl.String,
        "",
        "why axis, phase or part is null, or how groups are parts of the axis",
    ),
    Column(
        "parallelism",
        pl.String,
        "",
        "tp, sp, pp, dp, cp, ep or fsdp, whichever causes the traffic; null if axis is null or of no plan",
    ),
    Column("group_size", pl.Int32, "devices", "devices per group"),
    Column("n_groups", pl.Int32, "groups", "groups that run the operation concurrently"),
    Column(
        "groups",
        pl.List(pl.List(pl.Int32)),
        "device ids",
        "row-major mesh positions; (source, target) pairs for point to point",
    ),
    Column("dtype", pl.String, "", "dtype of the payload"),
    Column("shape", pl.List(pl.Int64), "elements", "payload shape as written in the program"),
    Column(
        "payload_bytes",
        pl.Int64,
        "bytes",
        "size of the logical array, as in nccl-tests (all-gather: output; reduce-scatter: input)",
    ),
    Column(
        "wire_bytes",
        pl.Float64,
        "bytes",
        "bytes one device sends, given the opcode (nccl-tests bus bandwidth factors)",
    ),
    Column(
        "stage", pl.Int32, "", "pipeline stage; null without a pipeline or if all stages take part"
    ),
    Column("count", pl.Int32, "times", "executions on one device per step of the phase"),
    Column("n_steps", pl.Int32, "steps", "steps of the phase in the request"),
    Column("is_async", pl.Boolean, "", "issued as a start/done pair"),
    Column("algorithm", pl.String, "", "emitter and strategy chosen by the compiler"),
    Column("inserted_by", pl.String, "", "program, partitioner or rematerialization"),
    Column("crosses_slices", pl.Boolean, "", "whether a group spans slices and uses DCN"),
    Column("start_s", pl.Float64, "s", "start time relative to the start of the step or trace"),
    Column("dur_s", pl.Float64, "s", "duration"),
    Column("exposed_s", pl.Float64, "s", "part of the duration not hidden by compute"),
    Column("time_basis", pl.String, "", "source of the times"),
    Column("device", pl.Int32, "device id", "device that ran the event"),
    Column("hlo_name", pl.String, "", "instruction name in the HLO text"),
    Column(
        "hlo_shape", pl.String, "", "shape of the instruction, if different from the payload shape"
    ),
    Column("source_line", pl.String, "", "file:line in the program"),
)

POLARS_SCHEMA: dict[str, Any] = {c.name: c.dtype for c in COLUMNS}


def table_of(rows: Iterable[Collective]) -> pl.DataFrame:
    """The collectives as an event table with all columns in schema order; they have no device."""
    listed = list(rows)
    columns = {name: [getattr(row, name, None) for row in listed] for name in POLARS_SCHEMA}
    columns["wire_bytes"] = [None if b is None else float(b) for b in columns["wire_bytes"]]
    return pl.DataFrame(columns, schema=POLARS_SCHEMA)


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
