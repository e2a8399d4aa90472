"""Profiles of several hosts: their files, device numbers and clocks."""

from pathlib import Path

import pytest
from made_profiles import Event, Line, Plane, write
from tables import table

from meshscope.errors import TraceError
from meshscope.readers.profile.xplane import profile_files, read_profile

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
    given = read_profile(tmp_path, positions={(0, 0): 5, (0, 1): 3})
    assert sorted(given.ops.events["device"].unique()) == [3, 5]
    with pytest.raises(TraceError, match=r"device 1 of host 0 has no position.*Give one for each"):
        read_profile(tmp_path, positions={(0, 0): 5})


def test_ends_of_shared_collectives_set_the_clock(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *planes_of_host(stamp_ns=10**18))
    write(tmp_path / "h1.xplane.pb", *planes_of_host(stamp_ns=10**18 + 7_000, late_ps=300_000))
    profile = read_profile(tmp_path)
    assert [host.offset_s for host in profile.hosts] == pytest.approx([0.0, -300_000e-12])
    assert profile.hosts[1].clock == "ends of 10 shared collectives, within 0.0 us"
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
    hosts = read_profile(tmp_path).hosts
    assert [one.offset_s for one in hosts] == pytest.approx(offsets_s)
    assert hosts[host].clock.startswith(clock)


def test_two_processes_of_one_machine_have_distinct_names(tmp_path: Path) -> None:
    files = [write(tmp_path / part / "vm.xplane.pb", *planes_of_host()) for part in ("a", "b")]
    assert [host.name for host in read_profile(*files).hosts] == ["vm#0", "vm#1"]


def test_the_latest_session_below_a_log_folder_is_read(tmp_path: Path) -> None:
    for time in ("2026_01_01_00_00_00", "2026_01_02_00_00_00"):
        write(tmp_path / "plugins" / "profile" / time / "h.xplane.pb", *planes_of_host())
    assert [f.parent.name for f in profile_files(tmp_path)] == ["2026_01_02_00_00_00"]


def test_a_host_with_a_plain_and_a_gzipped_file_is_read_once(tmp_path: Path) -> None:
    for name in ("h.xplane.pb", "h.xplane.pb.gz", "g.xplane.pb.gz"):
        (tmp_path / name).touch()
    assert [f.name for f in profile_files(tmp_path)] == ["g.xplane.pb.gz", "h.xplane.pb"]


def test_a_folder_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"Give the folder that jax\.profiler\.trace wrote"):
        read_profile(tmp_path)
