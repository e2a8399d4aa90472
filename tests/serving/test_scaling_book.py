"""The serving tables of the scaling book, by its formulas in the engine.

Source: How to Scale Your Model (jax-ml/scaling-book@0819a7d), parts 7 (inference.md) and 8
(applied-inference.md): a decode step reads the weights and all caches once, at 8.2e11 bytes/s a chip.
"""

import numpy as np
import pytest
from constant_server import ROOMY, ConstantCosts, at_once, pool
from made import experiment_with

from meshscope.plans.experiment import Experiment
from meshscope.reports.serving import even_ratio
from meshscope.serving.engine import EnginePolicy
from meshscope.serving.simulation import decode_rate, prefill_rate, served_alone
from meshscope.serving.step_costs import cache_blocks, sequence_bytes

CHIP_BYTES_PER_S = 8.2e11
CONTEXT = 8192
OUTPUT = 20


class BookCosts(ConstantCosts):
    """Decode steps that read these weights, and the cache of CONTEXT positions of each sequence."""

    def __init__(self, weights_bytes: float, token_bytes: float, n_chips: int) -> None:
        self.weights_bytes, self.token_bytes, self.n_chips = weights_bytes, token_bytes, n_chips

    def decode_s(self, n_sequences: int, contexts: np.ndarray) -> np.ndarray:
        n_bytes = self.weights_bytes + n_sequences * CONTEXT * self.token_bytes
        return np.full(len(contexts), n_bytes / (self.n_chips * CHIP_BYTES_PER_S))


def llama_13b() -> Experiment:
    return experiment_with("meta-llama/Llama-2-13B", "tp=8", "v5e:2x4", batch=1, prompt=1024)


@pytest.mark.parametrize(
    ("batch", "share", "step_s", "tokens_per_s"),
    [
        (1, 1, 4.98e-3, 200.61),
        (8, 1, 12.13e-3, 659.30),
        (16, 1, 20.30e-3, 787.99),
        (32, 1, 36.65e-3, 873.21),
        (64, 1, 69.33e-3, 923.13),
        (240, 1, 249.09e-3, 963.53),
        (1, 5, 4.17e-3, 239.94),
        (8, 5, 5.60e-3, 1429.19),
        (240, 5, 52.99e-3, 4529.34),
    ],
)
def test_llama_2_13b_on_eight_v5e(batch, share, step_s, tokens_per_s) -> None:
    """Part 7: steps and tokens/s at contexts of 8,192, and with a cache of a fifth of the size."""
    _, device_bytes = sequence_bytes(llama_13b())
    costs = BookCosts(26e9, 8 * device_bytes / share, 8)
    policy = EnginePolicy(max_sequences=batch, max_step_tokens=1 << 20, has_mixed_steps=False)
    requests, trace = served_alone(
        at_once(batch, prompt=CONTEXT, output=OUTPUT), pool(policy, ROOMY, costs=costs)
    )
    decode_s = trace.now_s - float(requests.first_token_s.max())
    assert decode_s / (OUTPUT - 1) == pytest.approx(step_s, rel=0.01)
    # The book rounds weights and cache, to three digits
    assert batch * (OUTPUT - 1) / decode_s == pytest.approx(tokens_per_s, rel=0.01)


def test_sixteen_contexts_of_8192_fit_and_no_more() -> None:
    """Part 7: "KV cache memory + param memory" exceeds 8 v5e beyond a batch of 16."""
    blocks = cache_blocks(llama_13b(), memory_frac=1.0)
    assert blocks.n_blocks // blocks.of(CONTEXT) == 16


@pytest.mark.parametrize(
    ("batch", "n_chips", "per_chip"), [(43, 16, 0.27), (52, 8, 0.66), (67, 4, 1.72)]
)
def test_requests_a_second_of_llama_3_70b(batch: int, n_chips: int, per_chip: float) -> None:
    """Part 8: caches of 8k fill the HBM, a step takes 19 ms, and a request decodes 512 tokens."""
    full = BookCosts(n_chips * CHIP_BYTES_PER_S * 0.019, 0.0, n_chips)
    engines = pool(EnginePolicy(max_sequences=batch), costs=full)
    rate = decode_rate(at_once(batch, prompt=CONTEXT, output=513), engines)
    assert rate / n_chips == pytest.approx(per_chip, rel=0.03)  # two digits


def test_three_prefill_servers_for_each_decode_server() -> None:
    """Part 8: 0.91 s for a prompt of 8,192, and batches of 32 that decode 512 tokens at 19 ms."""
    load = at_once(64, prompt=CONTEXT, output=513)
    full = BookCosts(16 * CHIP_BYTES_PER_S * 0.019, 0.0, 16)
    decode = decode_rate(load, pool(EnginePolicy(max_sequences=32), costs=full))

    class Prefill(ConstantCosts):
        def mixed_s(self, n_sequences: int, context: float, n_tokens: int, past: float) -> float:
            return super().mixed_s(n_sequences, context, n_tokens, past) * 9.1  # 0.1 s each

    one = EnginePolicy(max_sequences=1, max_step_tokens=CONTEXT)
    assert even_ratio(prefill_rate(load, pool(one, costs=Prefill())), decode) == (3, 1)
