"""What CCL-Bench takes: a card, a trace where there are times, and both definitions told apart."""

import json
from pathlib import Path

import pytest
import yaml

from meshscope.exporters.ccl_bench import STEP, write_ccl_bench
from meshscope.exporters.ccl_metrics import TOLD
from meshscope.exporters.run_timeline import run_timeline


def exported(run, folder: Path) -> tuple[dict, list[dict], dict]:
    folder.mkdir()
    write_ccl_bench(run, run_timeline(run), folder)
    trace = folder / "steps.trace.json"
    events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
    told = json.loads((folder / "meshscope" / "metrics.json").read_text())
    return yaml.safe_load((folder / "card.yaml").read_text()), events, told


def test_all_25_metrics_are_told(make_run, tmp_path: Path) -> None:
    card, events, told = exported(make_run(), tmp_path / "x")
    assert len(TOLD) == 25
    assert list(told["metrics"]) == [metric.name for metric in TOLD]
    assert (card["metric_source"]["traces"], events) == ([], [])
    for entry in told["metrics"].values():
        for side in ("ours", "as_coded_by_ccl_bench"):
            assert (entry[side]["value"] is None) == ("reason" in entry[side])
    assert told["metrics"]["avg_step_time"]["as_coded_by_ccl_bench"]["reason"].startswith(
        "no trace"
    )


def test_no_json_lies_beside_the_card_but_traces(timed_run, tmp_path: Path) -> None:
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


def test_their_faults_show_in_the_figures(timed_run, tmp_path: Path) -> None:
    """Payload of a prefill step of one chip against input and output of all chips in four steps."""
    _, _, told = exported(timed_run, tmp_path / "x")
    entry = told["metrics"]["collective_vol_allreduce_gb"]
    prefill, decode = 5 * 4 * 64 * 4096 * 2, 5 * 4 * 4096 * 2
    assert entry["ours"]["value"] == pytest.approx(prefill / 1e9)
    theirs = entry["as_coded_by_ccl_bench"]["value"]
    assert theirs == pytest.approx(8 * 2 * (prefill + 3 * decode) / 1e9)
    rate = told["metrics"]["bandwidth_utilization_allreduce_group_6"]
    ours, coded = rate["ours"]["value"], rate["as_coded_by_ccl_bench"]["value"]
    assert ours == pytest.approx(4 * 64 * 4096 * 2 * 1.5 / 2e-6 / 1e9)
    # The median is a decode step's; eight devices share a name there, of which four talk.
    assert coded == pytest.approx(2 * 4 * 4096 * 2 / 2**30 * 2 * 7 / 8 / 2e-6)


def test_steps_are_those_that_the_tools_would_tell(timed_run, tmp_path: Path) -> None:
    _, _, told = exported(timed_run, tmp_path / "x")
    metrics = told["metrics"]
    prefill, decode = (s.dur_ns / 1e9 for s in run_timeline(timed_run).steps)
    assert metrics["ttft"]["as_coded_by_ccl_bench"]["value"] == pytest.approx(prefill)
    assert metrics["tpot"]["as_coded_by_ccl_bench"]["value"] == pytest.approx(decode)
