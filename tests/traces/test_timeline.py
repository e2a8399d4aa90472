"""The timeline of an imported trace: single executions for metrics, SQL, exports and the report."""

import gzip
import json
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import made_kineto as made
import polars as pl
import pytest

import meshscope
from meshscope import Run
from meshscope.analysis import timeline
from meshscope.analysis.catalog import metric_inputs
from meshscope.api import export

GOLDEN = Path(__file__).parents[1] / "golden" / "traces" / "vllm-tp2"
STEPS = 6
LAST_EXECUTIONS = timeline.last_executions


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return meshscope.import_(GOLDEN, out=tmp_path_factory.mktemp("golden") / "run")


def random_kernels(seed: int) -> list[made.Event]:
    """Kernels on three streams that overlap at random, one in three a collective, in whole us."""
    rng = random.Random(seed)
    events: list[made.Event] = []
    for _ in range(120):
        start, dur = rng.randint(0, 900), rng.randint(1, 40)
        match rng.randint(0, 2):
            case 0:
                events.append(made.collective(made.NCCL, start, dur, (0, 1), rng.randint(1, 4)))
            case 1:
                events.append(made.kernel(made.GEMM, start, dur))
            case _:
                copy = made.kernel("Memcpy DtoD", start, dur, stream=9)
                events.append({**copy, "cat": "gpu_memcpy"})
    return events


@pytest.mark.slow
def test_metrics_agree_with_the_sums_over_all_steps(golden: Run) -> None:
    """The timeline holds all four steps of both ranks, so means of both are equal."""
    overlap = golden.metrics["overlap"]
    for load in golden.record.measured.loads:
        row = overlap.filter(phase=load.phase, device=load.device).row(0, named=True)
        assert row["exposed_s"] * row["n_steps_seen"] == pytest.approx(load.exposed_s)
        assert row["collective_s"] * row["n_steps_seen"] == pytest.approx(load.collective_s)
    assert set(overlap["n_steps_seen"]) == {1, 3}
    assert set(golden.metrics["exposed_by"]["axis"]) == {"tp"}
    bursts = golden.metrics["traffic_intervals"].filter(source="measured")
    assert (set(bursts["unit"]), set(bursts["n_bursts"])) == ({"s"}, {73})


def test_sql_reads_every_execution(golden: Run) -> None:
    runs = meshscope.open(golden.path.parent / "*")
    query = """
        select phase, step_class, step, device, count(*) n, count(kind) collectives,
               count(distinct stream) streams, sum(dur_s) dur_s
        from timeline group by all order by phase, step, device
    """
    rows = runs.sql(query)
    assert len(rows) == 8
    assert set(rows["n"]) == {147}
    assert set(rows["collectives"]) == {73}
    assert rows.filter(pl.col("phase") == "decode")["step"].to_list() == [0, 0, 1, 1, 2, 2]
    assert rows["dur_s"].sum() == pytest.approx(runs.timeline["dur_s"].sum())
    kernels = runs.sql("select distinct opcode from timeline where kind is null order by opcode")
    assert kernels["opcode"].to_list() == [
        f"nvjet_hsh_{part}" for part in ("attention", "embed", "lm_head", "mlp")
    ]


def long_trace(folder: Path, *, n_steps: int = STEPS) -> list[Path]:
    """Two ranks with decode steps of three kernels each."""
    name = "execute_10_context_0(sq0sk0sqsq0sqsk0)_generation_10(sq10sk1sqsq1sqsk1)"
    paths = []
    for rank in range(2):
        events = [
            event
            for step in range(n_steps)
            for event in made.vllm_step(
                name, 1000.0 * step, rank=rank, payload=64, ranks=(0, 1), first=3 * step + 1
            )
        ]
        content = made.document(events, rank=rank, world_size=2)
        paths.append(made.write(folder / f"rank{rank}.json", content))
    return paths


def limited(run: Run, monkeypatch: pytest.MonkeyPatch, max_rows: int) -> tuple[Any, pl.DataFrame]:
    """What metrics get of a run, and its timeline, if that has at most `max_rows`."""
    read = partial(LAST_EXECUTIONS, max_rows=max_rows)
    monkeypatch.setattr(timeline, "last_executions", read)
    inputs = metric_inputs(run.record)
    return inputs, inputs.timeline


@pytest.mark.slow
def test_a_long_trace_shows_its_last_whole_steps(tmp_path, monkeypatch) -> None:
    run = meshscope.import_(long_trace(tmp_path), out=tmp_path / "run")
    assert metric_inputs(run.record).sampled == ()
    inputs, shown = limited(run, monkeypatch, 13)
    assert sorted(set(shown["step"])) == [STEPS - 2, STEPS - 1]
    assert shown["n_steps"].unique().to_list() == [STEPS]
    assert inputs.sampled == (f"the last 2 of {STEPS} decode steps",)
    page = run.report(tmp_path / "report.html").read_text()
    assert f"the last 2 of {STEPS} decode steps" in page
    assert run.path is not None
    assert len(meshscope.open(run.path).sql("select * from timeline")) == 6 * STEPS


def test_a_trace_without_steps_and_a_long_step_show_their_beginning(tmp_path, monkeypatch) -> None:
    path = made.write(tmp_path / "rank0.json", made.document(random_kernels(1), world_size=2))
    run = meshscope.import_([path], out=tmp_path / "run")
    inputs, shown = limited(run, monkeypatch, 50)
    assert len(shown) == 50
    assert inputs.sampled == (f"the first 50 of {run.record.measured.trace.n_ops} ops",)
    run = meshscope.import_(long_trace(tmp_path, n_steps=1), out=tmp_path / "long")
    monkeypatch.setattr(timeline, "MAX_ROWS", 4)
    inputs, shown = limited(run, monkeypatch, 4)
    assert len(shown) == 4
    assert inputs.sampled == ("the first 4 ops of the last decode step",)


def slices_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The slices outside of the lane of steps, and the flows, of a Chrome trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == "steps"
    }
    slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) not in steps]
    return slices, [e for e in events if e["ph"] in "stf"]


def exported(run: Path | None, to: str, out: Path) -> Path:
    assert run is not None
    export.command(run=run, to=export.ExportFormat(to), out=out, force=False).show(as_json=False)
    return out


def test_a_chrome_trace_has_every_execution(golden: Run, tmp_path: Path, capsys) -> None:
    out = exported(golden.path, "chrome", tmp_path / "trace.json.gz")
    assert capsys.readouterr().err == f"wrote {out}\n"
    slices, flows = slices_of(out)
    assert len(slices) == 1_176
    reduces = [e for e in slices if e["args"].get("kind") == "all_reduce"]
    assert len(reduces) == 4 * 73 * 2
    assert {e["args"]["axis"] for e in reduces} == {"tp"}
    # Both ranks execute each all-reduce: one flow from the first to the second.
    assert len({e["id"] for e in flows}) == 4 * 73
    assert [sum(e["ph"] == ph for e in flows) for ph in "stf"] == [4 * 73, 0, 4 * 73]


def test_slices_of_a_lane_do_not_overlap(tmp_path: Path) -> None:
    path = made.write(tmp_path / "rank0.json", made.document(random_kernels(2), world_size=2))
    run = meshscope.import_([path], out=tmp_path / "run")
    slices, _ = slices_of(exported(run.path, "chrome", tmp_path / "trace.json.gz"))
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices:
        by_lane.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_lane.values():
        ordered = sorted(spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


@pytest.mark.slow
def test_reports_perfetto_and_plots_show_the_timeline(golden: Run, tmp_path: Path) -> None:
    page = golden.report(tmp_path / "report.html").read_text()
    for text in (
        *("One prefill step (measured)", "One decode step (measured)", "Steps: device time"),
        "Overlap, exposed and idle time",
    ):
        assert text in page
    perfetto = exported(golden.path, "perfetto", tmp_path / "t.json")
    assert "communication tp, stream 20" in perfetto.read_text()
    plots = exported(golden.path, "plots", tmp_path / "plots")
    assert (plots / "timeline-decode-measured.png").is_file()
