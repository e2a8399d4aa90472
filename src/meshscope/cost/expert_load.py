"""Expert load of the most loaded device: rows to compute, experts that get any, and the time of its exchange."""

from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshscope.events.enums import Kind, Part, Phase
from meshscope.hardware.compiler_facts import CompilerFacts
from meshscope.model.model import Model
from meshscope.plans.caches import local_tokens
from meshscope.plans.dispatch import exchange_axes
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Partitioner

TILE_ROWS = 128  # of kernels of experts
# Passes over the rows of experts while weights are read: staged, results stored, and sent back (2).
FUSED_ROW_PASSES = 4
_COUNTED_WEIGHTS = 3 * 2048 * 768  # of the expert whose bundles are in `compiler_facts.json`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Expected rows of the mean device, and experts with rows of the device that has most of them, in one layer.

    `exchange` is the time of its exchange of rows over the time under balanced routing.
    """

    rows: int
    experts: float
    exchange: float = 1.0


def device_load(experiment: Experiment, phase: Phase) -> float:
    """Expert rows of the most loaded device over the mean, with the routing skew of the workload."""
    skew, dispatch = experiment.workload.routing_skew, experiment.dispatch(phase)
    is_auto = experiment.program.partitioner is Partitioner.AUTO
    if is_auto or experiment.model.moe is None or experiment.plan.ep == 1:
        return 1.0  # the auto partitioner computes all slots of an expert, filled or not
    return skew if dispatch is None else dispatch.device_load(skew)


def is_exchange(kind: Kind, part: str | None) -> bool:
    """Whether a collective brings rows to their experts, or back."""
    return kind is Kind.ALL_TO_ALL and part in {Part.MOE_DISPATCH, Part.MOE_COMBINE}


def exchange_load(experiment: Experiment, phase: Phase) -> float:
    """Time of the exchange of rows for the most loaded device over the time under balanced routing.

    The exchange of the auto partitioner moves arrays of fixed sizes.
    """
    dispatch = experiment.dispatch(phase)
    if dispatch is None or experiment.program.partitioner is Partitioner.AUTO:
        return 1.0
    return dispatch.exchange_load(experiment.workload.routing_skew)


def expert_load(experiment: Experiment, phase: Phase) -> ExpertLoad | None:
    """The expected load of the most loaded device's experts in a layer of one chunk; None for a dense model.

    Each token independently chooses K of E experts, this device's with `load` times the mean probability,
    so all T tokens miss one of them with probability (1 - load K/E)^T. The layer ends with the device that has
    most experts to read.
    """
    model, plan = experiment.model, experiment.plan
    if model.moe is None:
        return None
    n_tokens = local_tokens(plan, phase, experiment.n_positions(phase))
    n_tokens *= experiment.n_sequences(phase) // experiment.n_microbatches(phase)
    load = device_load(experiment, phase)
    miss_frac = model.moe.miss_frac(load) ** (n_tokens * routed_tokens_per_token(model, plan))
    spread = hit_spread(model.moe.n_experts, plan.ep)
    hit_frac = most_hit_frac(np.asarray(miss_frac), np.asarray(spread))
    return ExpertLoad(
        rows=ceil(n_tokens * rows_per_token(model, plan) * load),
        experts=model.moe.n_experts / plan.ep * float(hit_frac),
        exchange=exchange_load(experiment, phase),
    )


def hit_spread(n_experts: float, n_devices: int) -> float:
    """By how many standard deviations of a single expert the largest of the devices' fractions exceeds the mean.

    The expected maximum of normal variables after Blom (1958); the experts of a device are taken as independent.
    """
    n_deviations = NormalDist().inv_cdf((n_devices - 0.375) / (n_devices + 0.25))
    return n_deviations / sqrt(n_experts / n_devices)


def miss_frac(of_token: Any, n_tokens: Any, popularity: Any) -> Any:
    """Probability that no token chooses an expert, where a token misses it with probability `of_token`.

    The probabilities of experts have a gamma distribution with this variance over the squared mean.
    """
    of_equal = of_token**n_tokens
    shape = 1 / np.maximum(popularity, 1e-9)
    rate = -np.log(np.maximum(of_token, 1e-9))
    return np.where(popularity, (1 + n_tokens * rate / shape) ** -shape, of_equal)


def most_hit_frac(
    miss_frac: NDArray[np.float64], spread: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Expected fraction of its experts that get rows, on the device that has most of them."""
    hit_frac = 1 - miss_frac + spread * (miss_frac * (1 - miss_frac)) ** 0.5
    return np.minimum(1.0, hit_frac)


def rows_per_token(model: Model, plan: Plan) -> float:
    """Expert rows that a device computes per token of its tp group, under balanced routing."""
    assert model.moe is not None
    if "tp" in exchange_axes(plan):  # each tp device routes its share of the tokens
        return model.moe.n_active / plan.tp
    over_tp = plan.ep if plan.expert_axes == ("tp",) else 1
    return model.moe.n_active / over_tp


def sorted_rows_per_token(model: Model, plan: Plan, load: float = 1.0) -> float:
    """Rows that a device sorts by expert, per token of its tp group: chosen by its tokens, and received.

    It receives `load` times the mean.
    """
    assert model.moe is not None
    axes = exchange_axes(plan)
    if not axes:
        return model.moe.n_active
    n_sent = model.moe.n_active / (plan.tp if "tp" in axes else 1)
    return n_sent + rows_per_token(model, plan) * load


def routed_tokens_per_token(model: Model, plan: Plan) -> float:
    """Tokens that may choose one of a device's experts, per token of its tp group."""
    assert model.moe is not None
    return rows_per_token(model, plan) * plan.ep / model.moe.n_active


def fused_cycles(facts: CompilerFacts, n_weights: int) -> tuple[float, float] | None:
    """Cycles to send a row, fetch its result, wait for it and add it, and to multiply a tile of rows with an expert.

    None on a chip without counts.
    """
    cycles = facts.fused_expert_cycles
    return None if cycles is None else (cycles[0], cycles[1] * n_weights / _COUNTED_WEIGHTS)
