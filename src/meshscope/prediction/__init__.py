"""Closed formulas: what a plan communicates, without JAX and without a compiler."""

from typing import assert_never

from meshscope.events.collective import Collective
from meshscope.prediction.meshscope_engine import meshscope_stages
from meshscope.prediction.planned_collective import PlannedStep, Stage, rows_of, steps_of
from meshscope.prediction.vllm_engine import vllm_stages
from meshscope.spec.experiment import Experiment
from meshscope.spec.program import Engine

__all__ = ["predict"]


def predict(experiment: Experiment) -> list[Collective]:
    """Every collective of the request, in program order, by the conventions of the experiment's engine.

    With a pipeline, the rows of a stage are what one device of that stage does.
    """
    return [
        row
        for step in steps_of(experiment.workload)
        for stage in _stages(experiment, step)
        for row in rows_of(stage, step, experiment)
    ]


def _stages(experiment: Experiment, step: PlannedStep) -> tuple[Stage, ...]:
    match experiment.engine:
        case Engine.MESHSCOPE:
            return meshscope_stages(experiment, step)
        case Engine.VLLM:
            return vllm_stages(experiment, step)
        case _:
            assert_never(experiment.engine)
