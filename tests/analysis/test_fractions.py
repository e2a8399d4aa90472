"""Every fraction that a run has is one: between 0 and 1, or named here with the reason."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import engine_steps
import polars as pl
import pytest
from goldens import GOLDENS

import meshscope

TESTS = Path(__file__).parents[1]
ROUNDING = 1e-9

# Fractions that may lie outside, each with its reason.
OUTSIDE = {
    "tokens_per_s_frac": "a change of throughput by a suggestion, +0.14 is 14 % more",
    "hbm_frac": "a step that does not fit needs more than the HBM has",
}

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


def fractions(value: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """Every number under a key that ends in _frac, with its place."""
    match value:
        case pl.DataFrame():
            yield from fractions(value.to_dicts(), at)
        case Mapping():
            for key, one in value.items():
                if str(key).endswith("_frac") and isinstance(one, int | float):
                    yield f"{at}.{key}", float(one)
                yield from fractions(one, f"{at}.{key}")
        case list() | tuple():
            for one in value:
                yield from fractions(one, at)


def check(run: meshscope.Run) -> None:
    """The fractions of the JSON document and of all metrics of a run; a program without times has none."""
    every = [*fractions(run.as_dict()), *fractions(run.metrics, "metrics")]
    outside = [
        one
        for one in every
        if not -ROUNDING <= one[1] <= 1 + ROUNDING and one[0].rpartition(".")[2] not in OUTSIDE
    ]
    assert outside == []


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
@pytest.mark.parametrize(
    "path", sorted((TESTS / "golden" / "hlo").glob("*.txt.gz")), ids=lambda p: p.name
)
def test_fractions_of_a_golden_program(path: Path, tmp_path: Path) -> None:
    golden = GOLDENS[path.name.split(".jax-")[0]]
    slices = f"{golden.n_slices}x" if golden.n_slices > 1 else ""
    mesh = ",".join(f"{axis}={size}" for axis, size in golden.axes)
    out = tmp_path / "run"
    check(meshscope.import_(path, topology=slices + golden.topology, mesh=mesh, out=out))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((TESTS / "published" / "programs").glob("*.hlo.txt.gz")), ids=lambda p: p.name
)
def test_fractions_of_a_published_program(path: Path, tmp_path: Path) -> None:
    chip, grid = re.findall(r"-(v[0-9]+[ep]?)_([0-9x]+)-", path.name)[0]
    n_devices = 1
    for size in grid.split("x"):
        n_devices *= int(size)
    out = tmp_path / "run"
    check(meshscope.import_(path, topology=f"{chip}:{grid}", mesh=f"x={n_devices}", out=out))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(engine_steps.CASES))
def test_fractions_of_an_engine_step(name: str, tmp_path: Path) -> None:
    check(engine_steps.replayed(name, tmp_path / "run"))


@pytest.mark.slow
def test_fractions_of_a_trace(tmp_path: Path) -> None:
    traces = TESTS / "golden" / "traces" / "vllm-tp2"
    check(meshscope.import_(traces, topology="h100:2", plan="tp=2", out=tmp_path / "run"))
