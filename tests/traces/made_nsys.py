"""SQLite as nsys exports it, by the documented schema: no public sample of the export was found."""

import sqlite3
from contextlib import closing
from pathlib import Path

SCHEMA = """
create table StringIds (id integer primary key, value text not null);
create table TARGET_INFO_GPU (id integer, name text);
create table CUPTI_ACTIVITY_KIND_KERNEL (
  start integer, end integer, deviceId integer, contextId integer, streamId integer,
  correlationId integer, globalPid integer, demangledName integer, shortName integer);
create table CUPTI_ACTIVITY_KIND_MEMCPY (
  start integer, end integer, deviceId integer, streamId integer, correlationId integer,
  bytes integer, copyKind integer);
create table CUPTI_ACTIVITY_KIND_RUNTIME (
  start integer, end integer, correlationId integer, globalTid integer, nameId integer);
create table NVTX_EVENTS (
  start integer, end integer, eventType integer, text text, textId integer, globalTid integer);
"""
NAMES = {
    1: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    2: "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
    3: "nvjet_hsh_128x256_64x4",
    4: "execute_context_0(0)_generation_64(64)",
}


def written(path: Path, tables: dict[str, list[tuple]]) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(SCHEMA)
        for table, rows in tables.items():
            db.executemany(f"insert into {table} values ({','.join('?' * len(rows[0]))})", rows)
    return path


def database(path: Path, *, without: str = "") -> Path:
    """Two GPUs; in each a GEMM of 30 us, and two all-reduces, the first of them half hidden."""
    kernels, launches, copies = [], [], []
    for device in range(2):
        for n, (name, start, end, stream) in enumerate(
            ((3, 1000, 31_000, 7), (1, 16_000, 46_000, 20), (2, 50_000, 56_000, 7)), start=1
        ):
            number = 10 * device + n
            kernels.append((start, end, device, 1, stream, number, 0, name, name))
            launches.append((500 + n, 600 + n, number, 0, 0))
        copies.append((60_000, 61_000, device, 7, 99 + device, 4096, 1))
    tables = {
        "StringIds": list(NAMES.items()),
        "TARGET_INFO_GPU": [(0, "NVIDIA H100 80GB HBM3")],
        "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
        "CUPTI_ACTIVITY_KIND_RUNTIME": launches,
        "CUPTI_ACTIVITY_KIND_MEMCPY": copies,
        "NVTX_EVENTS": [(400, 900, 59, None, 4, 0)],
    }
    written(path, tables)
    if without:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"drop table {without}")
    return path
