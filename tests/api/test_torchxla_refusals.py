"""What the torch_xla front end cannot trace is refused by predict and compile alike, with one message."""

import re

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
        *(
            (
                (model, plan, "v6e-8", "manual"),
                f"{reason} attention.*program with {axes}. Use .*jax",
            )
            for model, reason in (
                ("Qwen/Qwen3-Next-80B-A3B-Instruct", "linear"),
                ("Qwen/Qwen3.5-9B", "linear"),
                ("deepseek-ai/DeepSeek-V3.2-Exp", "indexed"),
                ("zai-org/GLM-5", "indexed"),
                ("deepseek-ai/DeepSeek-V4-Flash", "compressed"),
            )
            for plan, axes in (
                ("pp=2,tp=4", "pp"),
                ("cp=2,tp=4", "cp"),
                ("pp=2,cp=2,tp=2", "pp or cp"),
            )
        ),
    ],
)
def test_plans_without_a_program_are_refused_by_all(case: tuple[str, ...], reason: str) -> None:
    message = _refusal("predict", *case)
    assert re.search(reason, message)
    assert _refusal("compile", *case) == message
    assert _refusal("run", *case) == message


@pytest.mark.parametrize(
    ("model", "topology", "plan"),
    [
        ("deepseek-ai/DeepSeek-V3", "v6e-256", "pp=8,tp=32"),
        ("deepseek-ai/DeepSeek-V3", "v6e-256", "cp=8,tp=32"),
        ("google/gemma-4-E2B-it", "v6e-8", "pp=2,cp=2,dp=2"),
        ("deepseek-ai/DeepSeek-V4-Flash", "v6e-8", "dp=2,tp=4,ep=8"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "v6e-8", "dp=2,tp=4,ep=8"),
    ],
)
def test_a_plan_that_can_be_traced_is_predicted(model: str, topology: str, plan: str) -> None:
    run = meshscope.predict(model, topology=topology, plan=plan, batch=8, frontend="torchxla")
    assert run.time is not None
