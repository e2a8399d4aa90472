"""Reads SQLite files that `nsys export --type sqlite` writes: kernels, copies and NVTX ranges.

Tables and columns are those of NVIDIA's documentation of the export (Nsight Systems User Guide,
"SQLite Schema Reference"). A file may hold several processes and GPUs of a host: each process is a
rank, or each of its GPUs if its kernels run on several. Kernels carry no sizes, so the bytes of
collectives are unknown, except where NCCL's NVTX ranges tell the kind.
"""

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.hardware.chips import ChipKind
from meshscope.readers.profile.nesting import Ints, innermost
from meshscope.readers.traces.annotations import StepMark, distinct_steps, read_annotation
from meshscope.readers.traces.collectives import kernel_collective, short_name
from meshscope.readers.traces.trace import (
    MAX_NS,
    MAX_OPS,
    OPS_SCHEMA,
    Category,
    Trace,
    TraceFormat,
    events_table,
    left_out,
    steps_table,
)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
STRINGS = "StringIds"
GPUS = "TARGET_INFO_GPU"
ROWS_AT_ONCE = 500_000
MAX_RANGES = 1_000_000
MAX_DEVICE = 1 << 16


def read_nsys(path: Path) -> Trace:
    """The trace of all GPUs in the file; TraceError if a table of kernels is missing or damaged."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda data: data.decode("utf-8", errors="replace")
            return _trace(path, database)
    except (sqlite3.Error, pl.exceptions.PolarsError, OverflowError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: cannot be read as SQLite of nsys: {str(error)[:200]}. Export the report again with "
            "`nsys export --type sqlite`."
        ) from error


def _trace(path: Path, database: sqlite3.Connection) -> Trace:
    tables = {name for (name,) in database.execute("select name from sqlite_master")}
    if any(table.startswith("rocpd") for table in tables):
        raise TraceError(
            f"{path}: this is a database of rocprofv3 (rocpd). Record with the PyTorch profiler, or with "
            "jax.profiler.trace: meshscope reads their traces on ROCm."
        )
    if KERNELS not in tables or STRINGS not in tables:
        missing = next(name for name in (KERNELS, STRINGS) if name not in tables)
        raise TraceError(
            f"{path}: has no table {missing}: no kernel was traced, or the file is of another tool. "
            "Record with `nsys profile --trace=cuda,nvtx` and export again."
        )
    kernels = _kernels(database)
    copies = [_copies(database, table, word) for table, word in COPIES.items() if table in tables]
    frame = _ranked(pl.concat([kernels, *copies]))
    names = frame["name"].unique(maintain_order=True)
    marks = list(_marks(database)) if RANGES in tables else []
    at_ns = _launch_ns(database, frame) if LAUNCHES in tables else frame["start"].to_numpy()
    steps, step = _steps(marks, frame["process"].to_numpy(), at_ns)
    read = [KERNELS, *(table for table in COPIES if table in tables)]
    n_other = sum(_count(database, table) for table in read) - len(frame)
    codes = pl.DataFrame({"name": names}).with_row_index("op")
    ops = frame.join(codes, on="name", maintain_order="left")
    events, n_invalid, n_repeated = events_table(
        {
            "op": ops["op"].to_numpy(),
            "device": ops["rank"].to_numpy(),
            "stream": ops["stream"].to_numpy(),
            "start_ns": ops["start"].to_numpy(),
            "dur_ns": (ops["end"] - ops["start"]).to_numpy(),
            "step": step,
        }
    )
    return Trace(
        path=path,
        format=TraceFormat.NSYS,
        events=events,
        ops=pl.DataFrame([_facts(op, name) for op, name in enumerate(names)], schema=OPS_SCHEMA),
        steps=steps,
        n_events=len(frame) + len(marks),
        contents=f"{_count(database, KERNELS):,} rows in {KERNELS}",
        device_name=_device_name(database) if GPUS in tables else None,
        chip_kind=ChipKind.GPU,
        findings=tuple(
            left_out(n_unreadable=0, n_invalid=n_invalid + n_other, n_repeated=n_repeated)
        ),
    )


# SQLite stores any type in any column.
_WHOLE = "typeof(start) = 'integer' and typeof(end) = 'integer' and typeof(deviceId) = 'integer'"
_FRAME: dict[str, Any] = {
    "name": pl.String,
    "start": pl.Int64,
    "end": pl.Int64,
    "device": pl.Int32,
    "stream": pl.Int64,
    "correlation": pl.Int64,
    "process": pl.Int64,
}


def _process(columns: Collection[str]) -> str:
    """The process of a row, with its host: thread and process ids have the number of the thread last."""
    known = next((name for name in ("globalPid", "globalTid") if name in columns), None)
    return "0" if known is None else f"{known} >> 24"


def _rows(database: sqlite3.Connection, query: str, schema: Mapping[str, Any]) -> pl.DataFrame:
    """The answer of a query, in columns; -1 for numbers that are none or too large."""
    names, kinds = list(schema), list(schema.values())
    largest = [MAX_DEVICE if kind == pl.Int32 else MAX_NS for kind in kinds]
    columns = [
        f'"{name}"'
        if kind == pl.String
        else f"case when typeof(\"{name}\") = 'integer' and "
        f'"{name}" between 0 and {limit} then "{name}" else -1 end'
        for name, kind, limit in zip(names, kinds, largest, strict=True)
    ]
    given = ", ".join(f'"{name}"' for name in names)
    checked = f"with given({given}) as ({query}) select {', '.join(columns)} from given"
    cursor = database.execute(checked)
    parts = [pl.DataFrame(schema=dict(schema))]
    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        parts.append(pl.DataFrame(rows, schema=dict(schema), orient="row", strict=False))
    return pl.concat(parts)


def _count(database: sqlite3.Connection, table: str) -> int:
    return database.execute(f"select count(*) from {table}").fetchone()[0]


def _columns_of(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"pragma table_info({table})")}


def _kernels(database: sqlite3.Connection) -> pl.DataFrame:
    """Names are demangled where the export has them: templates tell dtype and devices."""
    columns = _columns_of(database, KERNELS)
    name = "demangledName" if "demangledName" in columns else "shortName"
    codes = _rows(
        database,
        f"select {name}, start, end, deviceId, streamId, correlationId, {_process(columns)} "
        f"from {KERNELS} where {_WHOLE}",
        {**_FRAME, "name": pl.Int64},
    )
    used = codes["name"].unique()
    if len(used) > MAX_OPS:
        raise TraceError(
            f"{KERNELS} has more than {MAX_OPS:,} distinct kernels. The file is damaged."
        )
    texts = _rows(
        database,
        f"select id, value from {STRINGS} where id in (select distinct {name} from {KERNELS})",
        {"name": pl.Int64, "text": pl.String},
    ).unique("name")
    joined = codes.join(texts, on="name", how="left", maintain_order="left")
    return joined.select(
        pl.col("text").fill_null("(kernel without a name)").alias("name"), *list(_FRAME)[1:]
    )


def _copies(database: sqlite3.Connection, table: str, word: str) -> pl.DataFrame:
    process = _process(_columns_of(database, table))
    query = (
        f"select '{word}', start, end, deviceId, streamId, correlationId, {process} "
        f"from {table} where {_WHOLE}"
    )
    return _rows(database, query, _FRAME)


def _ranked(frame: pl.DataFrame) -> pl.DataFrame:
    """The ops with the number of their rank, in the order of devices, then of processes.

    Copies to other GPUs than those that run kernels are of the process's first GPU.
    """
    is_kernel = ~pl.col("name").is_in(list(COPIES.values()))
    places = frame.filter(is_kernel).select("process", "device").unique()
    places = (places if len(places) else frame.select("process", "device").unique()).sort(
        "device", "process"
    )
    ranks = places.with_columns(pl.int_range(pl.len(), dtype=pl.Int32).alias("rank"))
    first = ranks.group_by("process").agg(pl.col("rank").min().alias("first"))
    joined = frame.join(ranks, on=["process", "device"], how="left", maintain_order="left")
    joined = joined.join(first, on="process", how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("rank", "first", pl.lit(0)).alias("rank"))


def _marks(database: sqlite3.Connection) -> Iterator[tuple[int, StepMark]]:
    columns = _columns_of(database, RANGES)
    text = "text"
    if "textId" in columns:
        text = f"coalesce(text, (select value from {STRINGS} where id = textId))"
    thread = "globalTid" if "globalTid" in columns else "0"
    query = (
        f"select {_process(columns)}, {thread}, {text}, start, end from {RANGES} "
        f"where end is not null limit {MAX_RANGES}"
    )
    for process, tid, name, start, end in database.execute(query):
        is_step = isinstance(name, str) and read_annotation(name) is not None
        if is_step and isinstance(start, int) and isinstance(end, int) and end >= start:
            yield process or 0, StepMark(name, start, end - start, tid)


def _launch_ns(database: sqlite3.Connection, frame: pl.DataFrame) -> Ints:
    """When each op was launched; its own start if the launch is not recorded."""
    schema = {"correlation": pl.Int64, "process": pl.Int64, "at": pl.Int64}
    process = _process(_columns_of(database, LAUNCHES))
    launches = _rows(database, f"select correlationId, {process}, start from {LAUNCHES}", schema)
    keys = ["correlation"] if frame["process"].n_unique() == 1 else ["correlation", "process"]
    joined = frame.select("correlation", "process", "start").join(
        launches.unique(keys).select(*keys, "at"), on=keys, how="left", maintain_order="left"
    )
    return joined.select(pl.coalesce("at", "start")).to_series().to_numpy()


def _steps(
    marks: Sequence[tuple[int, StepMark]], process: Ints, at_ns: Ints
) -> tuple[pl.DataFrame, Ints]:
    """The steps, and the one around each launch [n]; processes without steps use those of others."""
    by_process: dict[int, list[StepMark]] = {}
    for number, mark in marks:
        by_process.setdefault(number, []).append(mark)
    has_own = np.isin(process, list(by_process))
    steps: list[StepMark] = []
    step = np.full(len(at_ns), -1, np.int64)
    for number, of_process in by_process.items():
        distinct = distinct_steps(of_process)
        start, end = (
            np.array([getattr(s, n) for s in distinct], np.int64) for n in ("start_ns", "end_ns")
        )
        inner = innermost(start, end, at=at_ns)
        is_in = (inner >= 0) & ((process == number) | ~has_own)
        step[is_in] = inner[is_in] + len(steps)
        steps += distinct
    return steps_table(steps), step


def _facts(op: int, name: str) -> dict[str, Any]:
    if name in COPIES.values():
        return {"op": op, "name": name, "category": Category.COPY.value}
    kernel = kernel_collective(name)
    if kernel is None:
        return {"op": op, "name": short_name(name), "category": Category.COMPUTE.value}
    return {
        "op": op,
        "name": short_name(name),
        "category": Category.COLLECTIVE.value,
        "kind": kernel.kind,
        "opcode": kernel.opcode,
        "group_size": kernel.group_size,
        "dtype": kernel.dtype,
    }


def _device_name(database: sqlite3.Connection) -> str | None:
    row = database.execute(f"select name from {GPUS} limit 1").fetchone()
    return row[0] if row and isinstance(row[0], str) else None
