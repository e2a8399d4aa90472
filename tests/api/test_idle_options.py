"""Options without effect are refused, with the reason."""

from typing import Any

import pytest
from tables import table

from meshscope.api.compile import compilable_experiment
from meshscope.api.options import request_of
from meshscope.api.predict import predict
from meshscope.api.request import CompileRequest, ExperimentRequest
from meshscope.errors import SpecError

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
    with pytest.raises(SpecError, match='loop="scan" changes nothing: a prediction is that of'):
        predict(**DENSE, loop="scan")
    compiled = request_of(CompileRequest, {**DENSE, "loop": "scan"})
    assert compilable_experiment(compiled).is_scanned
