"""Families that transformers lacks give the logits of a plain implementation in prefill and greedy decode."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_oracle import logits as plain_logits
from tables import stored
from tiny_models import TOLERANCE, generated_logits, golden, tiny_experiment

from meshscope.model.config import model_from_config
from meshscope.plans.plan import Plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.weights import tensors_of

TABLES = stored(Path(__file__).with_suffix(".yaml"))
SEED = 5


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES["configs"])
@pytest.mark.parametrize(("plan", "loop"), [("tp=2,dp=2", Loop.UNROLL), ("tp=4,ep=4", Loop.SCAN)])
def test_logits_equal_those_of_the_oracle(name: str, plan: str, loop: Loop) -> None:
    config = TABLES["base"] | TABLES["configs"][name]
    model = model_from_config(config, name="tiny", source="test")
    random, values = np.random.default_rng(SEED), dict[str, np.ndarray]()
    for tensor, weight in tensors_of(model, Plan()):
        if tensor not in values:
            values[tensor] = _random(random, tensor, weight, config)
    prompt = random.integers(0, config["vocab_size"], (golden.BATCH, golden.PROMPT))
    experiment = tiny_experiment(model, plan, Program(loop=loop))
    got = np.stack(list(generated_logits(experiment, values, prompt.astype(np.int32))))
    for sequence in (0, golden.BATCH - 1):
        tokens = prompt[sequence].tolist()
        for step in got[:, sequence]:
            expected = plain_logits(config, values.__getitem__, tokens)
            np.testing.assert_allclose(step, expected, atol=5 * TOLERANCE, rtol=5 * TOLERANCE)
            tokens.append(int(step.argmax()))


def _random(random: Any, name: str, weight: Any, config: dict[str, Any]) -> np.ndarray:
    """Values whose products are of order 1, in the shape of the checkpoint's tensor."""
    if len(weight.shape) == 1:
        return random.normal(1.0 if "norm" in name else 0.0, 0.3, weight.shape).astype(np.float32)
    n_in = prod(weight.shape[: max(1, len(weight.inputs))])
    shape = (prod(weight.shape) // n_in, n_in) if weight.is_transposed else weight.shape
    if "query_key_value" in name:
        heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
        shape = (heads * config["head_dim"], n_in)
    return random.normal(0, n_in**-0.5, shape).astype(np.float32)
