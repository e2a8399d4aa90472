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
MOE = {**DENSE, "model": "Qwen/Qwen3-30B-A3B", "plan": "dp=2,tp=4", "batch": 2}

IDLE = [
    ("context", "ring", DENSE, "plan 'tp=8' has no cp, which splits the sequence"),
    (
        "context",
        "ring",
        {**DENSE, "plan": "cp=2,tp=4", "prompt": 1024, "prefill_chunk": 256},
        "the chunks of a prompt gather queries over cp, not keys",
    ),
    ("capacity_factor", 2.0, DENSE, "Qwen/Qwen3-4B has no experts"),
    ("dispatch", "capacity", DENSE, "Qwen/Qwen3-4B has no experts"),
    ("routing_skew", 1.5, DENSE, "Qwen/Qwen3-4B has no experts"),
    ("capacity_factor", 2.0, MOE, "plan 'dp=2,tp=4' exchanges no rows of experts"),
    ("dispatch", "capacity", {**MOE, "plan": "dp=2,tp=4,ep=4"}, "exchanges no rows of experts"),
    ("capacity_factor", 2.0, {**MOE, "plan": "dp=2,tp=4,ep=2", "partitioner": "auto", "dispatch": "gathered"}, "has no slots"),
    ("routing_skew", 1.5, MOE, "plan 'dp=2,tp=4' has no ep"),
    ("partitioner", "auto", {**DENSE, "engine": "vllm"}, 'engine="vllm" predicts the collectives of vLLM'),
    ("frontend", "torchxla", {**DENSE, "engine": "vllm"}, 'engine="vllm" predicts'),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value", "others", "reason"), IDLE)
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
