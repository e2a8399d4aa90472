"""What the torch_xla front end cannot trace is refused by predict and compile alike, with one message."""

import pytest

import meshscope
from meshscope.errors import MeshscopeError


def _refusal(command: str, model: str, plan: str, topology: str, partitioner: str) -> str:
    options = {"topology": topology, "plan": plan, "partitioner": partitioner}
    with pytest.raises(MeshscopeError) as refused:
        getattr(meshscope, command)(model, frontend="torchxla", **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (("deepseek-ai/DeepSeek-V3.2-Exp", "tp=8", "v6e-8", "auto"), "scatters positions"),
        (("deepseek-ai/DeepSeek-V4-Flash", "tp=8", "v6e-8", "auto"), "scatters positions"),
        (("google/gemma-4-12B", "tp=16", "v6e-16", "manual"), "one number of KV heads only"),
    ],
)
def test_plans_without_a_program_are_refused_by_all(case: tuple[str, ...], reason: str) -> None:
    message = _refusal("predict", *case)
    assert reason in message
    assert _refusal("compile", *case) == message


def test_a_plan_that_can_be_traced_is_predicted() -> None:
    run = meshscope.predict(
        "deepseek-ai/DeepSeek-V3", topology="v6e-256", plan="pp=8,tp=32", frontend="torchxla"
    )
    assert run.time is not None
