"""Expert load of one device under balanced routing: rows to compute, and experts that get any."""

from dataclasses import dataclass
from math import ceil

from meshscope.events.enums import Phase
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import Model
from meshscope.spec.plan.context_form import local_tokens
from meshscope.spec.plan.dispatch import exchange_axes
from meshscope.spec.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Expected rows and expected number of experts with rows, for one device and layer."""

    rows: int
    experts: float


def expert_load(experiment: Experiment, phase: Phase) -> ExpertLoad | None:
    """The expected load of one device's experts in a layer of one chunk; None for a dense model.

    Each token independently chooses K of E experts with equal probability, so all of T tokens miss a
    given expert with probability (1 - K/E)^T.
    """
    model, plan = experiment.model, experiment.plan
    if model.moe is None:
        return None
    n_tokens = local_tokens(plan, phase, experiment.n_positions(phase))
    n_tokens *= experiment.n_sequences(phase) // experiment.n_microbatches(phase)
    miss_frac = (1 - model.moe.n_active / model.moe.n_experts) ** (
        n_tokens * routed_tokens_per_token(model, plan)
    )
    return ExpertLoad(
        rows=ceil(n_tokens * rows_per_token(model, plan)),
        experts=model.moe.n_experts / plan.ep * (1 - miss_frac),
    )


def rows_per_token(model: Model, plan: Plan) -> float:
    """Expert rows that a device computes per token of its tp group, under balanced routing."""
    assert model.moe is not None
    if "tp" in exchange_axes(plan):  # each tp device routes its share of the tokens
        return model.moe.n_active / plan.tp
    over_tp = plan.ep if plan.expert_axes == ("tp",) else 1
    return model.moe.n_active / over_tp


def sorted_rows_per_token(model: Model, plan: Plan) -> float:
    """Rows that a device sorts by expert, per token of its tp group: those its tokens choose, and those received."""
    assert model.moe is not None
    axes = exchange_axes(plan)
    if not axes:
        return model.moe.n_active
    return model.moe.n_active / (plan.tp if "tp" in axes else 1) + rows_per_token(model, plan)


def routed_tokens_per_token(model: Model, plan: Plan) -> float:
    """Tokens that may choose one of a device's experts, per token of its tp group."""
    assert model.moe is not None
    return rows_per_token(model, plan) * plan.ep / model.moe.n_active
