"""What the front end for MaxText takes and refuses, before its environment is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshscope.api.compile import compile as compile_model
from meshscope.api.request import CompileRequest
from meshscope.errors import MeshscopeError, MissingToolError, PlanError, SpecError
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.engines.engine_config import MAXTEXT_MODELS, maxtext_model, sizes_of
from meshscope.programs.frontends import check_can_compile


def experiment(
    model: str = "meta-llama/Llama-3.1-8B", plan: str = "tp=8", **options: object
) -> Experiment:
    request = CompileRequest(
        model=model, topology="v6e-8", plan=plan, frontend=Frontend.MAXTEXT, **options
    )
    made = request.experiment()
    return replace(made, program=replace(made.program, engine_version="0.2.5"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (experiment("google/gemma-2-2b"), SpecError, "MaxText has no configuration of this model"),
        (experiment(plan="dp=8", batch=8), PlanError, "dp is not supported. Use tp=8"),
        (experiment(plan="tp=8,sp"), PlanError, "sp is not supported. Use tp=8"),
        (experiment(weight_dtype="int8"), SpecError, "--weight-dtype int8: .* compiles bf16 only"),
        (experiment(cache_dtype="fp8"), SpecError, "--cache-dtype fp8: .* Use bf16"),
        (
            experiment(prompt=256, prefill_chunk="128"),
            SpecError,
            "one whole prompt at a time. Use 256",
        ),
        (
            experiment(batch=4, prompt=256, prefill_chunk="off"),
            SpecError,
            "--prefill-chunk off: .* Use 256",
        ),
    ],
    ids=lambda value: value.plan if isinstance(value, Experiment) else None,
)
def test_what_the_front_end_does_not_offer_is_refused(
    refused: Experiment, kind: type[MeshscopeError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        check_can_compile(refused)


def test_a_release_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(MissingToolError, match="meshscope engines install maxtext"):
        check_can_compile(experiment())


def test_an_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"no such known release. Use one of 0\.2\.5"):
        compile_model(
            "meta-llama/Llama-3.1-8B",
            topology="v6e-8",
            plan="tp=8",
            frontend="maxtext",
            engine_version="9.9",
        )


def test_a_program_of_prefill_takes_one_prompt() -> None:
    chunks = experiment(batch=64, prompt=1024).prefill_chunks

    assert (chunks.n_sequences, chunks.n_positions, chunks.count) == (1, 1024, 64)


def test_every_model_of_the_list_is_in_the_catalog_and_has_sizes() -> None:
    for name in MAXTEXT_MODELS:
        ids = [name, f"{name}-v0.1"] if name.startswith("mistralai/") else [name]
        model = read_model(ids[-1])
        assert maxtext_model(model) == MAXTEXT_MODELS[name]
        assert {"emb_dim", "num_query_heads", "vocab_size"} <= set(sizes_of(model))


def test_tuned_versions_have_the_architecture_of_their_base() -> None:
    assert maxtext_model(read_model("Qwen/Qwen3-30B-A3B-Instruct-2507")) == "qwen3-30b-a3b"
