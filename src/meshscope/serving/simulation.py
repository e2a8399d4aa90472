"""A serving load on the slices of a plan: figures, and the rate beyond which the queue grows."""

from dataclasses import dataclass

import numpy as np

from meshscope.serving.cache_blocks import CacheBlocks
from meshscope.serving.engine import BatchingEngine, EnginePolicy, Served
from meshscope.serving.load import Load
from meshscope.serving.results import ServiceLimits, ServingFigures, serving_figures
from meshscope.serving.step_costs import StepCosts

# The busiest stretch of a saturated engine: ramp-up and the last requests are left out.
_SATURATED = (0.2, 0.8)
MIN_SATURATED = 64  # requests
STABLE_FRAC = 0.98  # of the saturated rate; above, queues of random arrivals grow for long


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Figures of one of `n_ranks` equal ranks, and requests per second of all of them."""

    n_ranks: int
    offered_per_s: float | None  # None if all arrive at once
    saturated_per_s: float
    figures: ServingFigures

    @property
    def is_stable(self) -> bool | None:
        """Whether the ranks serve requests as fast as they arrive; None if all arrive at once."""
        if self.offered_per_s is None:
            return None
        return self.offered_per_s <= STABLE_FRAC * self.saturated_per_s


def simulated_load(  # noqa: PLR0913  the inputs of a simulation
    load: Load,
    *,
    costs: StepCosts,
    blocks: CacheBlocks,
    policy: EnginePolicy,
    objective: ServiceLimits,
    n_ranks: int = 1,
) -> SimulatedLoad:
    """The load dealt to the ranks in turn, and simulated on the first."""
    of_rank = load.every(n_ranks)
    served = BatchingEngine(load=of_rank, costs=costs, blocks=blocks, policy=policy).run()
    rate = load.rate_per_s
    return SimulatedLoad(
        n_ranks=n_ranks,
        offered_per_s=rate if np.isfinite(rate) and load.n_requests > 1 else None,
        saturated_per_s=n_ranks * saturated_rate(of_rank, costs, blocks, policy),
        figures=serving_figures(served, objective, n_blocks=blocks.n_blocks),
    )


def saturated_rate(
    load: Load, costs: StepCosts, blocks: CacheBlocks, policy: EnginePolicy
) -> float:
    """Requests per second of an engine that never lacks requests of these lengths."""
    mean_blocks = blocks.of(int((load.n_prompt + load.n_output).mean()))
    n = max(MIN_SATURATED, 4 * min(policy.max_sequences, blocks.n_blocks // mean_blocks))
    repeats = -(-n // load.n_requests)
    many = Load(
        arrival_s=np.zeros(repeats * load.n_requests),
        n_prompt=np.tile(load.n_prompt, repeats),
        n_output=np.tile(load.n_output, repeats),
    )
    served: Served = BatchingEngine(load=many, costs=costs, blocks=blocks, policy=policy).run()
    finish_s = np.sort(served.finish_s)
    first, last = (int(frac * (len(finish_s) - 1)) for frac in _SATURATED)
    span_s = float(finish_s[last] - finish_s[first])
    whole = len(finish_s) / served.end_s
    return (last - first) / span_s if span_s > 0 else whole
