"""Closed-form prediction of a plan's collectives, without JAX or a compiler."""

from collections.abc import Collection
from typing import assert_never

from meshscope.cost.meshscope_engine import meshscope_stages
from meshscope.cost.planned import (
    PlannedStage,
    PlannedStep,
    planned_steps,
    stage_rows,
)
from meshscope.cost.vllm_engine import vllm_stages
from meshscope.events.collective import Collective
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine

__all__ = ["planned_stages", "predict"]


def predict(experiment: Experiment) -> list[Collective]:
    """All collectives of the request in program order, under the experiment's engine conventions.

    In a pipeline, the rows of a stage describe one of its devices.
    """
    return [
        row
        for step in planned_steps(experiment)
        for stage in planned_stages(experiment, step)
        for row in stage_rows(stage, step, experiment)
    ]


def planned_stages(
    experiment: Experiment, step: PlannedStep, *, chosen: Collection[int] | None = None
) -> tuple[PlannedStage, ...]:
    """The collectives of one step, per pipeline stage.

    With `chosen`, meshscope's engine lists the layers of those stages only.
    """
    match experiment.engine:
        case Engine.MESHSCOPE:
            return meshscope_stages(experiment, step, chosen=chosen)
        case Engine.VLLM:
            return vllm_stages(experiment.by_token, step)
        case _:
            assert_never(experiment.engine)
