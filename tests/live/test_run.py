"""Runs on virtual CPU devices, and the session that holds their programs."""

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import polars as pl
import pytest
from jax.experimental.layout import Layout
from made import UNOPTIMIZED, experiment_with
from tables import table

from meshscope.analysis.join import compare
from meshscope.analysis.request import speculative_steps
from meshscope.backends.live.measurement import measured_of
from meshscope.backends.live.run import profiled_programs
from meshscope.backends.live.session import Session, host_tokens
from meshscope.backends.live.worker import HLO, TRACE
from meshscope.events.enums import Phase, Source
from meshscope.plans.experiment import experiment_of_record
from meshscope.programs.jax import build
from meshscope.programs.jax.values import random_weights
from meshscope.readers.profile.xplane import Profile, read_profile
from meshscope.store.read import read_run

# What a shell or another test may have set: COLUMNS folds the lines that are looked for below.
SET_OUTSIDE = {"XLA_FLAGS", "JAX_PLATFORMS", "COLUMNS"}
ASK = ("--batch", "4", "--prompt", "8", "--output", "4", "--profiled-steps", "2")


def meshscope(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshscope", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in SET_OUTSIDE}
    environment["XLA_FLAGS"] = UNOPTIMIZED
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def live(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run in float32, and its JSON output."""
    folder = tmp_path_factory.mktemp("live")
    plan = ("--topology", "cpu:4", "--plan", "dp=2,tp=2", "--loop", "scan")
    done = meshscope("run", str(config_file), *plan, *ASK, "--out", "r", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "request 3 of 3" in done.stderr
    assert json.loads(done.stdout)["measured"]["findings"] == []
    return folder / "r", json.loads(done.stdout)


def test_predicted_compiled_and_measured_agree(live) -> None:
    run = read_run(live[0])
    assert run.sources == tuple(Source)
    for source in (Source.COMPILED, Source.MEASURED):
        comparison = compare(run.rows_of(Source.PREDICTED), run.rows_of(source))
        assert comparison.is_exact
        assert comparison.matches
    assert live[1]["verdict"]["verdict"] == "equal"


def test_times_are_measured(live) -> None:
    run, document = read_run(live[0]), live[1]
    assert document["time"]["basis"] == "measured"
    assert all(document["time"][name] > 0 for name in ("prefill_s", "decode_step_s", "e2e_s"))
    assert document["latency"]["itl"]["n"] == 9
    assert run.measured.n_profiled_steps == {Phase.PREFILL: 1, Phase.DECODE: 2}
    assert run.measured.findings == ()
    assert {load.device for load in run.measured.loads} == {0, 1, 2, 3}
    assert {"prefill.compile", "decode.compile", "weights", "warm_up"} <= set(run.manifest.seconds)


def test_every_executed_op_has_its_phase_step_and_layer(live) -> None:
    ops = pl.read_parquet(live[0] / "trace" / "ops.parquet")
    assert ops["is_joined"].all()
    assert ops["phase"].null_count() == 0
    assert sorted(ops["step"].unique()) == [0, 1, 2]
    in_mlp = ops.filter(pl.col("kind") == "all_reduce", pl.col("part") == "mlp")
    counts = in_mlp.group_by("layer", "step", "device").len()["len"]
    assert counts.to_list() == [1] * (2 * 3 * 4)


def test_traces_for_viewers_are_written(live) -> None:
    trace = live[0] / "trace"
    (chrome,) = trace.glob("*.trace.json.gz")
    assert json.loads(gzip.decompress(chrome.read_bytes()))["traceEvents"]
    assert [path.suffixes for path in trace.glob("*.pb")] == [[".xplane", ".pb"]]


def test_text_shows_the_sources_side_by_side(live) -> None:
    shown = meshscope("show", str(live[0]), "--rows", folder=live[0].parent).stdout
    assert "complete: every collective of every device" in " ".join(shown.split())
    assert "TTFT" in shown
    assert "virtual devices share the cores" in shown
    assert "collectives: predicted = measured\ncollectives: compiled = measured\n" in shown
    compared = json.loads(
        meshscope("compare", str(live[0]), "--json", folder=live[0].parent).stdout
    )
    assert set(compared["verdicts"].values()) == {"equal"}
    assert len(compared["verdicts"]) == 3


def test_a_pipeline_has_its_sends_and_the_layers_of_each_stage(config_file, tmp_path) -> None:
    """Two layers in two stages: whatever a device executes in a layer is in that of its stage."""
    plan = ("--topology", "cpu:4", "--plan", "pp=2,tp=2", "--repeats", "1", "--dtype", "bf16")
    done = meshscope("run", str(config_file), *plan, *ASK, "--out", "r", "--full", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "XLA performs 16-bit collectives in float32" in done.stdout
    assert "collectives: predicted = measured" in done.stdout
    run = read_run(tmp_path / "r")
    assert run.measured.findings == ()
    ops = pl.read_parquet(tmp_path / "r" / TRACE / "ops.parquet")
    stage = pl.col("device") // 2
    of_layers = ops.filter(pl.col("layer").is_not_null())
    assert of_layers.select("device", "kind").unique().height == 8  # all reduce, and compute
    assert of_layers.filter(pl.col("layer") != stage).is_empty()
    assert ops.filter(pl.col("stage") != stage).is_empty()
    is_here = (
        pl.concat_list("device")
        .list.set_intersection(pl.col("groups").list.eval(pl.element().explode()))
        .list.len()
        > 0
    )
    assert ops.filter(pl.col("kind").is_not_null()).select(is_here.all()).item()
    profile = without_one_permute(read_profile(tmp_path / "r" / TRACE))
    n_steps = {Phase.PREFILL: 1, Phase.DECODE: 2}
    experiment = experiment_of_record(run.manifest.experiment)
    programs = list(profiled_programs(experiment, tmp_path / "r" / HLO, n_steps=n_steps))

    measured = measured_of(profile, programs, n_steps=n_steps)

    (finding,) = measured.findings
    (recorded,) = (tmp_path / "r" / TRACE).glob("*.xplane.pb")
    done = meshscope("import", str(recorded), *plan[:4], "--out", "i", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    imported = read_run(tmp_path / "i")
    assert compare(*map(imported.rows_of, (Source.COMPILED, Source.MEASURED))).is_exact
    assert all(p.n_as_compiled == p.n_collectives for p in imported.measured.trace.programs)
    assert re.search(r"'\S*permute\S*' of '\S*' was recorded \d+ times; \d+ runs", finding)


def without_one_permute(profile: Profile) -> Profile:
    ops = profile.ops
    permutes = ops.instructions.filter(pl.col("hlo_name").str.contains("permute"))
    events = ops.events.with_row_index()
    lost = events.filter(pl.col("op").is_in(permutes["op"].implode()))["index"][0]
    kept = events.filter(pl.col("index") != lost).drop("index")
    return replace(profile, ops=replace(ops, events=kept))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_make_one_run(config_file: Path, tmp_path: Path) -> None:
    """Groups of tp span both processes, and both profiles are in the run and in those of its parts."""
    speculate = ("--speculate", "eagle:k=2,acceptance=0.7", "--repeats", "1")
    address = ("--coordinator", f"127.0.0.1:{free_port()}", "--n-processes", "2")
    shared = (*speculate, *address, "--process-id")
    plan = (
        "--topology",
        "cpu:4",
        "--plan",
        "tp=2,dp=2",
        *ASK,
        "--layers",
        "1",
        "--out",
        "r",
        "--full",
    )
    with ThreadPoolExecutor() as both:
        first, second = both.map(
            lambda i: meshscope("run", str(config_file), *plan, *shared, str(i), folder=tmp_path),
            range(2),
        )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, "process 0 writes the run" in second.stderr) == ("", True)
    run = read_run(tmp_path / "r")
    for part in (run, *run.speculative.by_name.values()):
        assert compare(part.rows_of(Source.PREDICTED), part.rows_of(Source.MEASURED)).is_exact
        assert part.measured.findings == ()
        assert {load.device for load in part.measured.loads} == set(range(4))
        assert len(list((part.path / "trace").glob("*.xplane.pb"))) == 2
    (step,) = speculative_steps(run)
    assert step.source is Source.MEASURED
    verified = run.speculative.verify.measured
    assert step.verify.value_s == pytest.approx(verified.step_s[Phase.DECODE][0])
    assert "verify collectives: predicted = measured" in first.stdout
    assert "acceptance is the stated one, not measured" in first.stdout


@table
def test_a_user_error_is_one_message(config_file, tmp_path, options: tuple[str, ...], message):
    plan = ("--topology", "cpu:2", "--plan", "tp=2", "--prompt", "8", "--output", "4")
    done = meshscope("run", str(config_file), *plan, *options, "--out", "runs/r", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("chunk", "n_chunks"), [pytest.param(8, 2, marks=pytest.mark.matrix), (4, 4)]
)
def test_all_sources_count_the_chunks_of_prefill_on_devices_in_another_order(
    config_file, tmp_path, chunk, n_chunks
) -> None:
    """A data-parallel rank has two prompts of 8 tokens."""
    plan = ("--topology", "cpu:4", "--plan", "dp=2,tp=2", "--device-order", "3,1,2,0")
    ask = (*plan, "--repeats", "1", "--prefill-chunk", str(chunk), *ASK, "--out", "r")
    done = meshscope("run", str(config_file), *ask, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dp=2,tp=2 on devices in another order" in done.stdout
    run = read_run(tmp_path / "r")
    assert run.manifest.experiment.device_order == (3, 1, 2, 0)
    assert run.measured.findings == ()
    for source in Source:
        assert compare(run.rows_of(Source.PREDICTED), run.rows_of(source)).is_exact
        groups = {frozenset(g) for row in run.rows_of(source) for g in row.groups}
        assert groups == {frozenset({1, 3}), frozenset({0, 2})}
    prefill = [row for row in run.rows_of(Source.MEASURED) if row.phase is Phase.PREFILL]
    assert {row.count for row in prefill} == {n_chunks}


class _SlotsLast(Layout):
    """In the place of the compiler's choice, which on CPU is the usual layout."""

    AUTO = Layout(major_to_minor=(0, 2, 3, 1))


def _session(config_file: Path, *, prefill_chunk: int | None = None) -> Session:
    sizes = {"batch": 4, "prompt": 16, "output": 6, "prefill_chunk": prefill_chunk}
    asked = experiment_with(str(config_file), "dp=2,tp=2", "cpu:4", **sizes)
    return Session(
        asked,
        partial(build.build_program, asked, devices=jax.devices()[:4]),
        make_weights=lambda program: random_weights(program, seed=1),
        prompt=np.arange(64, dtype=np.int32).reshape(4, 16),
        report=lambda _: None,
    )


@pytest.fixture(scope="module")
def shared(config_file: Path) -> tuple[Session, list[list[int]]]:
    """A session whose phases share the layout of the cache, and the tokens of its request."""
    session = _session(config_file)
    return session, host_tokens(session.request()[1])


def test_a_separate_cache_layout_of_decode_gives_the_same_tokens(
    config_file, shared, monkeypatch
) -> None:
    session, tokens = shared
    monkeypatch.setattr(build, "MemoryLayout", _SlotsLast)
    monkeypatch.setattr(
        build, "compiler_lays_out_cache", lambda _experiment, phase: phase is Phase.DECODE
    )
    separate = _session(config_file)

    assert "{1,3,2,0}" in separate.hlo_texts()[Phase.DECODE].splitlines()[0]
    assert host_tokens(separate.request()[1]) == tokens
    cache = session.new_cache()
    session.compiled.clear()  # a timed step does not look for formats
    assert session.as_cache(cache) is cache


@pytest.mark.parametrize("chunk", [16, 8])
def test_chunks_of_a_prefill_give_the_tokens_of_the_whole_batch(config_file, shared, chunk) -> None:
    assert host_tokens(_session(config_file, prefill_chunk=chunk).request()[1]) == shared[1]
