"""Profiles of several hosts: their files, device numbers and clocks."""

from pathlib import Path

import pytest
from made_profiles import Event, Line, Plane, write

from meshscope.errors import TraceError
from meshscope.readers.profile.xplane import profile_files, read_profile

STAMP = "profile_start_time"


def host(
    *, stamp_ns: int | None = None, late_ps: int = 0, ordinals: tuple[int, ...] = (0, 1)
) -> list[Plane]:
    """Two chips that ran five all-reduces, 10,000 ps apart, on a clock that is `late_ps` ahead."""
    name = "%ar.1 = f32[4] all-reduce(f32[4] %x), replica_groups={{0,2},{1,3}}"
    ops = [Event(name, late_ps + 10_000 * turn, 5_000) for turn in range(1, 6)]
    chips = [Plane(f"/device:TPU:{n}", [Line("XLA Ops", ops)]) for n in ordinals]
    stats = {} if stamp_ns is None else {STAMP: stamp_ns}
    return [*chips, Plane("Task Environment", stats=stats)]


def test_hosts_that_count_from_zero_are_numbered_consecutively(tmp_path: Path) -> None:
    for name in ("h0", "h1"):
        write(tmp_path / f"{name}.xplane.pb", *host())
    profile = read_profile(tmp_path)
    assert sorted(profile.ops.events["device"].unique()) == [0, 1, 2, 3]
    assert profile.ops.instructions.height == 1


def test_distinct_device_numbers_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *host(ordinals=(2, 3)))
    write(tmp_path / "h1.xplane.pb", *host(ordinals=(0, 1)))
    profile = read_profile(tmp_path)
    assert profile.ops.events.select("host", "device").unique().sort("device").rows() == [
        (1, 0), (1, 1), (0, 2), (0, 3),
    ]  # fmt: skip


def test_ids_of_cpu_devices_of_two_processes_are_compacted(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *host(ordinals=(0, 1)))
    write(tmp_path / "h1.xplane.pb", *host(ordinals=(2048, 2049)))
    assert sorted(read_profile(tmp_path).ops.events["device"].unique()) == [0, 1, 2, 3]


def test_given_positions_must_cover_every_device(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *host())
    given = read_profile(tmp_path, positions={(0, 0): 5, (0, 1): 3})
    assert sorted(given.ops.events["device"].unique()) == [3, 5]
    with pytest.raises(TraceError, match=r"device 1 of host 0 has no position.*Give one for each"):
        read_profile(tmp_path, positions={(0, 0): 5})


def test_ends_of_shared_collectives_set_the_clock(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *host(stamp_ns=10**18))
    write(tmp_path / "h1.xplane.pb", *host(stamp_ns=10**18 + 7_000, late_ps=300_000))
    profile = read_profile(tmp_path)
    assert [host.offset_s for host in profile.hosts] == pytest.approx([0.0, -300_000e-12])
    assert profile.hosts[1].clock == "ends of 10 shared collectives, within 0.0 us"
    starts = profile.ops.events.group_by("device").agg(start_s="start_s").sort("device")
    for of_device in starts["start_s"].to_list():
        assert of_device == pytest.approx(starts["start_s"][0].to_list())


def test_stamps_of_the_hosts_set_the_clock_without_shared_collectives(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *host(stamp_ns=10**18 + 7_000, ordinals=(0,)))
    write(tmp_path / "h1.xplane.pb", *host(stamp_ns=10**18, ordinals=(1,)))
    profile = read_profile(tmp_path)
    assert [host.offset_s for host in profile.hosts] == pytest.approx([7e-6, 0.0])
    assert profile.hosts[1].clock == "Unix time of the host"


def test_profiles_without_stamps_start_together(tmp_path: Path) -> None:
    write(tmp_path / "h0.xplane.pb", *host(ordinals=(0,)))
    write(tmp_path / "h1.xplane.pb", *host(ordinals=(1,), stamp_ns=10**18))
    hosts = read_profile(tmp_path).hosts
    assert [host.offset_s for host in hosts] == [0.0, 0.0]
    assert hosts[0].clock.startswith("start of the profile")


def test_two_processes_of_one_machine_have_distinct_names(tmp_path: Path) -> None:
    files = [write(tmp_path / part / "vm.xplane.pb", *host()) for part in ("a", "b")]
    assert [host.name for host in read_profile(*files).hosts] == ["vm#0", "vm#1"]


def test_the_latest_session_below_a_log_folder_is_read(tmp_path: Path) -> None:
    for time in ("2026_01_01_00_00_00", "2026_01_02_00_00_00"):
        write(tmp_path / "plugins" / "profile" / time / "h.xplane.pb", *host())
    assert [f.parent.name for f in profile_files(tmp_path)] == ["2026_01_02_00_00_00"]


def test_a_host_with_a_plain_and_a_gzipped_file_is_read_once(tmp_path: Path) -> None:
    for name in ("h.xplane.pb", "h.xplane.pb.gz", "g.xplane.pb.gz"):
        (tmp_path / name).touch()
    assert [f.name for f in profile_files(tmp_path)] == ["g.xplane.pb.gz", "h.xplane.pb"]


def test_a_folder_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"Give the folder that jax\.profiler\.trace wrote"):
        read_profile(tmp_path)
