"""Chakra traces: sizes, types, groups and dependencies of nodes."""

import json
from pathlib import Path

import ccl_bench_metrics as ccl_bench
import pytest
import yaml
from made_traces import decoded

from meshscope.errors import SpecError
from meshscope.readers.profile.wire import read_varint
from meshscope.reports.export.ccl_bench import STEP, ccl_metrics, write_ccl_bench
from meshscope.reports.export.chakra import write_chakra
from meshscope.reports.export.timeline import run_timeline


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


def exported(run, folder: Path) -> tuple[dict, list[dict], dict]:
    """The card, the events of the trace, and the metrics document."""
    folder.mkdir()
    write_ccl_bench(run, run_timeline(run), folder)
    trace = folder / "steps.trace.json"
    events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
    document = json.loads((folder / "meshscope" / "metrics.json").read_text())
    return yaml.safe_load((folder / "card.yaml").read_text()), events, document


def test_all_25_metrics_have_a_value_or_a_reason(make_run, tmp_path: Path) -> None:
    card, events, document = exported(make_run(), tmp_path / "x")
    assert len(ccl_metrics()) == 25
    assert list(document["metrics"]) == list(ccl_metrics())
    assert (card["metric_source"]["traces"], events) == ([], [])
    for entry in document["metrics"].values():
        assert (entry["ours"]["value"] is None) == ("reason" in entry["ours"])


def test_only_traces_are_json_files_next_to_the_card(timed_run, tmp_path: Path) -> None:
    exported(timed_run, tmp_path / "x")
    assert {p.name for p in (tmp_path / "x").glob("*.json")} == {"steps.trace.json"}


def test_the_trace_has_what_the_tools_look_for(timed_run, tmp_path: Path) -> None:
    card, events, _ = exported(timed_run, tmp_path / "x")
    assert card["metric_source"]["traces"] == ["json_tpu"]
    assert card["workload"]["model"]["iteration"] == 4
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"/host:CPU", *(f"/device:TPU:{i}" for i in range(8))}
    assert sum(e["name"] == STEP for e in events) == 4
    reduces = [
        e for e in events if e["ph"] == "X" and e["args"].get("hlo_category") == "all-reduce"
    ]
    assert {e["args"]["bytes_accessed"] for e in reduces} == {
        str(2 * 4 * 64 * 4096 * 2), str(2 * 4 * 4096 * 2),
    }  # fmt: skip
    same = [e for e in reduces if e["args"]["all_reduce_unique_id"] == "1"]
    assert {e["pid"] for e in same} == set(range(1, 9))


def test_volumes_and_bandwidths_of_both_definitions(timed_run, tmp_path: Path) -> None:
    """Payload of one prefill step on one chip, against input and output of all chips in four steps."""
    _, events, document = exported(timed_run, tmp_path / "x")
    name = "collective_vol_allreduce_gb"
    prefill, decode = 5 * 4 * 64 * 4096 * 2, 5 * 4 * 4096 * 2
    assert document["metrics"][name]["ours"]["value"] == pytest.approx(prefill / 1e9)
    theirs = ccl_bench.METRICS[name](events)
    assert theirs == pytest.approx(8 * 2 * (prefill + 3 * decode) / 1e9)
    name = "bandwidth_utilization_allreduce_group_6"
    ours, theirs = document["metrics"][name]["ours"]["value"], ccl_bench.METRICS[name](events)
    assert ours == pytest.approx(4 * 64 * 4096 * 2 * 1.5 / 2e-6 / 1e9)
    # The median is a decode step; eight devices share a name there, four of which form a group.
    assert theirs == pytest.approx(2 * 4 * 4096 * 2 / 2**30 * 2 * 7 / 8 / 2e-6)


def test_the_tools_read_the_steps_that_the_trace_holds(timed_run, tmp_path) -> None:
    _, events, _ = exported(timed_run, tmp_path / "x")
    prefill, decode = (s.dur_ns / 1e9 for s in run_timeline(timed_run).steps)
    assert ccl_bench.METRICS["ttft"](events) == pytest.approx(prefill)
    assert ccl_bench.METRICS["tpot"](events) == pytest.approx(decode)


def test_the_tool_knows_only_metrics_of_the_document() -> None:
    assert set(ccl_bench.METRICS) <= ccl_metrics().keys()
