"""Programs of an engine become one step: rows, time, and messages of a failed worker."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshscope import workers
from meshscope.api.compile import compile as compile_model
from meshscope.api.predict import predict
from meshscope.api.request import CompileRequest
from meshscope.backends.compile import compile as compile_module
from meshscope.backends.compile.read import read_chunks
from meshscope.errors import CompileError, SpecError
from meshscope.events.enums import Part, Phase
from meshscope.model.layers import Fold, ShallowLayers
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs import frontends

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"  # by make_engine_steps.py


def experiment(**options: object) -> Experiment:
    request = CompileRequest(
        model="Qwen/Qwen3-32B",
        topology="v6e-8",
        plan="tp=8",
        layers=2,
        frontend=Frontend.VLLM_TPU,
        **({"batch": 16, "prompt": 512} | options),
    )
    made = request.experiment()
    return replace(made, program=replace(made.program, engine_version="0.32.0"))


def test_a_layer_of_the_model_program_stands_for_others() -> None:
    """Logits and sampler have programs of their own, which run once."""

    def step_s(times: int) -> float:
        layers = ShallowLayers(layers=(0, 1), folds=(Fold(first=0, n_layers=1, times=times),))
        (time,) = read_chunks(experiment(), Phase.DECODE, GOLDEN, layers=layers).times
        return time.step.value_s

    layer_s = step_s(2) - step_s(1)
    assert step_s(4) - step_s(1) == pytest.approx(3 * layer_s)
    (whole,) = read_chunks(experiment(), Phase.DECODE, GOLDEN).times
    parts = {part.part: part.compute_s + part.exposed_s for part in whole.parts}
    assert layer_s == pytest.approx((parts["attn"] + parts["mlp"]) / 2, rel=0.2)


def test_the_time_of_a_step_is_the_sum_of_its_programs() -> None:
    read = read_chunks(experiment(), Phase.DECODE, GOLDEN)
    assert len(read.steps) == 4
    total = sum(step.time.step.value_s for step in read.steps)
    assert read.times[0].step.value_s == pytest.approx(total)
    sampler = read.steps[-1]
    assert sampler.start_s == pytest.approx(total - sampler.time.step.value_s)
    starts = [row.start_s for row in read.rows if row.part is Part.SAMPLE]
    assert all(start is not None and start > sampler.start_s * 0.99 for start in starts)


def test_chunks_of_a_prompt_run_the_same_programs_for_longer() -> None:
    """The golden programs have 8,192 tokens: two chunks of a prompt of 16,384."""
    whole = read_chunks(experiment(prompt=8192, batch=1), Phase.PREFILL, GOLDEN)
    cut = read_chunks(
        experiment(prompt=16384, batch=1, prefill_chunk="8192"), Phase.PREFILL, GOLDEN
    )
    assert sum(row.count for row in cut.rows) == 2 * sum(row.count for row in whole.rows)
    assert cut.times[0].step.value_s > 2 * whole.times[0].step.value_s


def test_the_message_of_the_engine_is_shown(tmp_path, monkeypatch) -> None:
    said = {"type": "UnsupportedArchitectureError", "message": "not registered in tpu-inference"}
    answer = json.dumps({"error": said | {"is_ours": False, "errno": None}})
    monkeypatch.setattr(workers, "MAIN", ("-c", f"print('meshscope: ' + {answer!r})"))
    fake = type("Environment", (), {"python": sys.executable})
    monkeypatch.setattr(frontends, "installed_release", lambda *_: fake)
    with pytest.raises(CompileError, match=r"vllm-tpu 0\.32\.0 rejected .*not registered in tpu"):
        compile_module.compile_experiment(experiment(), tmp_path, progress=lambda *_: None)


def test_a_release_without_an_engine_is_refused() -> None:
    with pytest.raises(SpecError, match='frontend="jax" is no serving engine'):
        compile_model("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", engine_version="0.32.0")


def test_only_compile_takes_an_engine() -> None:
    with pytest.raises(SpecError, match="which only compile can do"):
        predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", frontend="vllm-tpu")


@pytest.mark.parametrize("option", ["partitioner", "loop", "kernels"])
def test_options_of_our_own_programs_are_refused(option: str) -> None:
    values = {"partitioner": "auto", "loop": "scan", "kernels": "off"}
    with pytest.raises(SpecError, match=f'{option}="{values[option]}" changes nothing'):
        compile_model(
            "Qwen/Qwen3-4B",
            topology="v6e-8",
            plan="tp=8",
            frontend="vllm-tpu",
            **{option: values[option]},
        )
