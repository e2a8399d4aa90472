"""XPlane files of a run: read back by our reader and by JAX's."""

from collections import Counter
from pathlib import Path

from jax.profiler import ProfileData

from meshscope.readers.profile.wire import Message
from meshscope.readers.profile.xplane import read_xspace
from meshscope.reports.export.timeline import run_timeline, timeline_of
from meshscope.reports.export.xplane import SESSION, write_xplane


def test_every_execution_is_an_event_of_its_device(make_run, tmp_path: Path) -> None:
    timeline = timeline_of(run_timeline(make_run()))
    write_xplane(timeline, tmp_path)
    path = tmp_path / SESSION / "meshscope.xplane.pb"
    planes = list(ProfileData.from_file(str(path)).planes)
    assert [plane.name for plane in planes] == [f"/device:TPU:{n}" for n in range(8)]
    for device, plane in enumerate(planes):
        rows = timeline.rows.filter(device=device)
        lines = {line.name: list(line.events) for line in plane.lines}
        ops = [event for name, events in lines.items() if "XLA Ops" in name for event in events]
        of_device = rows.filter(rows["lane"] != "steps")
        names = [timeline.kinds[kind] for kind in of_device["kind"]]
        assert Counter(event.name for event in ops) == Counter(
            facts.get("hlo_name") or name for name, facts in names
        )
        assert sum(event.duration_ns for event in ops) == of_device["dur_ns"].sum()
        assert [event.name for event in lines["Steps"]] == ["prefill", "decode (1 of 9 steps)"]
    space = read_xspace(path)
    assert (space.host, len(space.planes)) == ("meshscope", 8)
    (first, *_) = Message(path.read_bytes()).messages(1)
    names = {one.message(2).text(2) for one in first.messages(5)}
    assert {"hlo_category", "axis", "bytes_accessed", "tf_op"} <= names
