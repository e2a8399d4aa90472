"""What follows from the one declaration of an option: signature, docstring, checks and names in messages."""

import inspect
import re
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest
from tables import table

import meshscope
from meshscope.api.compile import compilable_experiment
from meshscope.api.options import hints_of, other_names, request_of
from meshscope.api.plan import PlanRequest
from meshscope.api.predict import predict
from meshscope.api.request import CompileRequest, ExperimentRequest, LiveRequest, PredictRequest
from meshscope.api.serve import ServeRequest
from meshscope.errors import MeshscopeError, SpecError, kinds_of, with_keywords

FUNCTIONS = {
    meshscope.predict: PredictRequest,
    meshscope.compile: CompileRequest,
    meshscope.run: LiveRequest,
    meshscope.plan: PlanRequest,
    meshscope.serve_sim: ServeRequest,
}


@pytest.mark.parametrize(("function", "kind"), FUNCTIONS.items(), ids=lambda one: one.__name__)
def test_signature_and_docstring_have_every_option(function, kind) -> None:
    names = {one.name for one in fields(kind)}
    assert names <= set(inspect.signature(function).parameters)
    documented = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")[2].splitlines()
    assert names <= {line.strip().partition(":")[0] for line in documented}


def test_an_unknown_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"predict\(\) got an unexpected keyword argument 'btch'"):
        meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", btch=1)
    with pytest.raises(TypeError, match=r"compile\(\) missing a required .*'topology'"):
        meshscope.compile("Qwen/Qwen3-4B", plan="tp=8")


@table
def test_messages_name_options_as_the_caller_wrote_them(message: str, expected: str) -> None:
    kinds = {name: kinds_of(hint) for name, hint in hints_of(PredictRequest).items()}
    assert with_keywords(message, kinds, other_names(PredictRequest)) == expected


DENSE = {"model": "Qwen/Qwen3-4B", "topology": "v6e-8", "plan": "tp=8"}


@table
def test_an_option_without_effect_is_refused(option, value, others, reason) -> None:
    with pytest.raises(SpecError) as caught:
        predict(**others, **{option: value})
    message = str(caught.value)
    shown = f'"{value}"' if isinstance(value, str) else value
    assert message.startswith(f"{option}={shown} changes nothing: ")
    assert reason in message
    assert message.endswith(". Drop it.")


@table
def test_an_option_with_an_effect_passes(effective: dict[str, Any]) -> None:
    request_of(ExperimentRequest, effective).experiment()


def test_a_loop_is_for_programs_not_for_predictions() -> None:
    with pytest.raises(SpecError, match='loop="scan" changes nothing: a prediction has unrolled'):
        predict(**DENSE, loop="scan")
    compiled = request_of(CompileRequest, {**DENSE, "loop": "scan"})
    assert compilable_experiment(compiled)[0].is_scanned


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


Dtype = Enum("Dtype", {"HALF": "bf16"}, type=str)


def test_an_enum_that_is_text_has_its_value() -> None:
    run = meshscope.predict(**DENSE, dtype=Dtype.HALF)
    assert run.experiment.workload.activation_dtype == "bf16"


def test_what_python_passes_by_mistake_gets_a_message() -> None:
    run = meshscope.predict(**DENSE)
    with pytest.raises(SpecError, match=r"a query is text, not None\. "):
        run.sql(None)
    with pytest.raises(MeshscopeError, match=r"^the run has only the source predicted"):
        run.compare()
