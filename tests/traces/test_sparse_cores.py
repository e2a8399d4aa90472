"""SparseCores and transfers between slices in XPlanes of our own making: no recorded one was available."""

from pathlib import Path

import made_profiles as profiles
import pytest

from meshscope.events.enums import Kind
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan
from meshscope.readers.traces.attribution import TraceRows, attributed
from meshscope.readers.traces.merge import merged
from meshscope.readers.traces.trace import Trace
from meshscope.readers.traces.xplane import read_xplane

US = 10**6  # ps
PROGRAM = "jit_decode(12345678901234567890)"
REDUCE = "%all-reduce.3 = bf16[2,128]{1,0} all-reduce(bf16[2,128]{1,0} %p), replica_groups={{0,1}}"
GATHER = "%gather_offload.1 = bf16[8,128]{1,0} custom-call(bf16[64,128]{1,0} %t)"
WRAPPER = "%all-reduce.9 = call(%p), to_apply=%called_computation"
FUSION = "%fusion.1 = f32[4] fusion(f32[4] %x)"
PROGRAMS = {
    name: {"program_id": profiles.Unsigned(12345678901234567890)}
    for name in (REDUCE, GATHER, WRAPPER, FUSION)
}
SEND = "%send.1 = (bf16[8]{0}, u32[], token[]) send(bf16[8]{0} %x, token[] %t), channel_id=3"


def us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)


def core(ordinal: int, *ops: object) -> object:
    return profiles.Plane(
        name=f"/device:TPU:{ordinal}",
        lines=[
            profiles.Line("XLA Modules", [profiles.Event(PROGRAM, 0, 1000 * US, {"run_id": 7})]),
            profiles.Line("XLA Ops", list(ops)),
        ],
        kind_stats=PROGRAMS,
    )


def sparse(ordinal: int, number: int, *ops: object) -> object:
    """The plane of a SparseCore, with the lines of its own."""
    return profiles.Plane(
        name=f"/device:TPU:{ordinal} SparseCore {number}",
        lines=[
            profiles.Line("Sparse Core Steps", [profiles.Event("1", 0, 1000 * US)]),
            profiles.Line("Sparse Core Modules", [profiles.Event(PROGRAM, 0, 900 * US)]),
            profiles.Line("Sparse Core Ops", list(ops)),
        ],
        kind_stats=PROGRAMS,
    )


def read(tmp_path: Path, *planes: object) -> Trace:
    return read_xplane(profiles.write(tmp_path / "host.xplane.pb", *planes))


def rows_of(trace: Trace, topology: str | None = None, plan: str | None = None) -> TraceRows:
    if topology is None or plan is None:
        return attributed(merged([trace]), None)
    slices = parse_topology(topology)
    mesh = parse_plan(plan).filled(slices.n_devices).mesh
    return attributed(merged([trace]), mesh, crosses_slices=slices.crosses_slices)


def at(name: str, start_us: int, dur_us: int) -> object:
    return profiles.Event(name, start_us * US, dur_us * US)


@pytest.mark.parametrize(
    ("main", "on_sparse_core", "times_us", "streams"),
    [
        # The first half is behind the fusion.
        (at(FUSION, 0, 100), at(REDUCE, 50, 100), (100, 50), [1, 2002]),
        # The main core's event says the bytes, so its time from start to end counts.
        (at(REDUCE, 0, 200), at(REDUCE.replace("reduce.3", "reduce.4"), 20, 150), (200, 200), [1]),
        (at(WRAPPER, 0, 200), at(REDUCE, 20, 150), (150, 150), [2002]),
    ],
    ids=["only on the SparseCore", "on both cores", "a call without bytes"],
)
def test_a_collective_of_a_sparse_core_counts_once(
    tmp_path, main, on_sparse_core, times_us, streams
) -> None:
    trace = read(tmp_path, core(0, main), sparse(0, 1, on_sparse_core))
    (row,) = rows_of(trace, "v6e:1x2", "tp=2").rows
    facts = (row.kind, row.payload_bytes, row.groups, row.count)
    assert facts == (Kind.ALL_REDUCE, 512, ((0, 1),), 1)
    assert (us(row.dur_s), us(row.exposed_s)) == times_us
    assert sorted(trace.events["stream"]) == streams


def test_other_ops_of_sparse_cores_do_not_hide_collectives(tmp_path: Path) -> None:
    trace = read(tmp_path, core(0, at(REDUCE, 0, 100)), sparse(0, 0, at(GATHER, 0, 300)))
    read_rows = rows_of(trace)
    (row,), (load,) = read_rows.rows, read_rows.loads
    assert us(row.exposed_s) == 100
    assert (us(load.busy_s), us(load.collective_s), us(load.exposed_s)) == (300, 100, 100)
    lanes = read_rows.distinct_ops.select("hlo_name", "category").rows()
    assert ("gather_offload.1", "copy") in lanes


def megascale(*events: tuple[str, int, int, int]) -> object:
    """Events of (name, device as the runtime numbers it, start and duration in us)."""
    made = [
        profiles.Event(name, at * US, dur * US, {"graph_key": f"device_{device}_gid_send.1$1^i0"})
        for name, device, at, dur in events
    ]
    name = "/device:CUSTOM:Megascale Trace"
    return profiles.Plane(name=name, lines=[profiles.Line("megascale", made)])


TRANSFERS = (
    ("NetworkSend END", 200000, 100, 40),
    ("NetworkReceive END", 200000, 120, 60),
    ("NetworkSend END", 200001, 100, 50),
    ("NetworkReceive END", 200001, 120, 70),
    ("DeviceToHost END", 200001, 90, 10),
)


def test_groups_of_the_devices_of_one_slice_are_those_of_every_slice(tmp_path: Path) -> None:
    """The program of a slice counts its own devices: {0,1} are 2 and 3 on the other slice."""
    for host in range(2):
        reduce = profiles.Event(REDUCE, 0, 100 * US)
        profiles.write(tmp_path / f"{host}.xplane.pb", core(0, reduce), core(1, reduce))
    traces = [read_xplane(tmp_path / f"{host}.xplane.pb") for host in range(2)]
    mesh, slices = parse_plan("dp=2,tp=2").mesh, parse_topology("2xv6e:1x2")
    (row,) = attributed(merged(traces), mesh, crosses_slices=slices.crosses_slices).rows
    assert (row.axis, row.groups, row.count) == ("tp", ((0, 1), (2, 3)), 1)


def test_what_may_communicate_without_hlo_is_named(tmp_path: Path) -> None:
    call = '%c.1 = f32[8]{0} custom-call(f32[8]{0} %a), custom_call_target="pfft3d"'
    start = "%async-collective-start.2 = (f32[8]{0}, f32[8]{0}) fusion(f32[8]{0} %a)"
    ops = [
        profiles.Event(op, at * US, 5 * US) for at, op in enumerate((call, start, call), start=10)
    ]
    trace = read(tmp_path, core(0, *ops), core(1, *ops))
    said = "4 custom calls 'pfft3d' may communicate: the trace has no HLO of the program"
    assert said in trace.findings
    assert rows_of(trace).findings == (
        "2 kernels named like communication count as compute: 'async-collective-start.2'",
    )


def test_transfers_between_slices_are_rows_over_the_axis_that_crosses_slices(tmp_path) -> None:
    ops = (profiles.Event(FUSION, 0, 100 * US),)
    trace = read(tmp_path, core(0, *ops), core(1, *ops), megascale(*TRANSFERS))
    rows = rows_of(trace, "2xv6e:1x2", "dp=2,tp=2").rows
    assert {(row.kind, row.axis, row.crosses_slices, row.payload_bytes) for row in rows} == {
        (Kind.SEND, "dp", True, None),
        (Kind.RECV, "dp", True, None),
    }
    assert {(row.kind, row.count, us(row.dur_s)) for row in rows} == {
        (Kind.SEND, 1, 45),
        (Kind.RECV, 1, 65),
    }
    assert any("4 transfers between slices" in finding for finding in trace.findings)
    without_plan = rows_of(trace).rows
    assert {row.axis for row in without_plan} == {None}
    assert all("between slices" in (row.axis_reason or "") for row in without_plan)
    of_two_axes = rows_of(trace, "4xv6e:1x2", "pp=2,dp=2,tp=2").rows
    assert {row.axis for row in of_two_axes} == {None}


def test_sends_of_devices_count_instead_of_megascale_transfers(tmp_path: Path) -> None:
    trace = read(tmp_path, core(0, profiles.Event(SEND, 90 * US, 80 * US)), megascale(*TRANSFERS))
    rows = rows_of(trace).rows
    assert [(row.kind, row.count) for row in rows] == [(Kind.SEND, 1)]
    assert any("the sends and receives of the devices count" in text for text in trace.findings)
    kinds = trace.events.join(trace.ops, on="op").group_by("category").len()
    assert dict(kinds.iter_rows()) == {"collective": 1, "copy": 5}
