"""Programs of DeepSeek-V4.1 give the logits of a plain NumPy model, in prefill of half the layers and in decode."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reused_oracle import Oracle
from tables import stored
from tiny_models import generated_logits, golden, tiny_experiment

from meshscope.model.config import model_from_config
from meshscope.plans.plan import Plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.weights import tensors_of
from meshscope.programs.jax.ngrams import multipliers

CONFIG: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))["config"]
MODEL = model_from_config(CONFIG, name="tiny-v41", source="test")
SEED = 8
# Sums in another order round some stored numbers to the next one of 4 or 8 bits, which changes logits of a sequence by
# up to 6e-3; the other logits are equal within float32 rounding.
ROUNDED, TOLERANCE, MOST_ROUNDED = 8e-3, 5e-5, 0.1


def tensors() -> dict[str, np.ndarray]:
    random, values = np.random.default_rng(SEED), dict[str, np.ndarray]()
    for name, weight in tensors_of(MODEL, Plan()):
        n_in = prod(weight.shape[: max(1, len(weight.inputs))])
        shape = (prod(weight.shape) // n_in, n_in) if weight.is_transposed else weight.shape
        scale = n_in**-0.5 if weight.is_transposed else 0.3
        mean = 1.0 if "norm" in name or "_weight" in name or name.endswith("scale") else 0.0
        values[name] = random.normal(mean, scale, shape).astype(np.float32)
    return values


def rows_of(layer: int, ids: list[int]) -> np.ndarray:
    """The rows of the last token, by the rule of the programs in Python's integers."""
    engram, rows = MODEL.engram, list[int]()
    size = engram.n_rows[engram.layers.index(layer)] // engram.n_read
    factors = multipliers(engram, layer)
    for order in range(engram.n_orders):
        for head in range(engram.n_heads):
            mixed = 0
            for back, token in enumerate(reversed(ids[-order - 2 :])):
                mixed ^= (token + 1) * int(factors[order, head, back]) % 2**32
            rows.append(mixed % size + len(rows) * size)
    return np.array(rows)


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Tensors, prompts, and logits [steps, batch, vocab] of greedy decode."""
    values = tensors()
    prompt = np.random.default_rng(SEED + 1).integers(0, 96, (golden.BATCH, golden.PROMPT))
    by_sequence = []
    for tokens in prompt:
        oracle = Oracle(CONFIG, values.__getitem__, rows_of, golden.PROMPT)
        logits = [oracle.step(int(token)) for token in tokens][-1:]
        for _ in range(golden.N_DECODE):
            logits.append(oracle.step(int(logits[-1].argmax())))
        by_sequence.append(logits)
    return values, prompt, np.array(by_sequence).swapaxes(0, 1)


@pytest.mark.parametrize(
    ("plan", "loop", "chunk"),
    [
        ("tp=1", Loop.SCAN, None),
        ("tp=4,sp", Loop.UNROLL, None),
        ("dp=4,tp=2,ep=8", Loop.SCAN, 8),
        ("pp=2,dp=2,tp=2", Loop.UNROLL, None),
        pytest.param("cp=2,tp=2,sp", Loop.UNROLL, None, marks=pytest.mark.matrix),
        pytest.param("fsdp=2,tp=2,ep=4,tables=tp", Loop.SCAN, None, marks=pytest.mark.matrix),
        ("cp=4,dp=2", Loop.SCAN, None),
        pytest.param("cp=2,fsdp=4,ep=4,tables=dp", Loop.UNROLL, None, marks=pytest.mark.matrix),
        pytest.param("cp=2,dp=2,tp=2,sp,tables=dp", Loop.UNROLL, None, marks=pytest.mark.matrix),
        pytest.param("fsdp=4,tp=2,ep=8", Loop.UNROLL, 8, marks=pytest.mark.matrix),
        pytest.param("pp=2,fsdp=2,tp=2", Loop.UNROLL, None, marks=pytest.mark.matrix),
        pytest.param("pp=2,dp=2,tp=2,tables=tp", Loop.UNROLL, None, marks=pytest.mark.matrix),
        pytest.param("dp=2,tp=4,sp,tables=dp", Loop.SCAN, None, marks=pytest.mark.matrix),
        pytest.param("tp=4", Loop.UNROLL, 8, marks=pytest.mark.matrix),
        pytest.param("tp=1", Loop.UNROLL, 8, marks=pytest.mark.matrix),
        pytest.param("pp=2,tp=2,sp", Loop.SCAN, None, marks=pytest.mark.matrix),
        pytest.param("tp=8,ep=8", Loop.SCAN, None, marks=pytest.mark.matrix),
        pytest.param("dp=4,tp=2,ep=8,sp", Loop.UNROLL, None, marks=pytest.mark.matrix),
    ],
)
def test_logits_equal_those_of_the_oracle(
    expected: Any, plan: str, loop: Loop, chunk: int | None
) -> None:
    """A chunk of a prompt has more than the window of 4 positions."""
    values, prompt, logits = expected
    experiment = tiny_experiment(MODEL, plan, Program(loop=loop), prefill_chunk=chunk)
    got = np.stack(list(generated_logits(experiment, values, prompt)))
    np.testing.assert_allclose(got, logits, atol=ROUNDED, rtol=0)
    assert (np.abs(got - logits) > TOLERANCE).mean() < MOST_ROUNDED
