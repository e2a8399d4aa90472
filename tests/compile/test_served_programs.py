"""Programs of a few layers, and of servers, have the times of the compiled ones."""

from pathlib import Path

import pytest
from compared import compiled
from made import experiment_with

import meshscope
from meshscope.cost.collectives import predict
from meshscope.cost.steps import timeline_table
from meshscope.events.enums import Phase
from meshscope.events.timeline import unfolded
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Loop, Program
from meshscope.serving.simulation import PlacedPool

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

WHERE = {"model": "Qwen/Qwen3-0.6B", "topology": "v5e-4", "plan": "tp=4", "layers": 2}


def _served() -> tuple[float, PlacedPool]:
    """Seconds between tokens of requests that are served one by one, and the engine."""
    load = {"prompt": 64, "output": 2, "max_concurrency": 1, "requests": 2}
    run = meshscope.serve_sim(**WHERE, **load, separate_steps=True, compiled=True)
    figures = run.outcome.result.figures
    assert figures.tpot is not None
    return figures.tpot.mean_s, run.outcome.main


def test_steps_take_the_time_of_the_compiled_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "programs"
    monkeypatch.setenv("MESHSCOPE_CACHE", str(cache))
    run = meshscope.compile(**WHERE, prompt=64, output=2, out=tmp_path / "run")
    times = {
        time.phase: time.step.value_s for time in run.record.times if time.source == "compiled"
    }

    tpot_s, main = _served()
    assert tpot_s == pytest.approx(times[Phase.DECODE])
    assert main.pool.costs.mixed_s(0, 0.0, 64, 0.0) == pytest.approx(times[Phase.PREFILL])

    programs = main.programs
    assert programs is not None
    assert {phase: [*of] for phase, of in programs.ratios.items()} == {
        Phase.DECODE: [1],
        Phase.PREFILL: [64],
    }
    assert programs.code_bytes > 1e5
    assert programs.fits is True

    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.hlo.txt.gz")}
    assert _served()[0] == tpot_s  # from the cache
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.hlo.txt.gz")} == made


def _experiment(loop: Loop) -> Experiment:
    sizes = {"batch": 8, "prompt": 128, "output": 2, "n_layers": 12}  # of which eight are unrolled
    return experiment_with("Llama-3.2-3B", "tp=8", "v6e-8", program=Program(loop=loop), **sizes)


@pytest.mark.parametrize(
    "phase", [Phase.DECODE, pytest.param(Phase.PREFILL, marks=pytest.mark.matrix)]
)
def test_a_deep_step_takes_the_time_of_its_unrolled_layers(phase: Phase, tmp_path: Path) -> None:
    for loop in (Loop.AUTO, Loop.UNROLL):
        (tmp_path / loop).mkdir()
    auto, whole = (
        compiled(_experiment(loop), tmp_path / loop, [phase]) for loop in (Loop.AUTO, Loop.UNROLL)
    )
    (step,), (of_all,) = auto.steps, whole.steps
    # Weights are copied before the first layer in an order that depends on their number.
    assert step.time.step.value_s == pytest.approx(of_all.time.step.value_s, rel=0.02)
    assert step.time.exposed_s == pytest.approx(of_all.time.exposed_s, rel=0.02)
    predicted = [row for row in predict(_experiment(Loop.AUTO)) if row.phase is phase]
    assert len(auto.rows) == len(predicted)
    assert all(row.dur_s is not None and row.start_s is not None for row in auto.rows)
    spans = unfolded(timeline_table([step]))
    assert (spans["start_s"] + spans["dur_s"]).max() == pytest.approx(step.time.step.value_s)
    assert auto.timed_layers is not None
    assert whole.timed_layers is None


def test_several_loads_and_separate_pools_take_the_times_of_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One set of programs serves all loads of a table; a pool that only prefills has programs of its own."""
    monkeypatch.setenv("MESHSCOPE_CACHE", str(tmp_path))
    load = {"prompt": 64, "output": 2, "requests": 2, "compiled": True}
    run = meshscope.serve_sim(**WHERE, **load, max_concurrency=[1, 2], separate_steps=True)
    assert run.table is not None
    (curve,) = run.table.curves
    programs = curve.placed.programs
    assert programs is not None
    assert programs is run.outcome.main.programs
    assert {phase: [*of] for phase, of in programs.ratios.items()} == {
        Phase.DECODE: [1, 2],
        Phase.PREFILL: [64, 128],
    }
    (basis,) = (line for line in run.lines() if line.startswith("basis"))
    assert "4 programs of jax" in basis

    apart = meshscope.serve_sim(**WHERE, **load, max_concurrency=1, apart="1:1").outcome
    assert apart.prefill is not None
    assert apart.prefill.programs is not None
    assert apart.main.programs is not None
    assert [*apart.prefill.programs.ratios] == [Phase.PREFILL]
    assert [*apart.main.programs.ratios] == [Phase.DECODE]
    assert apart.result.figures.ttft is not None
    prefill_s = apart.prefill.pool.costs.mixed_s(0, 0.0, 64, 0.0)
    assert apart.result.figures.ttft.p50_s == pytest.approx(prefill_s)
