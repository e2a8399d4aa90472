"""A trace in columns: the schema that all readers of traces fill."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.hardware.chips import ChipKind


class TraceFormat(StrEnum):
    """The format of a file, by its content."""

    KINETO = "kineto"
    CHROME_TPU = "chrome trace of the TPU profiler"
    NSYS = "nsys sqlite"
    XPLANE = "xplane"
    HLO = "hlo text"
    SERVING_BENCHMARK = "serving benchmark json"


class Category(StrEnum):
    """What an op does for the step."""

    COLLECTIVE = "collective"
    COMPUTE = "compute"
    COPY = "copy"


EVENTS_SCHEMA: dict[str, Any] = {
    "op": pl.UInt32,  # row of the ops
    "device": pl.Int32,  # global rank, or number of the device on its host
    "stream": pl.Int64,  # lane of the device
    "start_ns": pl.Int64,  # since the trace's origin
    "dur_ns": pl.Int64,
    "step": pl.Int32,  # row of the steps; null outside of steps
}
OPS_SCHEMA: dict[str, Any] = {
    "op": pl.UInt32,
    "name": pl.String,
    "category": pl.String,  # of Category
    "kind": pl.String,  # of collectives
    "opcode": pl.String,  # the library's name of the collective
    "group": pl.List(pl.Int32),  # global ranks; null if unknown
    "groups": pl.List(pl.List(pl.Int32)),  # all groups of the op, if the trace has them
    "group_size": pl.Int32,
    "group_name": pl.String,  # description of the process group
    "dtype": pl.String,
    "payload_bytes": pl.Int64,  # by the size rule of nccl-tests; null if unknown
}
STEPS_SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "device": pl.Int32,
    "name": pl.String,
    "kind": pl.String,  # of StepKind; null if the annotation does not say
    "prefill_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "start_ns": pl.Int64,  # the annotation may be on the host
    "dur_ns": pl.Int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A communicator as the trace lists it; ranks are None if it does not."""

    name: str
    description: str | None
    ranks: tuple[int, ...] | None
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of one file. `origin_unix_ns` is the time at which its clock shows 0, if known.

    Without a `rank`, the devices of `events` are numbers on the host, of which the file lists
    `n_local`, with ops or not.
    """

    path: Path
    format: TraceFormat
    events: pl.DataFrame
    ops: pl.DataFrame
    steps: pl.DataFrame
    n_events: int  # in the file, on host and devices
    contents: str = ""  # what the file has, in words, if that is no op of a device
    rank: int | None = None
    world_size: int | None = None
    n_local: int | None = None
    device_name: str | None = None  # as the profiler calls the chip
    chip_kind: ChipKind | None = None
    origin_unix_ns: int | None = None
    groups: tuple[ProcessGroup, ...] = ()
    findings: tuple[str, ...] = field(default=())
    programs: Mapping[str, str] = field(default_factory=dict[str, str])  # HLO text by name


def empty(schema: dict[str, Any]) -> pl.DataFrame:
    """A table of this schema without rows."""
    return pl.DataFrame(schema=schema)
