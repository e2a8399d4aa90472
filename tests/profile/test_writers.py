"""Chrome and Perfetto traces of profiles have every event, on nesting tracks, whatever its name."""

import gzip
import json
from pathlib import Path

import pytest
from made_profiles import FUSION, GOLDEN, REDUCE, Event, Line, Plane, tpu, v6e_host, write
from made_traces import perfetto

from meshscope.readers.profile.xplane import Profile, profile_timeline, read_profile
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.perfetto import write_perfetto

HOSTILE = '"},{"ph":"X\x00\x1b[31m\u202e\n' + "x" * 1_000_000


def chrome(profile: Profile, tmp_path: Path) -> list[dict[str, object]]:
    path = tmp_path / "t.trace.json.gz"
    timeline = profile_timeline(profile)
    write_chrome(timeline, path, is_gzipped=True, has_text_arguments=True)
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def perfetto_slices(profile: Profile, tmp_path: Path) -> list[tuple[str, str, str, int, int]]:
    """(process, track, name, begin, end) of all slices; checks that they nest."""
    path = tmp_path / "t.perfetto-trace"
    write_perfetto(profile_timeline(profile), path)
    tracks, slices, _ = perfetto(path)
    return [
        (tracks[tracks[track][0]][1] if tracks[track][0] else "", tracks[track][1], *times[:3])
        for track, *times in slices
    ]


def read(tmp_path: Path, *planes: Plane) -> Profile:
    return read_profile(write(tmp_path / "h.xplane.pb", *planes))


def test_a_chrome_trace_has_the_form_of_the_tpu_profiler(tmp_path: Path) -> None:
    events = chrome(
        read(tmp_path, tpu(Event(REDUCE, 2_000_000, 3_500_000, {"run_id": 7}))), tmp_path
    )
    named = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")
    }
    assert named == {
        (1, None): "/device:TPU:3", (1, 1): "XLA Modules", (1, 2): "XLA Ops", (1, 4): "Steps",
    }  # fmt: skip
    (op,) = [event for event in events if event["name"] == "ar.1"]
    assert op == {
        "ph": "X", "pid": 1, "tid": 2, "ts": 2.0, "dur": 3.5, "name": "ar.1",
        "args": {
            "bytes_accessed": str(2**40), "flops": "11", "hlo_category": "all-reduce",
            "long_name": REDUCE, "program_id": "12345678901234567890", "run_id": "7",
            "source": "model.py:7", "tf_op": "jit(f)/decode/mlp/psum:",
        },
    }  # fmt: skip


def test_hostile_names_neither_break_nor_inflate_a_trace(tmp_path: Path) -> None:
    plane = Plane("/device:TPU:0", [Line(HOSTILE, [Event(HOSTILE, 0, 1, {"note": HOSTILE})])])
    profile = read(tmp_path, plane)
    events = chrome(profile, tmp_path)
    assert [event["ph"] for event in events] == ["M"] * 4 + ["X"]
    shown = events[-1]["name"]
    assert shown.endswith(f"... [{len(HOSTILE):,} characters]")
    assert not {"\x00", "\x1b", "\u202e"} & set(shown)
    assert len(json.dumps(events)) < 20_000
    ((_, _, name, _, _),) = perfetto_slices(profile, tmp_path)
    assert name == shown


def test_slices_that_overlap_without_nesting_get_further_tracks(tmp_path: Path) -> None:
    events = [Event("a", 0, 9_000), Event("b", 5_000, 9_000), Event("c", 6_000, 2_000)]
    slices = perfetto_slices(read(tmp_path, Plane("p", [Line("Async", events)])), tmp_path)
    assert sorted(slices) == [
        ("p", "Async", n, s, e) for n, s, e in [("a", 0, 9), ("b", 5, 14), ("c", 6, 8)]
    ]


def test_hosts_are_on_one_clock(tmp_path: Path) -> None:
    for name in ("h0", "h1"):
        write(tmp_path / f"{name}.xplane.pb", tpu(Event(FUSION, 5_000, 9_000)))
    slices = perfetto_slices(read_profile(tmp_path), tmp_path)
    starts = [(process, begin) for process, _, name, begin, _ in slices if name == "fusion.1"]
    assert starts == [("h0 /device:TPU:3", 5), ("h1 /device:TPU:3", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_both_traces_have_every_event(backend: str, tmp_path: Path) -> None:
    profile = read_profile(GOLDEN) if backend == "cpu" else read(tmp_path, *v6e_host())
    planes = [plane for space in profile.spaces for plane in space.planes]
    n_events = sum(len(plane.events) for plane in planes)
    total_us = sum(plane.events["dur_ps"].sum() for plane in planes) / 1e6
    slices = [event for event in chrome(profile, tmp_path) if event["ph"] == "X"]
    assert len(slices) == n_events
    assert sum(event["dur"] for event in slices) == pytest.approx(total_us)
    assert len(perfetto_slices(profile, tmp_path)) == n_events


def test_an_empty_profile_is_an_empty_trace(tmp_path: Path) -> None:
    profile = read(tmp_path, Plane("p"))
    assert chrome(profile, tmp_path) == []
    assert perfetto_slices(profile, tmp_path) == []
