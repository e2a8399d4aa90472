"""Every fraction that a run has is one: between 0 and 1, or named in tools/evidence.py with the reason."""

from pathlib import Path

import pytest
from evidence import OUTSIDE, fractions_outside

import meshscope

TESTS = Path(__file__).parents[1]
MODELS = (
    *("Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b", "google/gemma-3-4b-it"),
    *("google/gemma-4-26B-A4B-it", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.2"),
)
SLICES = ("v4-16", "v5e-8", "v6e-8", "tpu7x-8", "2xv6e:2x2", "h100:8")
PLANS = ("tp=8", "tp=8,sp", "dp=8,ep=8", "fsdp=8", "pp=2,tp=4", "cp=2,tp=4")
SIZES = (
    {"batch": 1},
    {"batch": 16, "prompt": 128, "output": 2048},
    {"batch": 64, "prompt": 1024},
    {"batch": 8, "prompt": 8192, "output": 8, "weight_dtype": "int8"},
)


def check(run: meshscope.Run) -> None:
    assert fractions_outside(run) == []


def test_a_fraction_beyond_1_is_seen() -> None:
    run = meshscope.open(TESTS / "golden" / "run")[0]
    changed = {**run.as_dict(), "time": {"busy_frac": 1.1}}
    assert fractions_outside(run, changed) == [(".time.busy_frac", 1.1)]


def test_the_stored_readings_have_none() -> None:
    """Every golden and published program and every step of an engine, as `make evidence` reads them."""
    readings = (TESTS / "evidence" / "readings.txt").read_text()
    assert "collectives" in readings
    assert OUTSIDE not in readings


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_fractions_of_predictions(model: str) -> None:
    """A fifth of the slices and plans, with the sizes in turn; few of the plans do not divide the model."""
    cases = [(s, p) for s in SLICES for p in PLANS][MODELS.index(model) % 5 :: 5]
    n_checked = 0
    for number, (topology, plan) in enumerate(cases):
        try:
            run = meshscope.predict(
                model, topology=topology, plan=plan, **SIZES[number % len(SIZES)]
            )
        except meshscope.MeshscopeError:
            continue
        check(run)
        n_checked += 1
    assert n_checked >= len(cases) // 2


def test_a_step_that_reads_little_has_a_small_mbu() -> None:
    """It was 4.25: all experts and the whole cache over the time of a step that reads a few of them."""
    run = meshscope.predict("google/gemma-4-26B-A4B-it", topology="v6e-4", plan="tp=4")
    (row,) = run.metrics["mbu"].to_dicts()
    assert row["mbu_frac"] < 0.8
    assert row["read_bytes"] < run.memory.weights_bytes
    check(run)


def test_fractions_of_the_golden_run() -> None:
    check(meshscope.open(TESTS / "golden" / "run"))


@pytest.mark.slow
def test_fractions_of_a_trace(tmp_path: Path) -> None:
    traces = TESTS / "golden" / "traces" / "vllm-tp2"
    check(meshscope.import_(traces, topology="h100:2", plan="tp=2", out=tmp_path / "run"))
