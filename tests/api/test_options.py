"""What follows from the one declaration of an option: signature, docstring, checks and names in messages."""

import inspect
from dataclasses import fields

import pytest
from tables import table

import meshscope
from meshscope.api.options import hints_of, other_names
from meshscope.api.plan import PlanRequest
from meshscope.api.request import CompileRequest, LiveRequest, PredictRequest
from meshscope.api.serve import ServeRequest
from meshscope.errors import kinds_of, with_keywords

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
