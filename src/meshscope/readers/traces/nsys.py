"""Reads SQLite files that `nsys export --type sqlite` writes: kernels, copies and NVTX ranges.

Tables and columns are those of NVIDIA's documentation of the export (Nsight Systems User Guide,
"SQLite Schema Reference"). A file may hold several processes and GPUs of a host. Kernels carry no
sizes, so the bytes of collectives are unknown, except where NCCL's NVTX ranges tell the kind.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.readers.profile.nesting import Ints, innermost
from meshscope.readers.traces.annotations import read_annotation
from meshscope.readers.traces.collectives import kernel_collective, short_name
from meshscope.readers.traces.columns import MAX_NS, MAX_OPS, events_table, left_out, steps_table
from meshscope.readers.traces.trace import OPS_SCHEMA, Category, Trace, TraceFormat

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
    if KERNELS not in tables or STRINGS not in tables:
        missing = next(name for name in (KERNELS, STRINGS) if name not in tables)
        raise TraceError(
            f"{path}: has no table {missing}: no kernel was traced, or the file is of another tool. "
            "Record with `nsys profile --trace=cuda,nvtx` and export again."
        )
    kernels = _kernels(database)
    copies = [_copies(database, table, word) for table, word in COPIES.items() if table in tables]
    frame = pl.concat([kernels, *copies])
    names = frame["name"].unique(maintain_order=True)
    marks = list(_marks(database)) if RANGES in tables else []
    steps = steps_table(marks)
    at_ns = _launch_ns(database, frame) if LAUNCHES in tables else frame["start"].to_numpy()
    read = [KERNELS, *(table for table in COPIES if table in tables)]
    n_other = sum(_count(database, table) for table in read) - len(frame)
    codes = pl.DataFrame({"name": names}).with_row_index("op")
    ops = frame.join(codes, on="name", maintain_order="left")
    events, n_invalid, n_repeated = events_table(
        {
            "op": ops["op"].to_numpy(),
            "device": ops["device"].to_numpy(),
            "stream": ops["stream"].to_numpy(),
            "start_ns": ops["start"].to_numpy(),
            "dur_ns": (ops["end"] - ops["start"]).to_numpy(),
            "step": _within(steps, at_ns),
        }
    )
    return Trace(
        path=path,
        format=TraceFormat.NSYS,
        events=events,
        ops=pl.DataFrame([_facts(op, name) for op, name in enumerate(names)], schema=OPS_SCHEMA),
        steps=steps,
        n_events=len(frame) + len(marks),
        device_name=_device_name(database) if GPUS in tables else None,
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
}


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
    checked = f"with given({given}) as ({query}) select {', '.join(columns)} from given"  # noqa: S608
    cursor = database.execute(checked)
    parts = [pl.DataFrame(schema=dict(schema))]
    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        parts.append(pl.DataFrame(rows, schema=dict(schema), orient="row", strict=False))
    return pl.concat(parts)


def _count(database: sqlite3.Connection, table: str) -> int:
    return database.execute(f"select count(*) from {table}").fetchone()[0]  # noqa: S608


def _columns_of(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"pragma table_info({table})")}


def _kernels(database: sqlite3.Connection) -> pl.DataFrame:
    """Names are demangled where the export has them: templates tell dtype and devices."""
    columns = _columns_of(database, KERNELS)
    name = "demangledName" if "demangledName" in columns else "shortName"
    codes = _rows(
        database,
        f"select {name}, start, end, deviceId, streamId, correlationId from {KERNELS} where {_WHOLE}",  # noqa: S608
        {**_FRAME, "name": pl.Int64},
    )
    used = codes["name"].unique()
    if len(used) > MAX_OPS:
        raise TraceError(
            f"{KERNELS} has more than {MAX_OPS:,} distinct kernels. The file is damaged."
        )
    texts = _rows(
        database,
        f"select id, value from {STRINGS} where id in (select distinct {name} from {KERNELS})",  # noqa: S608
        {"name": pl.Int64, "text": pl.String},
    ).unique("name")
    joined = codes.join(texts, on="name", how="left", maintain_order="left")
    return joined.select(
        pl.col("text").fill_null("(kernel without a name)").alias("name"), *list(_FRAME)[1:]
    )


def _copies(database: sqlite3.Connection, table: str, word: str) -> pl.DataFrame:
    query = f"select '{word}', start, end, deviceId, streamId, correlationId from {table} where {_WHOLE}"  # noqa: S608
    return _rows(database, query, _FRAME)


def _marks(database: sqlite3.Connection) -> Iterator[tuple[str, int, int]]:
    """NVTX ranges that mark steps: name, start and duration."""
    has_ids = "textId" in _columns_of(database, RANGES)
    text = f"coalesce(text, (select value from {STRINGS} where id = textId))" if has_ids else "text"  # noqa: S608
    query = f"select {text}, start, end from {RANGES} where end is not null limit {MAX_RANGES}"  # noqa: S608
    for name, start, end in database.execute(query):
        is_step = isinstance(name, str) and read_annotation(name) is not None
        if is_step and isinstance(start, int) and isinstance(end, int) and end >= start:
            yield name, start, end - start


def _launch_ns(database: sqlite3.Connection, frame: pl.DataFrame) -> Ints:
    """When each op was launched; its own start if the launch is not recorded."""
    schema = {"correlation": pl.Int64, "at": pl.Int64}
    launches = _rows(database, f"select correlationId, start from {LAUNCHES}", schema)  # noqa: S608
    joined = frame.select("correlation", "start").join(
        launches.unique("correlation"), on="correlation", how="left", maintain_order="left"
    )
    return joined.select(pl.coalesce("at", "start")).to_series().to_numpy()


def _within(steps: pl.DataFrame, at_ns: Ints) -> Ints:
    """The step around each time [n]; -1 outside of steps."""
    if steps.is_empty():
        return np.full(len(at_ns), -1, np.int64)
    start = steps["start_ns"].to_numpy()
    return innermost(start, start + steps["dur_ns"].to_numpy(), at=at_ns)


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
    row = database.execute(f"select name from {GPUS} limit 1").fetchone()  # noqa: S608
    return row[0] if row and isinstance(row[0], str) else None
