"""The executions of an imported trace as its run folder stores them.

`EXECUTIONS` has a row of numbers for each op that a device executed, and `DISTINCT_OPS` a row of
facts for each distinct op, so that ten million executions need some 40 bytes each.
"""

from pathlib import Path
from typing import Any

import polars as pl

from meshscope.events.measured import StepLabel

EXECUTIONS = Path("trace") / "executions.parquet"
DISTINCT_OPS = Path("trace") / "distinct_ops.parquet"
STEP_CLASSES = tuple(label.value for label in StepLabel)

EXECUTIONS_SCHEMA: dict[str, Any] = {
    "op": pl.UInt32,  # row of the distinct ops
    "device": pl.Int32,  # position in the mesh
    "stream": pl.Int64,  # lane of the device
    "step_class": pl.UInt8,  # index in STEP_CLASSES
    "step": pl.Int32,  # index among the steps of its class on the device; null outside of steps
    "start_ns": pl.Int64,  # since the first op of the trace
    "dur_ns": pl.Int64,
    "exposed_ns": pl.Int64,  # of collectives: time not hidden by compute
}
# Facts under the names of the event table's columns; `category` is collective, compute or copy.
DISTINCT_OPS_SCHEMA: dict[str, Any] = {
    "op": pl.UInt32,
    "name": pl.String,
    "category": pl.String,
    "layer": pl.Int32,
    "part": pl.String,
    "kind": pl.String,
    "opcode": pl.String,
    "axis": pl.String,
    "axis_reason": pl.String,
    "group_size": pl.Int32,
    "n_groups": pl.Int32,
    "groups": pl.List(pl.List(pl.Int32)),
    "dtype": pl.String,
    "shape": pl.List(pl.Int64),
    "payload_bytes": pl.Int64,
    "wire_bytes": pl.Float64,
    "hlo_name": pl.String,
}
