"""`serve-sim --compile`: steps of a simulated server take the times of compiled programs."""

from pathlib import Path

import pytest

import meshscope
from meshscope.events.enums import Phase
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
