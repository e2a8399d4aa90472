"""Timelines of runs: tracks, flows, counters and times."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from made import experiment_with, of_source, varied
from tables import table

from meshscope.analysis.join import Verdict, compare
from meshscope.analysis.overlap import exposed_by, overlap
from meshscope.analysis.timeline import OPS, modeled_timeline
from meshscope.backends.compile.read import read_phase
from meshscope.cost.collectives import predict
from meshscope.cost.steps import TimedStep, timeline_table
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.schema import POLARS_SCHEMA, table_of
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.timeline import run_timeline, timeline_of
from meshscope.store.read import read_run
from meshscope.store.write import write_run


def chrome(run, path: Path) -> list[dict]:
    write_chrome([timeline_of(run_timeline(run))], path, is_gzipped=False)
    return json.loads(path.read_text())["traceEvents"]


def slices(run, path: Path) -> list[tuple[str, str, dict]]:
    """(process, thread, event) of every slice; checks that no slice of a thread overlaps another."""
    events = chrome(run, path)
    named = [e for e in events if e["name"] in {"process_name", "thread_name"}]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in named}
    drawn = [e for e in events if e["ph"] == "X"]
    places = sorted((e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in drawn)
    assert all(a[:2] != b[:2] or a[3] <= b[2] for a, b in pairwise(places))
    return [(names[e["pid"], None], names[e["pid"], e["tid"]], e) for e in drawn]


def test_tracks_are_devices_and_their_lanes_with_every_collective_of_their_groups(
    make_run, tmp_path: Path
) -> None:
    drawn = slices(make_run(), tmp_path / "t")
    lanes = ("steps", "communication tp")
    assert {(process.partition(":")[0], thread) for process, thread, _ in drawn} == {
        (f"device {i}", lane) for i in range(8) for lane in lanes
    }
    plan = drawn[0][0]
    assert "on v6e:2x4 (8 chips), dp=2,tp=4" in plan
    assert "order, not time" in plan
    run = make_run()
    n_rows = sum(row.count for row in run.rows)
    drawn = slices(run, tmp_path / "t")
    assert sum(thread.startswith("communication") for _, thread, _ in drawn) == 8 * n_rows
    assert sum("kind" in event["args"] for *_, event in drawn) == 8 * n_rows


@pytest.mark.parametrize("plan", ["pp=2,tp=4", "pp=4,tp=2"])
def test_the_devices_of_a_stage_have_its_rows(make_run, tmp_path: Path, plan: str) -> None:
    """Uneven stages; a stage sends in its row, and the next one receives without a kind."""
    run = make_run(plan=plan, n_layers=6)
    events = [e for e in chrome(run, tmp_path / "t") if e["ph"] == "X"]
    n_stages = int(plan[3])
    for device in range(8):
        stage = device // (8 // n_stages)
        of_device = [e for e in events if e["pid"] == device + 1]
        drawn = Counter(
            (e["args"]["kind"], e["args"].get("layer")) for e in of_device if "kind" in e["args"]
        )
        expected: Counter = Counter()
        for row in run.rows:
            if row.stage in {None, stage}:
                expected[row.kind.value, "outside" if row.layer is None else row.layer] += row.count
        assert drawn == expected
        received = [e for e in of_device if e["name"] == f"receive from stage {stage - 1}"]
        assert len(received) == sum(
            r.count for r in run.rows if r.part == "stage" and r.stage == stage - 1
        )


@pytest.fixture(scope="module")
def pipeline() -> tuple[Experiment, list[Collective], TimedStep]:
    """Two micro-batches of a TorchXLA prefill in two stages, with their times.

    `meshscope compile Qwen/Qwen3-0.6B --frontend torchxla --topology v6e-4 --plan pp=2,tp=2 --layers 2 --batch 4
    --prompt 128 --output 8`, torch_xla 2.9.0 and libtpu 0.0.42.1; paths of the machine are cut.
    """
    experiment = experiment_with(
        "Qwen/Qwen3-0.6B", "pp=2,tp=2", "v6e-4", batch=4, prompt=128, output=8, n_layers=2
    )
    program = replace(experiment.program, frontend=Frontend.TORCHXLA)
    experiment = replace(experiment, program=program)
    path = Path(__file__).parents[2] / "golden/torchxla/pipeline.prefill.hlo.txt.gz"
    return (experiment, *read_phase(experiment, Phase.PREFILL, path))


def test_devices_of_a_torchxla_pipeline_have_the_rows_and_work_of_their_stage(
    pipeline, make_run, tmp_path: Path
) -> None:
    experiment, rows, step = pipeline
    planned = [row for row in predict(experiment) if row.phase is Phase.PREFILL]
    assert {match.verdict for match in compare(planned, rows).matches} == {Verdict.EQUAL}
    facts = {"source": Source.COMPILED, "phases": (Phase.PREFILL,), "experiment": experiment.record}
    run = varied(make_run(), manifest=facts, path=tmp_path, rows=tuple(rows), memory={})
    write_run(tmp_path, run, metrics={})
    timeline_table([step]).write_parquet(tmp_path / TIMELINE)
    events = [e for e in chrome(run, tmp_path / "t") if e["ph"] == "X"]
    for device, stage in enumerate((0, 0, 1, 1)):
        of_device = [e for e in events if e["pid"] == device + 1]
        drawn = Counter(
            (e["args"]["kind"], e["args"]["part"], e["args"].get("layer"))
            for e in of_device
            if "kind" in e["args"]
        )
        expected: Counter = Counter()
        for row in rows:
            if row.stage in {None, stage}:
                layer = "outside" if row.layer is None else row.layer
                expected[row.kind.value, row.part, layer] += row.count
        assert drawn == expected
        work = {e["args"].get("stage") for e in of_device if "activity" in e["args"]}
        assert work == {None, stage}
        layers = {e["name"] for e in of_device if e["name"].startswith("layer")}
        assert layers == {f"layer {stage}"}
        received = [e for e in of_device if e["name"] == "receive from stage 0"]
        assert len(received) == 2 * stage
        assert all(
            e["args"]["exposed_s"] * 1e6 == pytest.approx(e["dur"], abs=1e-3) for e in received
        )
    end_s = max(e["ts"] + e["dur"] for e in events) / 1e6
    assert end_s == pytest.approx(step.time.step.value_s, abs=2e-9)  # whole nanoseconds


def test_times_of_a_torchxla_pipeline_agree_in_tables_and_timeline(pipeline) -> None:
    _, rows, step = pipeline
    timeline = modeled_timeline(timeline_table([step]), table_of(rows))
    (row,) = overlap(timeline).iter_rows(named=True)
    for name in ("compute_s", "exposed_s", "idle_s"):
        assert row[name] == pytest.approx(getattr(step.time, name)), name
    exposed = {axis: seconds for *_, axis, seconds in exposed_by(timeline).iter_rows()}
    assert exposed == pytest.approx(step.time.exposed_by_axis_s)
    parts_s = step.time.compute_s + step.time.exposed_s + step.time.idle_s
    assert parts_s == pytest.approx(step.time.step.value_s)
    assert 0 < step.time.bubble_s <= step.time.idle_s


@table
def test_a_layer_is_one_slice_although_the_compiler_moves_its_operations(
    make_run, tmp_path, spans: tuple[tuple[str, int], ...], expected
) -> None:
    """Both layers run twice."""
    folded = pl.DataFrame(
        [
            {
                **dict.fromkeys(FOLDED_SCHEMA), "source": "compiled", "phase": "decode", "lane": "core",
                "start_s": at * 1e-6, "dur_s": 1e-6, "layers": [layer], "repeats": [2],
                "periods_s": [5e-6], "hlo_name": name, "activity": "matmuls",
            }
            for at, (name, layer) in enumerate(spans)
        ],
        schema=FOLDED_SCHEMA,
    )  # fmt: skip
    facts = {"source": Source.COMPILED, "phases": (Phase.DECODE,)}
    run = varied(make_run(), manifest=facts, path=tmp_path, rows=())
    write_run(tmp_path, run, metrics={})
    folded.write_parquet(tmp_path / TIMELINE)
    events = [e for e in chrome(run, tmp_path / "t") if e["ph"] == "X" and e["pid"] == 1]
    layers = [
        (e["args"]["layer"], e["ts"], e["dur"]) for e in events if e["name"].startswith("layer")
    ]
    assert sorted(layers, key=lambda layer: layer[1]) == [tuple(one) for one in expected]
    compute = [e["args"] for e in events if "activity" in e["args"]]
    assert [arguments["layer"] for arguments in compute] == [layer for _, layer in spans] * 2


def test_flows_join_the_devices_of_a_group(make_run, tmp_path: Path) -> None:
    members: dict[int, list[int]] = {}
    positions: dict[int, str] = {}
    for event in chrome(make_run(), tmp_path / "t"):
        if event["ph"] in "stf":
            members.setdefault(event["id"], []).append(event["pid"] - 1)
            positions[event["id"]] = positions.get(event["id"], "") + event["ph"]
    assert {tuple(group) for group in members.values()} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert set(positions.values()) == {"sttf"}


def test_known_times_are_kept(timed_run, tmp_path: Path) -> None:
    drawn = slices(timed_run, tmp_path / "t")
    prefill = sorted(
        (e["ts"], e["ts"] + e["dur"]) for process, thread, e in drawn
        if process.startswith("device 0:") and thread == "communication tp"
    )  # fmt: skip
    assert prefill[:3] == [(0, 2), (5, 7), (10, 12)]
    assert "(time)" in drawn[0][0]


def test_hostile_names_break_no_timeline(hostile_run, tmp_path: Path) -> None:
    events = chrome(hostile_run, tmp_path / "t")
    assert any(event["ph"] == "X" for event in events)
    text = json.dumps(events, ensure_ascii=False)
    assert not {"\x00", "\x1b", "\u202e"} & set(text)
    assert max(len(str(value)) for e in events for value in e.get("args", {}).values()) < 2_100


def ops_of(run) -> pl.DataFrame:
    """Every row of the run on each device in one step; device d starts d microseconds late."""
    records = []
    for row in run.rows:
        for device in range(8):
            record = {name: getattr(row, name, None) for name in POLARS_SCHEMA}
            record |= {
                "groups": [list(group) for group in row.groups], "n_groups": row.n_groups,
                "wire_bytes": float(row.wire_bytes), "shape": list(row.shape), "device": device,
                "start_s": (10 * (len(records) // 8) + device) * 1e-6, "dur_s": 5e-6,
                "time_basis": "measured", "hlo_name": f"psum.{len(records) // 8}", "step": 4,
            }  # fmt: skip
            records.append(record)
    return pl.DataFrame(records, schema={**POLARS_SCHEMA, "step": pl.Int64})


def test_the_last_stage_of_a_profiled_pipeline_only_receives(make_run, tmp_path: Path) -> None:
    """Its devices record the same permute as those that send."""
    run = of_source(make_run(plan="pp=2,tp=4"), Source.MEASURED)
    (tmp_path / "trace").mkdir()
    stage = pl.col("device").cast(pl.Int64) // 4
    ops = ops_of(run).filter(
        pl.col("stage").is_null() | (pl.col("part") == "stage") | (pl.col("stage") == stage)
    )
    ops.with_columns(stage=stage).write_parquet(tmp_path / OPS)
    write_run(tmp_path, run, metrics={})
    drawn = slices(read_run(tmp_path), tmp_path / "t.json")
    sends = [e["name"] for _, _, e in drawn if e["args"].get("part") == "stage"]
    n_sends = 4 * sum(row.part == "stage" for row in run.rows)
    assert Counter(sends) == {"permute stage": n_sends, "receive from stage 0": n_sends}


def test_every_device_has_its_own_times(make_run, tmp_path: Path) -> None:
    run = of_source(make_run(), Source.MEASURED)
    (tmp_path / "trace").mkdir()
    ops_of(run).write_parquet(tmp_path / OPS)
    write_run(tmp_path, run, metrics={})
    layout = run_timeline(read_run(tmp_path))
    assert layout.is_time
    first = [next(e for e in layout.of_device(d) if e.kind) for d in range(8)]
    assert [e.start_ns for e in first] == [1000 * d for d in range(8)]
    assert {e.collective_id for e in first} == {first[0].collective_id}
    path = tmp_path / "t.json"
    write_chrome([timeline_of(layout)], path, is_gzipped=False)
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and "kind" in e["args"] for e in events) == 8 * len(run.rows)
    assert sum(e["ph"] == "s" for e in events) == 2 * len(run.rows)
