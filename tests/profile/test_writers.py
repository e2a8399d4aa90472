"""Chrome traces of profiles have every event, on nesting tracks, whatever its name."""

import gzip
import json
from pathlib import Path

import pytest
from made_profiles import FUSION, GOLDEN, REDUCE, Event, Line, Plane, tpu, v6e_host, write

from meshscope.readers.profile.xplane import Profile, profile_timeline, read_profile
from meshscope.reports.export.chrome import write_chrome

HOSTILE = '"},{"ph":"X\x00\x1b[31m\u202e\n' + "x" * 1_000_000


def chrome(profile: Profile, tmp_path: Path) -> list[dict[str, object]]:
    path = tmp_path / "t.trace.json.gz"
    timeline = profile_timeline(profile)
    write_chrome(timeline, path, is_gzipped=True, has_text_arguments=True)
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def slices(profile: Profile, tmp_path: Path) -> list[tuple[str, int, str, float, float]]:
    """(process, thread id, name, begin, end) of all slices; checks that those of a thread nest."""
    events = chrome(profile, tmp_path)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn = [
        (named[e["pid"]], e["tid"], e["name"], e["ts"], round(e["ts"] + e["dur"], 6))
        for e in events
        if e["ph"] == "X"
    ]
    for process, tid, _, begin, end in drawn:
        of_thread = [one[3:] for one in drawn if one[:2] == (process, tid)]
        assert not any(begin < start < end < stop for start, stop in of_thread)
    return drawn


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


def test_slices_that_overlap_without_nesting_get_further_tracks(tmp_path: Path) -> None:
    events = [Event("a", 0, 9_000), Event("b", 5_000, 9_000), Event("c", 6_000, 2_000)]
    profile = read(tmp_path, Plane("p", [Line("Async", events)]))
    assert sorted(slices(profile, tmp_path)) == [
        ("p", 1, "a", 0, 0.009), ("p", 1, "c", 0.006, 0.008), ("p", 2, "b", 0.005, 0.014),
    ]  # fmt: skip
    threads = {e["args"]["name"] for e in chrome(profile, tmp_path) if e["name"] == "thread_name"}
    assert threads == {"Async"}


def test_hosts_are_on_one_clock(tmp_path: Path) -> None:
    for name in ("h0", "h1"):
        write(tmp_path / f"{name}.xplane.pb", tpu(Event(FUSION, 5_000, 9_000)))
    drawn = slices(read_profile(tmp_path), tmp_path)
    starts = [(process, begin) for process, _, name, begin, _ in drawn if name == "fusion.1"]
    assert starts == [("h0 /device:TPU:3", 0.005), ("h1 /device:TPU:3", 0.005)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_the_trace_has_every_event(backend: str, tmp_path: Path) -> None:
    profile = read_profile(GOLDEN) if backend == "cpu" else read(tmp_path, *v6e_host())
    planes = [plane for space in profile.spaces for plane in space.planes]
    n_events = sum(len(plane.events) for plane in planes)
    total_us = sum(plane.events["dur_ps"].sum() for plane in planes) / 1e6
    drawn = [event for event in chrome(profile, tmp_path) if event["ph"] == "X"]
    assert len(drawn) == n_events
    assert sum(event["dur"] for event in drawn) == pytest.approx(total_us)


def test_an_empty_profile_is_an_empty_trace(tmp_path: Path) -> None:
    profile = read(tmp_path, Plane("p"))
    assert chrome(profile, tmp_path) == []
