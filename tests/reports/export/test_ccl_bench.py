"""The CCL-Bench export: card, trace and metrics, and what CCL-Bench's tools compute from the trace."""

import json
from pathlib import Path

import ccl_bench_metrics as ccl_bench
import pytest
import yaml

from meshscope.reports.export.ccl_bench import STEP, ccl_metrics, write_ccl_bench
from meshscope.reports.export.timeline import run_timeline


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
