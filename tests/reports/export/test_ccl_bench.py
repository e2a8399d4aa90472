"""The export for CCL-Bench: card, trace, and the metrics of both definitions."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml
from made import varied

from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE
from meshscope.reports.export.ccl_bench import ccl_metrics, write_ccl_bench
from meshscope.reports.export.ccl_tools import STEP
from meshscope.reports.export.timeline import run_timeline
from meshscope.store.run import RunRecord
from meshscope.store.write import write_run


def exported(run, folder: Path) -> tuple[dict, list[dict], dict]:
    """The card, the events of the trace, and the metrics."""
    folder.mkdir()
    document = write_ccl_bench(run, run_timeline(run), folder, folder.name)
    assert document == json.loads((folder / "meshscope" / "metrics.json").read_text())
    trace = folder / "steps.trace.json"
    events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
    card = yaml.safe_load((folder / f"{folder.name}.yaml").read_text())
    return card, events, document["metrics"]


def both(entries: dict, name: str) -> tuple[float | None, float | None]:
    """The values by meshscope's and CCL-Bench's definition."""
    return entries[name]["ours"]["value"], entries[name]["ccl_bench"]["value"]


def test_all_25_metrics_have_a_value_or_a_reason(make_run, timed_run, tmp_path: Path) -> None:
    card, events, entries = exported(make_run(), tmp_path / "x")
    assert (card["metric_source"]["traces"], events, len(entries)) == ([], [], 25)
    _, _, of_times = exported(timed_run, tmp_path / "y")
    for metrics in (entries, of_times):
        assert list(metrics) == list(ccl_metrics())
        for entry in metrics.values():
            for values in (entry["ours"], entry["ccl_bench"]):
                assert (values["value"] is None) == ("reason" in values)


def test_the_files_are_those_that_each_tool_looks_for(timed_run, tmp_path: Path) -> None:
    """All read the first *.yaml and *.json, one the only *.json.gz, with sizes in its name."""
    exported(timed_run, tmp_path / "x")
    names = {p.name for p in (tmp_path / "x").iterdir()}
    assert names == {"steps.trace.json", "BATCH-8-TP-4.json.gz", "x.yaml", "meshscope"}
    packed = gzip.decompress((tmp_path / "x" / "BATCH-8-TP-4.json.gz").read_bytes())
    assert packed == (tmp_path / "x" / "steps.trace.json").read_bytes()


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
    group = {e["args"]["all_reduce_unique_id"]: set() for e in reduces}
    for event in reduces:
        group[event["args"]["all_reduce_unique_id"]].add(event["pid"])
    assert set(map(frozenset, group.values())) == {frozenset(range(1, 5)), frozenset(range(5, 9))}


def test_the_tools_read_the_volumes_bandwidths_and_steps_of_the_trace(
    timed_run, tmp_path: Path
) -> None:
    """Payload of one prefill step on one chip, against input and output of all chips in four steps."""
    _, _, entries = exported(timed_run, tmp_path / "x")
    ours, theirs = both(entries, "collective_vol_allreduce_gb")
    prefill, decode = 5 * 4 * 64 * 4096 * 2, 5 * 4 * 4096 * 2
    assert ours == pytest.approx(prefill / 1e9)
    assert theirs == pytest.approx(8 * 2 * (prefill + 3 * decode) / 1e9)
    ours, theirs = both(entries, "bandwidth_utilization_allreduce_group_6")
    assert ours == pytest.approx(4 * 64 * 4096 * 2 * 1.5 / 2e-6 / 1e9)
    assert theirs == pytest.approx(2 * 4 * 4096 * 2 / 2**30 * 1.5 / 2e-6)  # a decode step
    prefill, decode = (s.dur_ns / 1e9 for s in run_timeline(timed_run).steps)
    assert both(entries, "ttft") == pytest.approx((prefill, prefill))
    assert both(entries, "tpot") == pytest.approx((decode, decode))


@pytest.fixture
def compiled_run(make_run, tmp_path: Path) -> RunRecord:
    """Prefill and decode of 20 us: a product, attention, a copy, an all-reduce and an all-gather."""
    run = make_run()
    names = iter("ab" * 2)
    rows: list[Collective] = []
    for phase in Phase:
        kinds = dict.fromkeys(row.kind for row in run.rows)
        of_phase = [row for row in run.rows if row.phase is phase]
        firsts = [row for kind in kinds for row in of_phase if row.kind is kind][
            :: max(1, len(of_phase) - 1)
        ]
        rows += (
            replace(row, source=Source.COMPILED, hlo_name=next(names), layer=None, count=1)
            for row in firsts[:2]
        )
    spans: list[dict] = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        a, b = (row for row in rows if row.phase is phase)
        for at, dur, lane, facts in (
            (0, 6, "core", {"activity": "matmuls", "op_class": "matmul", "flops": 3e9, "hlo_name": "dot"}),
            (6, 3, "core", {"activity": "kernels", "op_class": "attention", "flops": 5e8, "hlo_name": "mha"}),
            (4, 7, "copy", {"op_class": "copy", "hbm_bytes": 4_000_000, "hlo_name": "copy-start.1"}),
            (12, 4, "collective", {"kind": a.kind.value, "axis": a.axis, "hlo_name": "a"}),
            (15, 5, "core", {"activity": "memory-bound ops", "op_class": "other", "hlo_name": "add"}),
            (20, 2, "collective", {"kind": b.kind.value, "axis": b.axis, "hlo_name": "b"}),
        ):  # fmt: skip
            common = {"source": "compiled", "phase": phase.value, "lane": lane, "repeats": []}
            times = {"start_s": at * 1e-6, "dur_s": dur * 1e-6, "periods_s": []}
            spans.append({**dict.fromkeys(FOLDED_SCHEMA), **common, **times, **facts})
    compiled = varied(run, manifest={"source": Source.COMPILED}, path=tmp_path, rows=tuple(rows))
    write_run(tmp_path, compiled, metrics={})
    pl.DataFrame(spans, schema=FOLDED_SCHEMA).write_parquet(tmp_path / TIMELINE)
    return compiled


def test_the_tools_print_what_the_export_says(compiled_run, tmp_path: Path) -> None:
    """Values that the tools of cornell-sysphotonics/ccl-bench@1d257f0 printed for this run."""
    _, events, entries = exported(compiled_run, tmp_path / "a-tpu-run")
    said = {name: entry["ccl_bench"]["value"] for name, entry in entries.items()}
    known = json.loads((Path(__file__).parent / "ccl_bench_printed.json").read_text())
    given = [name for name, value in known.items() if value is not None]
    assert [name for name, value in said.items() if value is not None] == given
    for name in given:  # two are rounded
        assert said[name] == pytest.approx(known[name], rel=2e-5, abs=1e-9), name
    assert sum(value is not None for value in said.values()) == 17
    names = {e["name"].partition(".")[0] for e in events if e["ph"] == "X"}
    assert {
        "matmul_convolution_fusion",
        "attention_custom-call",
        "copy-start",
        "copy-done",
    } <= names
