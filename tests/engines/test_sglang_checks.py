"""What the front end for SGLang-JAX takes and refuses, before its environment is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshscope.api.compile import compile as compile_model
from meshscope.api.request import CompileRequest
from meshscope.cost.predicted import predicted_times
from meshscope.errors import MeshscopeError, MissingToolError, PlanError, SpecError
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.program import Frontend, Program
from meshscope.programs.environments import ENGINES, known_releases
from meshscope.programs.frontends import FRONTENDS, check_can_compile


def experiment(
    model: str = "Qwen/Qwen3-8B", plan: str = "tp=8", version: str = "0.0.2", **options: object
) -> Experiment:
    request = CompileRequest(
        model=model, topology="v6e-8", plan=plan, frontend=Frontend.SGLANG_JAX, **options
    )
    made = request.experiment()
    return replace(made, program=replace(made.program, engine_version=version))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_every_engine_has_an_adapter_whose_module_exists() -> None:
    folder = Path(__file__).parents[2] / "src" / "meshscope" / "programs" / "engines"

    served = {frontend for frontend in Frontend if frontend.is_served}
    assert set(FRONTENDS) == set(Frontend)
    assert served == {r.product for r in known_releases(ENGINES)}
    for frontend in served:
        assert (folder / f"{FRONTENDS[frontend].module}.py").is_file()


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (experiment(plan="fsdp=8", batch=8), PlanError, "takes tp, dp, ep, not fsdp"),
        (experiment(plan="tp=8,sp"), PlanError, "takes tp, dp, ep, not sp"),
        (experiment(plan="dp=2,tp=4", batch=8), PlanError, "run tp alone. Use tp=8"),
        (experiment("Qwen/Qwen3-30B-A3B", "tp=8,ep=8"), PlanError, "run tp alone. Use tp=8"),
        (experiment(weight_dtype="int8"), SpecError, "--weight-dtype int8: .* compiles bf16 only"),
        (experiment("openai/gpt-oss-20b", dtype="bf16"), SpecError, "whole keys and values only"),
        (experiment("deepseek-ai/DeepSeek-V3", dtype="bf16"), SpecError, "whole keys and values"),
    ],
    ids=lambda value: value.plan if isinstance(value, Experiment) else None,
)
def test_what_the_front_end_does_not_offer_is_refused(
    refused: Experiment, kind: type[MeshscopeError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        check_can_compile(refused)


def test_a_release_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(MissingToolError, match="meshscope engines install sglang-jax"):
        check_can_compile(experiment())


def test_an_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"no such known release. Use one of 0\.0\.2"):
        compile_model(
            "Qwen/Qwen3-8B",
            topology="v6e-8",
            plan="tp=8",
            frontend="sglang-jax",
            engine_version="9.9",
        )


def test_an_option_of_our_own_programs_is_refused_with_the_name_of_the_front_end() -> None:
    with pytest.raises(SpecError, match=r"sglang-jax. compiles the engine's own program"):
        compile_model(
            "Qwen/Qwen3-8B", topology="v6e-8", plan="tp=8", frontend="sglang-jax", kernels="off"
        )


def test_a_prediction_of_an_engine_has_the_kernels_that_the_engine_runs() -> None:
    engine = experiment(dtype="bf16")
    of_jax = replace(engine, program=Program())

    times = [predicted_times(of)[0].step.value_s for of in (engine, of_jax)]

    assert engine.kernels == of_jax.kernels
    assert engine.kernels.prefill_attention.kernel is Kernel.SPLASH
    assert times[0] == pytest.approx(times[1])
