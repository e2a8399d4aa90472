"""What the torch_xla front end cannot trace is refused by predict and compile alike, with one message."""

import re

import pytest
from tables import table

import meshscope
from meshscope.errors import MeshscopeError


def _refusal(command: str, model: str, plan: str, topology: str, partitioner: str) -> str:
    options = {"topology": topology, "plan": plan, "partitioner": partitioner}
    with pytest.raises(MeshscopeError) as refused:
        getattr(meshscope, command)(model, frontend="torchxla", **options)
    return str(refused.value)


@table
def test_plans_without_a_program_are_refused_by_all(case: tuple[str, ...], reason: str) -> None:
    message = _refusal("predict", *case)
    assert re.search(reason, message)
    assert _refusal("compile", *case) == message
    assert _refusal("run", *case) == message


@table
def test_a_plan_that_can_be_traced_is_predicted(model: str, topology: str, plan: str) -> None:
    run = meshscope.predict(model, topology=topology, plan=plan, batch=8, frontend="torchxla")
    assert run.time is not None
