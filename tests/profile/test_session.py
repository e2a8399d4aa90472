"""Clocks of several hosts, and the time that devices wait for each other."""

import random
from pathlib import Path

import polars as pl
import pytest
from made_profiles import Event, Line, Plane, write
from tables import table

from meshscope.errors import TraceError
from meshscope.events.measured import StepLabel
from meshscope.readers.profile.xplane import read_profile
from meshscope.readers.traces.device_times import (
    LABELS,
    loads,
    step_table,
    with_exposure,
    with_transfers,
)

STAMP = "profile_start_time"


def planes_of_host(
    *, stamp_ns: int | None = None, late_ps: int = 0, ordinals: tuple[int, ...] = (0, 1)
) -> list[Plane]:
    """Two chips that ran five all-reduces, 10,000 ps apart, on a clock that is `late_ps` ahead."""
    name = "%ar.1 = f32[4] all-reduce(f32[4] %x), replica_groups={{0,2},{1,3}}"
    ops = [Event(name, late_ps + 10_000 * turn, 5_000) for turn in range(1, 6)]
    chips = [Plane(f"/device:TPU:{n}", [Line("XLA Ops", ops)]) for n in ordinals]
    stats = {} if stamp_ns is None else {STAMP: stamp_ns}
    return [*chips, Plane("Task Environment", stats=stats)]


@table
def test_devices_of_hosts_are_numbered(
    ordinals: tuple[tuple[int, int], tuple[int, int]],
    devices: list[tuple[int, int]],
    tmp_path: Path,
) -> None:
    for n, of_host in enumerate(ordinals):
        write(tmp_path / f"h{n}.xplane.pb", *planes_of_host(ordinals=of_host))
    ops = read_profile(tmp_path).ops
    assert ops.events.select("host", "device").unique().sort("device").rows() == devices
    assert ops.instructions.height == 1


def test_given_positions_must_cover_every_device(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *planes_of_host())
    given = read_profile(tmp_path, positions={0: 5, 1: 3})
    assert sorted(given.ops.events["device"].unique()) == [3, 5]
    with pytest.raises(TraceError, match=r"device 1 has no position.*Give one for each"):
        read_profile(tmp_path, positions={0: 5})


def test_ends_of_shared_collectives_set_the_clock(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *planes_of_host(stamp_ns=10**18))
    write(tmp_path / "h1.xplane.pb", *planes_of_host(stamp_ns=10**18 + 7_000, late_ps=300_000))
    profile = read_profile(tmp_path)
    assert [clock.offset_s for clock in profile.clocks] == pytest.approx([0.0, -300_000e-12])
    assert profile.clocks[1].method == "ends of 10 shared collectives, within 0.0 us"
    starts = profile.ops.events.group_by("device").agg(start_s="start_s").sort("device")
    for of_device in starts["start_s"].to_list():
        assert of_device == pytest.approx(starts["start_s"][0].to_list())


@pytest.mark.parametrize(
    ("stamps_ns", "offsets_s", "host", "clock"),
    [
        ((10**18 + 7_000, 10**18), [7e-6, 0.0], 1, "Unix time of the host"),
        ((None, 10**18), [0.0, 0.0], 0, "start of the profile"),
    ],
)
def test_stamps_of_the_hosts_set_the_clock_without_shared_collectives(
    stamps_ns, offsets_s, host, clock, tmp_path
) -> None:
    for n, stamp_ns in enumerate(stamps_ns):
        write(tmp_path / f"h{n}.xplane.pb", *planes_of_host(stamp_ns=stamp_ns, ordinals=(n,)))
    clocks = read_profile(tmp_path).clocks
    assert [one.offset_s for one in clocks] == pytest.approx(offsets_s)
    assert clocks[host].method.startswith(clock)


def test_a_folder_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"contains no \*\.xplane\.pb"):
        read_profile(tmp_path)


DECODE = LABELS.index(StepLabel.DECODE)


def event(device: int, start_ns: int, dur_ns: int, **values: object) -> dict[str, object]:
    usual = {"op": 0, "label": DECODE, "step": 0, "category": "compute"}
    return {**usual, "device": device, "start_ns": start_ns, "dur_ns": dur_ns, **values}


def reduce(device: int, start_ns: int, dur_ns: int, **values: object) -> dict[str, object]:
    facts = {"kind": "all_reduce", "opcode": "r", "dtype": "f32", "payload_bytes": 4, "axis": "tp"}
    groups = {"groups": [[0, 1], [2, 3]], "category": "collective"}
    return event(device, start_ns, dur_ns, **{**facts, **groups, **values})


def test_waiting_equals_brute_force() -> None:
    chance = random.Random(5)
    rows = [
        reduce(d, 1000 * turn + chance.randrange(500), chance.randrange(1, 500), op=op, payload_bytes=4 + op)
        for turn in range(20)
        for op in range(2)
        for d in range(4)
    ]  # fmt: skip
    for each in with_transfers(pl.DataFrame(rows)).to_dicts():
        members = {
            d: sorted(
                (r["start_ns"], r["dur_ns"]) for r in rows if (r["device"], r["op"]) == (d, each["op"])
            )[each["occurrence"]][1]
            for d in map(int, each["members"].split(","))
        }  # fmt: skip
        assert each["wire_ns"] == min(members.values())
        assert members[each["late"]] == each["wire_ns"]


def test_waiting_is_unknown_unless_all_devices_of_a_group_are_recorded() -> None:
    rows = with_transfers(pl.DataFrame([reduce(0, 0, 5), reduce(2, 0, 7), reduce(3, 1, 6)]))
    assert dict(rows.select("device", "wire_ns").iter_rows()) == {0: None, 2: 6, 3: 6}


def test_load_counts_each_moment_once_and_parts_sum_to_the_window() -> None:
    rows = [event(0, 0, 4), event(0, 2, 4), reduce(0, 7, 2), reduce(1, 8, 1), event(1, 9, 1)]
    table = pl.DataFrame(rows, infer_schema_length=None)
    events, busy = with_exposure(table.with_columns(pl.col("label").cast(pl.Int8)))
    names = ("device", "busy_s", "collective_s", "exposed_s", "idle_s", "window_s")
    read = [
        tuple(getattr(load, name) for name in names) for load in loads(busy, step_table(events))
    ]
    ns = [(0, 8, 2, 2, 1, 9), (1, 2, 1, 1, 0, 2)]
    assert read == [(device, *(pytest.approx(n * 1e-9) for n in times)) for device, *times in ns]
