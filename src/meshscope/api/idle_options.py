"""Options that change nothing of what was asked for: one table of rules, and their refusal."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshscope.cost.expert_load import device_load, exchange_load
from meshscope.errors import SpecError
from meshscope.plans.dispatch import DispatchForm, exchange_axes
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine, Loop, Partitioner


class IdleRule(NamedTuple):
    """Options, when they change nothing, and why, as the end of a sentence."""

    options: tuple[str, ...]
    is_idle: Callable[[Experiment], bool]
    reason: str


def _exchanges_nothing(experiment: Experiment) -> bool:
    """Whether the program is manual and exchanges no expert rows between devices."""
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    return is_manual and not exchange_axes(experiment.plan, experiment.dispatch_form)


def _is_gathered(experiment: Experiment) -> bool:
    """Whether the compiler exchanges rows that are gathered by index, which have no slots."""
    is_auto = experiment.program.partitioner is Partitioner.AUTO
    return is_auto and experiment.dispatch_form is DispatchForm.GATHERED


def _ignores_skew(experiment: Experiment) -> bool:
    """Whether the most loaded device takes as long as under balanced routing, in every phase."""
    loads = (device_load, exchange_load)
    return all(load(experiment, phase) <= 1 for phase in experiment.phases for load in loads)


_DISPATCH = ("dispatch", "capacity_factor")

RULES: tuple[IdleRule, ...] = (
    IdleRule(
        ("context",),
        lambda experiment: experiment.plan.cp == 1,
        "plan '{plan}' has no cp, which splits the sequence",
    ),
    IdleRule(
        ("context",),
        lambda experiment: experiment.plan.cp > 1 and experiment.has_cut_prompts,
        "the chunks of a prompt gather queries over cp, not keys",
    ),
    IdleRule(
        (*_DISPATCH, "routing_skew"),
        lambda experiment: experiment.model.moe is None,
        "{model} has no experts",
    ),
    IdleRule(
        _DISPATCH,
        _exchanges_nothing,
        "plan '{plan}' exchanges no rows of experts: it has no ep over dp or fsdp",
    ),
    IdleRule(
        ("capacity_factor",),
        _is_gathered,
        "--dispatch gathered has no slots that tokens could exceed",
    ),
    IdleRule(
        ("routing_skew",),
        lambda experiment: experiment.plan.ep == 1,
        "plan '{plan}' has no ep, so that every device has a part of every expert",
    ),
    IdleRule(
        ("routing_skew",),
        _ignores_skew,
        "every device exchanges and computes a fixed number of rows, whatever the routing",
    ),
    IdleRule(
        ("partitioner", "frontend", *_DISPATCH),
        lambda experiment: experiment.engine is Engine.VLLM,
        "--engine vllm predicts the collectives of vLLM, not of a program of meshscope",
    ),
    IdleRule(
        ("partitioner", "loop", "context", "kernels", *_DISPATCH),
        lambda experiment: experiment.program.frontend.is_served,
        "--frontend {frontend} compiles the engine's own program",
    ),
)


def check_no_idle_options(options: Mapping[str, Any], experiment: Experiment) -> None:
    """SpecError for the first of the given options that changes nothing in the experiment."""
    for rule in RULES:
        given = next((name for name in rule.options if name in options), None)
        if given is not None and rule.is_idle(experiment):
            reason = rule.reason.format(
                model=experiment.model.name,
                plan=experiment.plan,
                frontend=experiment.program.frontend,
            )
            raise idle_option(given, options[given], reason)


def check_prediction_options(loop: Loop) -> None:
    """SpecError for a loop, which only programs have."""
    if loop is not Loop.AUTO:
        reason = "a prediction is that of unrolled layers, as servers run them"
        raise idle_option("loop", loop, f"{reason}. Compile to see the other form")


def idle_option(option: str, value: object, reason: str) -> SpecError:
    """The refusal of an option without effect."""
    return SpecError(f"--{option.replace('_', '-')} {value} changes nothing: {reason}. Drop it.")
