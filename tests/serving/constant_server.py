"""Engines whose steps take constant times, and random loads for them."""

from typing import Any

import numpy as np
from made import experiment_with

from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import parse_plan
from meshscope.serving.engine import EnginePolicy, EnginePool
from meshscope.serving.load import Lengths, Load, random_load
from meshscope.serving.step_costs import CacheBlocks, StepCosts

PREFILL_S = 0.1
DECODE_S = 0.01
ROOMY = CacheBlocks(n_blocks=1_000_000)
ONE = EnginePolicy(max_sequences=1, max_step_tokens=1_000_000)


class ConstantCosts:
    """Steps whose time depends on nothing."""

    def decode_s(self, n_sequences: int, contexts: np.ndarray) -> np.ndarray:
        assert n_sequences > 0
        return np.full(len(contexts), DECODE_S)

    def decode_step_s(self, n_sequences: int, context: float) -> float:
        assert n_sequences > 0 < context
        return DECODE_S

    def mixed_s(self, n_sequences: int, context: float, n_tokens: int, past: float) -> float:
        assert (n_sequences >= 0, context >= 0, n_tokens > 0, past >= 0) == (True,) * 4
        return PREFILL_S


def placed(
    topology: str = "v6e:2x2", plan: str = "tp=4", model: str = "Qwen/Qwen3-32B"
) -> Experiment:
    """An experiment with a sequence of each data-parallel rank."""
    parsed = parse_plan(plan)
    return experiment_with(model, parsed, topology, batch=parsed.data_size, prompt=1024)


def poisson(rate_per_s: float, n: int, **changes: Any) -> Load:
    options = {"prompt": 100, "output": 1, "lengths": Lengths.FIXED, "seed": 1, **changes}
    return random_load(1.0, rate_per_s=rate_per_s, n_requests=n, **options)


def at_once(n: int, *, prompt: int = 100, output: int = 1) -> Load:
    return Load(arrival_s=np.zeros(n), n_prompt=np.full(n, prompt), n_output=np.full(n, output))


def pool(
    policy: EnginePolicy = ONE,
    blocks: CacheBlocks = ROOMY,
    *,
    n_engines: int = 1,
    costs: StepCosts | None = None,
) -> EnginePool:
    return EnginePool(
        n_engines=n_engines, costs=costs or ConstantCosts(), blocks=blocks, policy=policy
    )
