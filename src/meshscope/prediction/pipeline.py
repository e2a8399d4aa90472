"""Where devices meet in our pipeline: each stage's meetings, what it hands on, and what all stages share.

A stage meets once for each micro-batch. It hands its activations on in every tick of the pipeline,
also while it is idle; what arrives then is not used, but it has been sent (see programs/pipeline.py).
"""

from dataclasses import replace

from meshscope.events.enums import Kind, Part
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStep, Stage
from meshscope.spec.experiment import Experiment
from meshscope.spec.plan.stages import n_ticks, stage_layers


def pipelined(
    experiment: Experiment, step: PlannedStep, *, whole: Stage, handed_on: tuple[int, ...]
) -> tuple[Stage, ...]:
    """The stages of a step, and last, without index, what all of them do together.

    `whole` is the program without pipeline: embedding and layers on one micro-batch, the head on all
    sequences. `handed_on` is what a device gives to its peer in the next stage.
    """
    plan = experiment.plan
    if plan.pp == 1:
        return (whole,)
    n_microbatches = experiment.n_microbatches(step.phase)

    found: dict[tuple[int, int, int], tuple[PlannedCollective, ...]] = {}

    def of_stage(
        meetings: tuple[PlannedCollective, ...], stage: int, count: int
    ) -> tuple[PlannedCollective, ...]:
        key = (id(meetings), stage, count)  # layers of one kind have the same meetings
        if key not in found:
            found[key] = moved(meetings, stage, count)
        return found[key]

    def moved(
        meetings: tuple[PlannedCollective, ...], stage: int, count: int
    ) -> tuple[PlannedCollective, ...]:
        return tuple(
            replace(m, groups=plan.mesh.groups_of_stage(m.groups, stage), count=m.count * count)
            for m in meetings
        )

    last = plan.pp - 1
    stages = tuple(
        Stage(
            before=of_stage(whole.before, 0, n_microbatches) if stage == 0 else (),
            layers=tuple(
                (layer, of_stage(meetings, stage, n_microbatches))
                for layer, meetings in whole.layers[layers.start : layers.stop]
            ),
            after=of_stage(whole.after, last, 1)
            if stage == last
            else (_handed_on(experiment, step, stage, handed_on),),
            index=stage,
        )
        for stage, layers in enumerate(stage_layers(len(whole.layers), plan.pp))
    )
    return (*stages, Stage(before=(), layers=(), after=(_sampled(experiment),)))


def _handed_on(
    experiment: Experiment, step: PlannedStep, sender: int, shape: tuple[int, ...]
) -> PlannedCollective:
    """Each device of the stage to its peer in the next, in every tick."""
    mesh = experiment.plan.mesh
    workers = mesh.groups("pp")  # the devices at the same place of every stage
    return PlannedCollective(
        part=Part.STAGE,
        kind=Kind.PERMUTE,
        axis="pp",
        groups=tuple((group[sender], group[sender + 1]) for group in workers),
        shape=shape,
        dtype=experiment.workload.activation_dtype,
        count=n_ticks(experiment.n_microbatches(step.phase), experiment.plan.pp),
    )


def _sampled(experiment: Experiment) -> PlannedCollective:
    """The next tokens, which the last stage knows, to all stages: the others add zeros."""
    plan = experiment.plan
    return PlannedCollective(
        part=Part.SAMPLE,
        kind=Kind.ALL_REDUCE,
        axis="pp",
        groups=plan.mesh.groups("pp"),
        shape=(experiment.workload.batch // plan.data_size,),
        dtype="s32",
    )
