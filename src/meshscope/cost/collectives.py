"""Closed-form prediction of a plan's collectives, without JAX or a compiler."""

from collections.abc import Collection, Iterator
from typing import assert_never

from meshscope.cost.meshscope_engine import meshscope_stages
from meshscope.cost.planned import PlannedStage
from meshscope.cost.vllm_engine import vllm_stages
from meshscope.events.collective import Collective, Groups, predicted_collective
from meshscope.events.enums import Phase
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine
from meshscope.serialize import picked


def predict(experiment: Experiment) -> list[Collective]:
    """All collectives of the request in program order, under the experiment's engine conventions.

    In a pipeline, the rows of a stage describe one of its devices.
    """
    return [
        row
        for phase in experiment.phases
        for stage in planned_stages(experiment, phase, is_cut=experiment.has_cut_prompts)
        for row in _rows(stage, phase, experiment)
    ]


def planned_stages(
    experiment: Experiment, phase: Phase, *, is_cut: bool, chosen: Collection[int] | None = None
) -> tuple[PlannedStage, ...]:
    """The collectives of one step, per pipeline stage; in decode, each token counts as a separate sequence.

    `is_cut` if a chunk of prefill is a part of a prompt. With `chosen`, meshscope's engine lists the layers of those
    stages only.
    """
    match experiment.engine:
        case Engine.MESHSCOPE:
            return meshscope_stages(experiment, phase, is_cut=is_cut, chosen=chosen)
        case Engine.VLLM:
            return vllm_stages(experiment.by_token, phase)
        case _:
            assert_never(experiment.engine)


def _rows(stage: PlannedStage, phase: Phase, experiment: Experiment) -> Iterator[Collective]:
    placed: dict[int, Groups] = {}  # by the identity of the groups of positions
    n_steps = 1 if phase is Phase.PREFILL else experiment.workload.n_decode_steps
    mesh = experiment.mesh
    for layer, collectives in ((None, stage.before), *stage.layers, (None, stage.after)):
        for planned in collectives:
            key = id(planned.groups)
            if key not in placed:
                placed[key] = mesh.devices_at(planned.groups)
            yield predicted_collective(
                phase=phase,
                layer=layer,
                groups=placed[key],
                **picked(planned, "part", "kind", "axis", "dtype", "shape", "count", "executed_as"),
                n_steps=n_steps,
                stage=stage.index,
                crosses_slices=experiment.topology.crosses_slices(placed[key]),
            )
