"""What each engine takes and refuses, before its environment is asked for."""

from dataclasses import replace
from typing import Any

import pytest
from tables import table

from meshscope.api.compile import compile as compile_model
from meshscope.api.request import CompileRequest
from meshscope.cost.predicted import predicted_times
from meshscope.errors import MissingToolError, PlanError, SpecError
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.program import Frontend, Program
from meshscope.programs.engines.engine_config import MAXTEXT_MODELS, maxtext_model, sizes_of
from meshscope.programs.environments import ENGINES, known_releases
from meshscope.programs.frontends import FRONTENDS, check_can_compile

VLLM, SGLANG, MAXTEXT = Frontend.VLLM_TPU, Frontend.SGLANG_JAX, Frontend.MAXTEXT
VERSIONS = {VLLM: "0.32.0", SGLANG: "0.0.2", MAXTEXT: "0.2.5"}
QWEN, LLAMA, GPT_OSS, V3 = (
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B",
    "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V3",
)
MOE = "Qwen/Qwen3-30B-A3B"


def experiment(
    frontend: Frontend, model: str, plan: str = "tp=8", version: str | None = None, **options: Any
) -> Experiment:
    request = CompileRequest(model=model, topology="v6e-8", plan=plan, frontend=frontend, **options)
    made = request.experiment()
    version = version or VERSIONS[frontend]
    return replace(made, program=replace(made.program, engine_version=version))


def test_every_engine_has_an_adapter_and_releases() -> None:
    assert set(FRONTENDS) == set(Frontend)
    served = {frontend for frontend in Frontend if frontend.is_served}
    assert served == {r.product for r in known_releases(ENGINES)}


@table
def test_what_an_engine_does_not_take_is_refused(frontend: Frontend, model, plan, options, message):
    refused = experiment(frontend, model, plan, **options)
    with pytest.raises((PlanError, SpecError), match=message):
        check_can_compile(refused)


@pytest.mark.parametrize(("frontend", "model"), [(SGLANG, QWEN), (MAXTEXT, LLAMA), (VLLM, QWEN)])
def test_a_release_is_installed_and_known(frontend: Frontend, model: str) -> None:
    with pytest.raises(MissingToolError, match=f"meshscope engines install {frontend}"):
        check_can_compile(experiment(frontend, model))
    known = rf"no such known release. Use one of (.*, )?{VERSIONS[frontend]}"
    with pytest.raises(SpecError, match=known):
        compile_model(model, topology="v6e-8", plan="tp=8", frontend=frontend, engine_version="9.9")


def test_an_option_of_our_own_programs_is_refused_with_the_name_of_the_front_end() -> None:
    with pytest.raises(SpecError, match=r"sglang-jax. compiles the engine's own program"):
        compile_model(QWEN, topology="v6e-8", plan="tp=8", frontend="sglang-jax", kernels="off")


def test_a_prediction_of_an_engine_has_the_kernels_that_the_engine_runs() -> None:
    engine = experiment(SGLANG, QWEN, dtype="bf16")
    of_jax = replace(engine, program=Program())
    times = [predicted_times(of)[0].step.value_s for of in (engine, of_jax)]
    assert engine.kernels == of_jax.kernels
    assert engine.kernels.prefill_attention.kernel is Kernel.SPLASH
    assert times[0] == pytest.approx(times[1])


def test_a_program_of_prefill_takes_one_prompt_in_maxtext() -> None:
    chunks = experiment(MAXTEXT, LLAMA, batch=64, prompt=1024).prefill_chunks
    assert (chunks.n_sequences, chunks.n_positions, chunks.count) == (1, 1024, 64)


def test_every_model_of_maxtext_is_in_the_catalog_and_has_sizes() -> None:
    for name in MAXTEXT_MODELS:
        ids = [name, f"{name}-v0.1"] if name.startswith("mistralai/") else [name]
        model = read_model(ids[-1])
        assert maxtext_model(model) == MAXTEXT_MODELS[name]
        assert {"emb_dim", "num_query_heads", "vocab_size"} <= set(sizes_of(model))


def test_tuned_versions_have_the_architecture_of_their_base() -> None:
    assert maxtext_model(read_model("Qwen/Qwen3-30B-A3B-Instruct-2507")) == "qwen3-30b-a3b"
