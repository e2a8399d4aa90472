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
        ("deepseek-ai/DeepSeek-V3.2-Exp", "pp=2,tp=4", "does not split the indexer"),
        ("deepseek-ai/DeepSeek-V4-Flash", "pp=2,tp=4", "does not split the indexer"),
    ],
)
def test_plans_without_a_program_are_refused_by_all(model: str, plan: str, reason: str) -> None:
    message = _refusal("predict", model, plan)
    assert reason in message
    assert _refusal("compile", model, plan) == message


def test_a_plan_that_can_be_traced_is_predicted() -> None:
    run = meshscope.predict(
        "deepseek-ai/DeepSeek-V3", topology="v6e-256", plan="pp=8,tp=32", frontend="torchxla"
    )
    assert run.time is not None
