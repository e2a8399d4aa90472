"""Options that change nothing of what was asked for: one table of rules, and their refusal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.cost.expert_load import device_load, exchange_load
from meshscope.errors import SpecError
from meshscope.plans.dispatch import DispatchForm, exchange_axes
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine, Loop, Partitioner


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRule:
    """An option, when it changes nothing, and why, as the end of a sentence."""

    option: str
    is_idle: Callable[[Experiment], bool]
    reason: str


def _has_no_experts(experiment: Experiment) -> bool:
    return experiment.model.moe is None


def _is_vllm(experiment: Experiment) -> bool:
    return experiment.engine is Engine.VLLM


def _exchanges_nothing(experiment: Experiment) -> bool:
    """Whether no rows of experts move between devices by a program of our own."""
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    return is_manual and not exchange_axes(experiment.plan, experiment.dispatch_form)


def _is_gathered(experiment: Experiment) -> bool:
    """Whether the compiler exchanges rows that are gathered by index, which have no slots."""
    is_auto = experiment.program.partitioner is Partitioner.AUTO
    return is_auto and experiment.dispatch_form is DispatchForm.GATHERED


def _feels_skew(experiment: Experiment) -> bool:
    """Whether the most loaded device takes longer than under balanced routing, in any phase."""
    loads = (device_load, exchange_load)
    return any(load(experiment, phase) > 1 for phase in experiment.phases for load in loads)


_NO_EXPERTS = "{model} has no experts"
_NO_EXCHANGE = "plan '{plan}' exchanges no rows of experts: it has no ep over dp or fsdp"
_VLLM = "--engine vllm predicts the collectives of vLLM, not of a program of meshscope"

_ENGINE = "--frontend {frontend} compiles the engine's own program"

RULES: tuple[IdleRule, ...] = (
    IdleRule(
        option="context",
        is_idle=lambda experiment: experiment.plan.cp == 1,
        reason="plan '{plan}' has no cp, which splits the sequence",
    ),
    IdleRule(
        option="context",
        is_idle=lambda experiment: experiment.plan.cp > 1 and experiment.has_cut_prompts,
        reason="the chunks of a prompt gather queries over cp, not keys",
    ),
    IdleRule(option="capacity_factor", is_idle=_has_no_experts, reason=_NO_EXPERTS),
    IdleRule(option="dispatch", is_idle=_has_no_experts, reason=_NO_EXPERTS),
    IdleRule(option="routing_skew", is_idle=_has_no_experts, reason=_NO_EXPERTS),
    IdleRule(option="capacity_factor", is_idle=_exchanges_nothing, reason=_NO_EXCHANGE),
    IdleRule(option="dispatch", is_idle=_exchanges_nothing, reason=_NO_EXCHANGE),
    IdleRule(
        option="capacity_factor",
        is_idle=_is_gathered,
        reason="--dispatch gathered has no slots that tokens could exceed",
    ),
    IdleRule(
        option="routing_skew",
        is_idle=lambda experiment: experiment.plan.ep == 1,
        reason="plan '{plan}' has no ep, so that every device has a part of every expert",
    ),
    IdleRule(
        option="routing_skew",
        is_idle=lambda experiment: not _feels_skew(experiment),
        reason="every device exchanges and computes a fixed number of rows, whatever the routing",
    ),
    *(
        IdleRule(option=option, is_idle=_is_vllm, reason=_VLLM)
        for option in ("partitioner", "frontend", "dispatch", "capacity_factor")
    ),
    *(
        IdleRule(
            option=option,
            is_idle=lambda experiment: experiment.program.frontend.is_served,
            reason=_ENGINE,
        )
        for option in ("partitioner", "loop", "context", "kernels", "dispatch", "capacity_factor")
    ),
)


def check_no_idle_options(options: Mapping[str, Any], experiment: Experiment) -> None:
    """SpecError for the first of the given options that changes nothing in the experiment."""
    for rule in RULES:
        if rule.option in options and rule.is_idle(experiment):
            reason = rule.reason.format(
                model=experiment.model.name,
                plan=experiment.plan,
                frontend=experiment.program.frontend,
            )
            raise idle_option(rule.option, options[rule.option], reason)


def check_prediction_options(loop: Loop) -> None:
    """SpecError for a loop, which only programs have."""
    if loop is not Loop.AUTO:
        reason = "a prediction is that of unrolled layers, as servers run them"
        raise idle_option("loop", loop, f"{reason}. Compile to see the other form")


def idle_option(option: str, value: object, reason: str) -> SpecError:
    """The refusal of an option without effect."""
    return SpecError(f"--{option.replace('_', '-')} {value} changes nothing: {reason}. Drop it.")
