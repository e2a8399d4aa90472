"""What the torch_xla front end cannot trace is refused by predict and compile alike, with one message."""

import pytest

import meshscope
from meshscope.errors import MeshscopeError


def _refusal(command: str, model: str, plan: str) -> str:
    options = {"topology": "v6e-8", "plan": plan, "frontend": "torchxla"}
    with pytest.raises(MeshscopeError) as refused:
        getattr(meshscope, command)(model, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "plan", "reason"),
    [
        ("google/gemma-4-12B", "pp=2,tp=4", "also differ in heads"),
        ("meta-llama/Llama-4-Scout-17B-16E", "pp=2,tp=4", "also differ in chunks"),
        ("google/gemma-3-4b-it", "pp=2,tp=4", "also differ in rotary embeddings"),
        ("microsoft/Phi-3-mini-4k-instruct", "pp=2,tp=4", "by the number of all heads"),
        ("zai-org/GLM-4.5-Air", "pp=2,tp=4", "(23 layers with 1 dense, 23 layers with 0 dense)"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "pp=2,tp=4", "does not split the indexer"),
        ("deepseek-ai/DeepSeek-V4-Flash", "pp=2,tp=4", "does not split the indexer"),
        ("Qwen/Qwen3.5-9B", "pp=2,tp=4", "has linear attention in some"),
        ("meta-llama/Llama-3.2-3B", "pp=8", "4 layers, 3 layers)"),
    ],
)
def test_plans_without_a_program_are_refused_by_all(model: str, plan: str, reason: str) -> None:
    message = _refusal("predict", model, plan)
    assert reason in message
    assert _refusal("compile", model, plan) == message


def test_a_plan_that_can_be_traced_is_predicted() -> None:
    run = meshscope.predict(
        "meta-llama/Llama-3.1-8B", topology="v6e-8", plan="pp=2,tp=4", frontend="torchxla"
    )
    assert run.time is not None
