"""SQLite of nsys of our own making, read into rows."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from made_nsys import NAMES, database, written
from tables import table

from meshscope.errors import TraceError
from meshscope.events.enums import Kind, Phase
from meshscope.plans.plan import parse_plan
from meshscope.readers.traces.attribution import attributed
from meshscope.readers.traces.merge import merged
from meshscope.readers.traces.nsys import read_nsys


def test_kernels_of_all_gpus_in_steps_of_nvtx(tmp_path: Path) -> None:
    trace = read_nsys(database(tmp_path / "report.sqlite"))
    assert (trace.n_events, trace.device_name) == (9, "NVIDIA H100 80GB HBM3")
    read = attributed(merged([trace]), parse_plan("tp=2").mesh)
    rows = [(r.phase, r.kind, r.axis, r.dtype, r.count, r.payload_bytes) for r in read.rows]
    assert rows == [(Phase.DECODE, Kind.ALL_REDUCE, "tp", "bf16", 1, None)] * 2
    nccl, custom = read.rows
    assert (nccl.dur_s, nccl.exposed_s) == pytest.approx((30e-6, 15e-6))
    assert (custom.dur_s, custom.exposed_s) == pytest.approx((6e-6, 6e-6))


def test_graphs_that_are_recorded_whole_are_busy_and_named(tmp_path: Path) -> None:
    """As nsys does without --cuda-graph-trace=node: a graph of 20 us between the GEMM and the all-reduce."""
    path = database(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        columns = "start, end, deviceId, graphId, streamId, correlationId, globalPid"
        db.execute(f"create table CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns})")
        row = (70_000, 90_000, 0, 5, 7, 1, 0)
        db.execute("insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values (?, ?, ?, ?, ?, ?, ?)", row)
    trace = read_nsys(path)
    assert trace.n_events == 10
    (finding,) = trace.findings
    assert finding.startswith(
        "1 CUDA graph recorded whole, without the kernels inside: communication"
    )
    assert finding.endswith("Record with --cuda-graph-trace=node")
    loads = attributed(merged([trace]), parse_plan("tp=2").mesh).loads
    assert loads[0].busy_s == pytest.approx((45 + 6 + 1 + 20) * 1e-6)  # and a copy


def test_kernels_of_any_exchange_and_copies_between_gpus_are_named(tmp_path: Path) -> None:
    """SendRecv kernels may be sends, receives or all-to-alls: no row claims one of them."""
    names = {n: f"ncclDevKernel_Generic_{n}(int)" for n in range(5)}
    names |= {5: "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(int)", 6: "gemm"}
    tables = {
        "StringIds": list(names.items()),
        "CUPTI_ACTIVITY_KIND_KERNEL": [
            (at, at + 1, 0, 1, 7, at, 0, name, name)
            for at, name in enumerate((5, 5, 5, *range(5), 6))
        ],
        # from host to device, and between devices
        "CUPTI_ACTIVITY_KIND_MEMCPY": [(50, 60, 0, 7, 1, 4096, 1), (70, 80, 0, 7, 2, 4096, 10)],
    }
    read = attributed(merged([read_nsys(written(tmp_path / "a.sqlite", tables))]), None)
    assert read.rows == ()
    assert read.loads[0].collective_s == pytest.approx(8e-9)
    copies, exchange, *_, more = read.findings
    assert copies == "1 'memcpy PtoP' between devices counts as copies, without rows"
    assert exchange == (
        "3 kernels 'ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t' communicate; the trace does not say "
        "whether by send, receive or all-to-all"
    )
    assert more.startswith("2 kernels with 2 more names communicate")


def ranks(path: Path, devices: dict[int, int], *, n_steps: int = 3) -> Path:
    """A process for each rank, on a GPU; steps of 8 all-reduces, launched in the process's NVTX ranges."""
    marks, calls, kernels = [], [], []
    for pid, device in devices.items():
        process = (1 << 56) + (pid << 24)
        for step in range(n_steps):
            at = 1_000_000 * step + 100 * device
            marks.append((at, at + 900_000, 59, NAMES[4], None, process + pid))
            for n in range(8):
                launch, number = at + 100_000 * n, 8 * step + n + 1
                calls.append((launch, launch + 10, number, process + pid, 0))
                kernels.append((launch + 50, launch + 5050, device, 1, 20, number, process, 1, 1))
    tables = {"StringIds": list(NAMES.items()), "NVTX_EVENTS": marks}
    tables |= {"CUPTI_ACTIVITY_KIND_RUNTIME": calls, "CUPTI_ACTIVITY_KIND_KERNEL": kernels}
    return written(path, tables)


@table
def test_steps_and_counts_are_of_each_rank(tmp_path: Path, files: list[dict[int, int]]) -> None:
    """Three steps of 8 all-reduces on two ranks."""
    traces = [read_nsys(ranks(tmp_path / f"{i}.sqlite", file)) for i, file in enumerate(files)]
    trace = merged(traces)
    read = attributed(trace, parse_plan("tp=2").mesh)
    assert trace.n_devices == 2
    assert {(step.label.value, step.n_steps) for step in read.steps} == {("decode", 3)}
    assert [(row.axis, row.count, row.n_steps) for row in read.rows] == [("tp", 8, 3)]
    assert sorted(read.executions["step"].unique()) == [0, 1, 2]
    assert not any("differ" in finding for finding in read.findings)


def test_the_rank_of_a_file_of_one_gpu_is_that_of_its_name(tmp_path: Path) -> None:
    paths = [ranks(tmp_path / f"rank{n}.sqlite", {7: 0}) for n in (10, 2)]
    trace = merged([read_nsys(path) for path in paths])
    assert trace.events["device"].unique(maintain_order=True).to_list() == [10, 2]


@table
def test_files_without_ranks_say_how_their_devices_are_numbered(
    tmp_path: Path, files: list[dict[int, int]], n_devices: int
) -> None:
    """Whether the files have the same GPUs or different ones."""
    trace = merged([read_nsys(ranks(tmp_path / f"{i}.sqlite", of)) for i, of in enumerate(files)])
    said = ("the files name no ranks: devices are numbered in the order of the files",)
    assert (trace.n_devices, trace.findings) == (n_devices, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "TARGET_INFO_GPU", "CUPTI_ACTIVITY_KIND_MEMCPY"],
)
def test_tables_that_nsys_leaves_out_are_not_needed(tmp_path: Path, table: str) -> None:
    read = attributed(merged([read_nsys(database(tmp_path / "r", without=table))]), None)
    assert sum(row.count for row in read.rows) == 2


def test_a_view_of_a_missing_table_does_not_matter(tmp_path: Path) -> None:
    path = database(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("create table gone (id integer)")
        db.execute("create view stale as select id from gone")
        db.execute("drop table gone")
    assert len(read_nsys(path).events) == 8


def test_a_database_of_rocprof_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("create table rocpd_kernel_dispatch_1 (id integer)")
    with pytest.raises(TraceError, match=r"a database of rocprofv3 \(rocpd\). Record with"):
        read_nsys(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:100] + b"\xff" * 4000 + data[4100:], "Export the report again"),
        (lambda data: data.replace(b"CREATE TABLE NVTX", b"CREATE \xd3ABLE NVTX"), r"r.*\.sqlite"),
    ],
    ids=["damaged pages", "names that are no UTF-8"],
)
def test_a_damaged_file_is_one_message(tmp_path: Path, damage, message: str) -> None:
    path = database(tmp_path / "report.sqlite")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=message):
        read_nsys(path)


def test_text_in_the_place_of_numbers_is_left_out(tmp_path: Path) -> None:
    path = database(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "insert into CUPTI_ACTIVITY_KIND_KERNEL values ('soon', 'late', 0, 1, 7, 9, 0, 3, 3)"
        )
        db.execute("insert into CUPTI_ACTIVITY_KIND_KERNEL values (90, 10, 0, 1, 7, 9, 0, 77, 77)")
    trace = read_nsys(path)
    assert len(trace.events) == 8
    assert trace.findings == ("2 device events left out: no valid start, duration or device",)
