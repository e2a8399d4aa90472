"""Profiles of several hosts: their files, device numbers and clocks."""

from pathlib import Path

import pytest
from made_profiles import Event, Line, Plane, write
from tables import table

from meshscope.errors import TraceError
from meshscope.readers.profile.xplane import read_profile

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
