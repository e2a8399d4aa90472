"""Exports to Chakra and to XPlane."""

import json
from collections import Counter
from pathlib import Path

import pytest
from jax.profiler import ProfileData
from made_traces import decoded

from meshscope.errors import SpecError
from meshscope.readers.profile.wire import Message, read_varint
from meshscope.readers.profile.xplane import read_xspace
from meshscope.reports.export.chakra import write_chakra
from meshscope.reports.export.timeline import run_timeline, timeline_of
from meshscope.reports.export.xplane import SESSION, write_xplane


def nodes(path: Path) -> list[dict]:
    """The nodes of a file after its metadata, each attribute by its name."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        length, at = read_varint(data, at)
        messages.append(decoded(data[at : at + length]))
        at += length
    metadata, *rest = messages
    assert metadata[1] == [b"0.0.4"]
    return [
        {
            "id": node[1][0],
            "name": node[2][0].decode(),
            "type": node[3][0],
            "deps": node[5],
            "times": (node[6], node[7]),
            **{
                attribute[1][0].decode(): next(
                    attribute[f][0] for f in (7, 9, 27, 29) if attribute[f]
                )
                for attribute in map(decoded, node[10])
            },
        }
        for node in rest
    ]


def test_the_nodes_of_a_device_form_a_chain(make_run, tmp_path: Path) -> None:
    run = make_run()
    write_chakra(run_timeline(run), tmp_path)
    groups = json.loads((tmp_path / "comm_groups.json").read_text())
    for device in range(8):
        device_nodes = nodes(tmp_path / f"prefill.{device}.et")
        assert len(device_nodes) == sum(r.count for r in run.rows if r.phase == "prefill")
        assert [node["deps"] for node in device_nodes] == [[]] + [
            [i] for i in range(1, len(device_nodes))
        ]
        assert all(device in groups[node["pg_name"].decode()] for node in device_nodes)
        assert all(node["times"] == ([], []) for node in device_nodes)
    assert sorted(groups.values()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(list(tmp_path.glob("*.et"))) == 16


def test_sizes_are_the_input_of_one_device(make_run, tmp_path: Path) -> None:
    run = make_run(plan="tp=8,sp")
    write_chakra(run_timeline(run), tmp_path)
    device_nodes = nodes(tmp_path / "prefill.0.et")
    payload = 8 * 64 * 4096 * 2
    sizes = {
        (node["comm_type"], node["comm_size"])
        for node in device_nodes
        if node["part"] != b"lm_head"
    }
    assert sizes == {(7, payload), (2, payload // 8)}
    assert {node["type"] for node in device_nodes} == {7}


def test_permutes_are_matching_sends_and_receives(make_run, tmp_path: Path) -> None:
    write_chakra(run_timeline(make_run(plan="pp=2,tp=4")), tmp_path)
    sent, received = [], []
    for device in range(8):
        for node in nodes(tmp_path / f"prefill.{device}.et"):
            transfer = tuple(node.get(k) for k in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
            if node["type"] == 5:
                assert transfer[0] == device
                sent.append(transfer)
            elif node["type"] == 6:
                assert transfer[1] == device
                received.append(transfer)
    assert sent
    assert sorted(sent) == sorted(received)


def test_known_times_are_microseconds(timed_run, tmp_path: Path) -> None:
    write_chakra(run_timeline(timed_run), tmp_path)
    device_nodes = nodes(tmp_path / "prefill.0.et")
    assert [node["times"] for node in device_nodes[:3]] == [([0], [2]), ([5], [2]), ([10], [2])]


def test_a_collective_of_unknown_size_is_refused(make_run, tmp_path: Path) -> None:
    from dataclasses import replace  # noqa: PLC0415

    run = make_run()
    rows = tuple(replace(row, payload_bytes=None, wire_bytes=None) for row in run.rows)
    with pytest.raises(SpecError, match="Export to another format, such as csv"):
        write_chakra(run_timeline(replace(run, rows=rows)), tmp_path)


def test_nodes_that_start_together_have_the_same_dependencies(make_run, tmp_path) -> None:
    """a, then b and c at once, d after b alone, e after all; a is implied for d."""
    from dataclasses import replace  # noqa: PLC0415

    layout = run_timeline(make_run())
    first = layout.executions[0]
    spans = {"a": (0, 10), "b": (10, 10), "c": (10, 90), "d": (20, 10), "e": (100, 1)}
    executions = tuple(
        replace(first, name=name, start_ns=start, dur_ns=dur)
        for name, (start, dur) in spans.items()
    )
    write_chakra(replace(layout, executions=executions, steps=layout.steps[:1]), tmp_path)
    device_nodes = nodes(tmp_path / "prefill.0.et")
    assert {node["name"]: node["deps"] for node in device_nodes} == {
        "a": [], "b": [1], "c": [1], "d": [2], "e": [3, 4],
    }  # fmt: skip


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
