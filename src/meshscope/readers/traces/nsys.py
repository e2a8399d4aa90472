"""Reads SQLite files that `nsys export --type sqlite` writes: kernels, copies and NVTX ranges.

Tables and columns follow NVIDIA's documentation of the export (Nsight Systems User Guide,
"SQLite Schema Reference"). A file may hold several processes and GPUs of a host: each process is a
rank, or each of its GPUs if its kernels run on several. Kernels carry no sizes, so the bytes of
collectives are unknown. By default, nsys records a CUDA graph whole, without the kernels inside.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.events.intervals import Ints
from meshscope.hardware.chips import ChipKind
from meshscope.readers.traces.collectives import op_facts
from meshscope.readers.traces.servers import StepMark, distinct_steps, read_annotation
from meshscope.readers.traces.trace import (
    MAX_NS,
    MAX_OPS,
    Trace,
    TraceFormat,
    events_table,
    ops_table,
    step_around,
    steps_table,
)
from meshscope.units import counted

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY, PEER_COPY = "CUPTI_ACTIVITY_KIND_MEMCPY", "memcpy PtoP"
COPIES = {MEMCPY: "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
COPY_NAMES = frozenset({*COPIES.values(), PEER_COPY})
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
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
    names = [name for (name,) in database.execute("select name from sqlite_master")]
    if any(name.startswith("rocpd") for name in names):
        raise TraceError(
            f"{path}: this is a database of rocprofv3 (rocpd). Record with the PyTorch profiler, or with "
            "jax.profiler.trace: meshscope reads their traces on ROCm."
        )
    columns = {
        name: {row[0] for row in database.execute("select name from pragma_table_info(?)", (name,))}
        for name in names
        if name in {KERNELS, *COPIES, GRAPHS, LAUNCHES, RANGES, STRINGS, GPUS}
    }
    missing = next((name for name in (KERNELS, STRINGS) if name not in columns), None)
    if missing is not None:
        raise TraceError(
            f"{path}: has no table {missing}: no kernel was traced, or the file is of another tool. "
            "Record with `nsys profile --trace=cuda,nvtx --cuda-graph-trace=node` and export again."
        )
    named = {**COPIES, GRAPHS: "CUDA graph"}
    others = {table: f"'{name}'" for table, name in named.items() if table in columns}
    if "copyKind" in columns.get(MEMCPY, ()):  # 10: CUPTI_ACTIVITY_MEMCPY_KIND_PTOP
        others[MEMCPY] = f"case copyKind when 10 then '{PEER_COPY}' else 'memcpy' end"
    parts = [_ops(database, table, name, columns[table]) for table, name in others.items()]
    ops = _ranked(pl.concat([_kernels(database, columns[KERNELS]), *parts]))
    marks = list(_marks(database, columns[RANGES])) if RANGES in columns else []
    at_ns = _launch_ns(database, ops, columns[LAUNCHES]) if LAUNCHES in columns else ops["start"]
    steps, step = _steps(marks, ops["process"].to_numpy(), at_ns.to_numpy())
    codes = ops.select(pl.col("name").unique(maintain_order=True)).with_row_index("op")
    n_rows = {
        table: _first(database, f"select count(*) from {table}") for table in (KERNELS, *others)
    }
    dur_ns = pl.col("end") - pl.col("start")
    coded = ops.join(codes, on="name", maintain_order="left").select(
        "op", "stream", pl.Series("step", step), device="rank", start_ns="start", dur_ns=dur_ns
    )
    events, findings = events_table(coded, n_invalid=sum(n_rows.values()) - len(ops))
    if n_graphs := n_rows.get(GRAPHS):
        findings.append(
            f"{counted(n_graphs, 'CUDA graph')} recorded whole, without the kernels inside: communication there counts "
            "as compute. Record with --cuda-graph-trace=node"
        )
    device_name = _first(database, f"select name from {GPUS} limit 1") if GPUS in columns else None
    return Trace(
        path=path,
        format=TraceFormat.NSYS,
        events=events,
        ops=ops_table(codes["name"], lambda name: op_facts(name, is_copy=name in COPY_NAMES)),
        steps=steps,
        n_events=len(ops) + len(marks),
        contents=f"{n_rows[KERNELS]:,} rows in {KERNELS}",
        device_name=device_name if isinstance(device_name, str) else None,
        chip_kind=ChipKind.GPU,
        findings=tuple(findings),
    )


def _first(database: sqlite3.Connection, query: str) -> Any:
    return (database.execute(query).fetchone() or (None,))[0]


_OPS: dict[str, Any] = {
    "name": pl.String,
    "device": pl.Int32,
    **dict.fromkeys(("start", "end", "stream", "correlation", "process"), pl.Int64),
}


def _ops(
    database: sqlite3.Connection, table: str, name: str, columns: set[str], kind: Any = pl.String
) -> pl.DataFrame:
    """The ops in a table; rows whose times or device are no whole numbers are left out."""
    # SQLite stores any type in any column.
    whole = " and ".join(f"typeof({name}) = 'integer'" for name in ("start", "end", "deviceId"))
    query = f"select {name}, deviceId, start, end, streamId, correlationId, {_process(columns)}"
    return _rows(database, f"{query} from {table} where {whole}", {**_OPS, "name": kind})


def _process(columns: set[str]) -> str:
    """The process of a row, with its host: thread and process ids have the number of the thread last."""
    known = next((name for name in ("globalPid", "globalTid") if name in columns), None)
    return "0" if known is None else f"{known} >> 24"


def _rows(database: sqlite3.Connection, query: str, schema: Mapping[str, Any]) -> pl.DataFrame:
    """The answer of a query, in columns; -1 for numbers that are none or too large."""
    checked: list[str] = []
    for name, kind in schema.items():
        largest = MAX_DEVICE if kind == pl.Int32 else MAX_NS
        is_number = f'typeof("{name}") = \'integer\' and "{name}" between 0 and {largest}'
        number = f'case when {is_number} then "{name}" else -1 end'
        checked.append(f'"{name}"' if kind == pl.String else number)
    given = ", ".join(f'"{name}"' for name in schema)
    cursor = database.execute(
        f"with given({given}) as ({query}) select {', '.join(checked)} from given"
    )
    parts = [pl.DataFrame(schema=dict(schema))]
    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        parts.append(pl.DataFrame(rows, schema=dict(schema), orient="row", strict=False))
    return pl.concat(parts)


def _kernels(database: sqlite3.Connection, columns: set[str]) -> pl.DataFrame:
    """Names are demangled where the export has them: templates tell dtype and devices."""
    name = "demangledName" if "demangledName" in columns else "shortName"
    codes = _ops(database, KERNELS, name, columns, pl.Int64)
    if codes["name"].n_unique() > MAX_OPS:
        raise TraceError(
            f"{KERNELS} has more than {MAX_OPS:,} distinct kernels. The file is damaged."
        )
    texts = _rows(
        database,
        f"select id, value from {STRINGS} where id in (select distinct {name} from {KERNELS})",
        {"name": pl.Int64, "text": pl.String},
    ).unique("name")
    joined = codes.join(texts, on="name", how="left", maintain_order="left")
    text = pl.col("text").fill_null("(kernel without a name)")
    return joined.with_columns(text.alias("name")).select(list(_OPS))


def _ranked(ops: pl.DataFrame) -> pl.DataFrame:
    """The ops with the number of their rank, in the order of devices, then of processes.

    Copies to GPUs without kernels belong to the process's first GPU.
    """
    kernels = ops.filter(~pl.col("name").is_in(list(COPY_NAMES)))
    places = (kernels if len(kernels) else ops).select("process", "device").unique()
    ranks = places.sort("device", "process").with_row_index("rank")
    first = ranks.group_by("process").agg(pl.col("rank").min().alias("first"))
    joined = ops.join(ranks, on=["process", "device"], how="left", maintain_order="left")
    joined = joined.join(first, on="process", how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("rank", "first", pl.lit(0)).cast(pl.Int32).alias("rank"))


def _marks(database: sqlite3.Connection, columns: set[str]) -> Iterator[tuple[int, StepMark]]:
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


def _launch_ns(database: sqlite3.Connection, ops: pl.DataFrame, columns: set[str]) -> pl.Series:
    query = f"select correlationId, {_process(columns)}, start from {LAUNCHES}"
    schema = {"correlation": pl.Int64, "process": pl.Int64, "at": pl.Int64}
    keys = ["correlation"] if ops["process"].n_unique() == 1 else ["correlation", "process"]
    launches = _rows(database, query, schema).unique(keys).select(*keys, "at")
    joined = ops.join(launches, on=keys, how="left", maintain_order="left")
    return joined.select(pl.coalesce("at", "start")).to_series()


def _steps(
    marks: Sequence[tuple[int, StepMark]], process: Ints, at_ns: Ints
) -> tuple[pl.DataFrame, Ints]:
    """The steps, and the one around each launch [n]; processes without steps use other processes'."""
    by_process = defaultdict[int, list[StepMark]](list)
    for number, mark in marks:
        by_process[number].append(mark)
    has_own = np.isin(process, list(by_process))
    steps: list[StepMark] = []
    step = np.full(len(at_ns), -1, np.int64)
    for number, of_process in by_process.items():
        distinct = distinct_steps(of_process)
        inner = step_around(steps_table(distinct), at_ns)
        is_in = (inner >= 0) & ((process == number) | ~has_own)
        step[is_in] = inner[is_in] + len(steps)
        steps += distinct
    return steps_table(steps), step
