"""Collectives of meshscope's pipeline: those of each stage, the stage sends and the shared ones.

A stage repeats its collectives once per micro-batch. It sends activations to the next stage on
every tick of the pipeline, even while idle; the receiver discards those (programs/jax/pipeline.py).
TorchXLA programs send nothing after the last tick, and all their stages compute embedding and logits
(programs/torchxla/stages.py).
"""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.stages import n_ticks, stage_layers
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStage, PlannedStep
from meshscope.prediction.stage_sends import SentArray

CACHED_SENDS = 256  # tuples with thousands of pairs on large slices


def pipeline_stages(  # noqa: PLR0913  what a step consists of
    experiment: Experiment,
    step: PlannedStep,
    *,
    whole: PlannedStage,
    sent: tuple[SentArray, ...],
    ends: PlannedStage | None = None,
    chosen: Collection[int] | None = None,
) -> tuple[PlannedStage, ...]:
    """The stages of a step; the last entry, without index, holds the collectives over all stages.

    `whole` is the program without a pipeline: embedding and layers for one micro-batch, the head
    for all sequences. With `ends`, all stages compute these, for all sequences. `sent` are the arrays that a device sends to its peer in the next stage.
    With `chosen`, only those stages have layers.
    """
    plan = experiment.plan
    if plan.pp == 1:
        return (whole,)
    n_microbatches = experiment.n_microbatches(step.phase)
    last = plan.pp - 1
    place = _StagePlacement(mesh=plan.mesh)
    stages = tuple(
        PlannedStage(
            before=place(whole.before, 0, n_microbatches) if stage == 0 and ends is None else (),
            layers=tuple(
                (layer, place(collectives, stage, n_microbatches))
                for layer, collectives in whole.layers[layers.start : layers.stop]
                if chosen is None or stage in chosen
            ),
            after=(place(whole.after, last, 1) if ends is None else ())
            if stage == last
            else tuple(_stage_send(experiment, step, stage, array) for array in sent),
            index=stage,
        )
        for stage, layers in enumerate(stage_layers(len(whole.layers), plan.pp))
    )
    if ends is not None:
        return (*stages, ends)
    tokens = _share_tokens(experiment, step.phase)
    return (*stages, PlannedStage(before=(), layers=(), after=(tokens,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagePlacement:
    """Moves collectives onto the devices of a stage.

    Layers of one kind share one tuple of collectives, so each tuple is moved once per stage.
    """

    mesh: Mesh
    placed: dict[tuple[int, int, int], tuple[PlannedCollective, ...]] = field(default_factory=dict)
    groups: dict[tuple[int, int], Groups] = field(default_factory=dict)

    def __call__(
        self, collectives: tuple[PlannedCollective, ...], stage: int, n_times: int
    ) -> tuple[PlannedCollective, ...]:
        """The collectives on the devices of `stage`, each `n_times` as often."""
        if self.mesh.size("pp") == 1 and n_times == 1:
            return collectives
        key = (id(collectives), stage, n_times)
        if key not in self.placed:
            self.placed[key] = tuple(
                replace(
                    planned,
                    groups=self._groups(planned.groups, stage),
                    count=planned.count * n_times,
                )
                for planned in collectives
            )
        return self.placed[key]

    def _groups(self, groups: Groups, stage: int) -> Groups:
        """The groups of a stage: in mesh order they follow one another, as pp is outermost."""
        key = (id(groups), stage)
        if key not in self.groups:
            n_each = self.mesh.n_devices // self.mesh.size("pp")
            first, end = (
                bisect_left(groups, at, key=lambda group: group[0] // n_each)
                for at in (stage, stage + 1)
            )
            self.groups[key] = groups[first:end]
        return self.groups[key]


def _stage_send(
    experiment: Experiment, step: PlannedStep, sender: int, array: SentArray
) -> PlannedCollective:
    """On every tick, each device of stage `sender` sends the array to its peer in the next stage."""
    shape, dtype = array
    ticks = n_ticks(experiment.n_microbatches(step.phase), experiment.plan.pp)
    is_unrolled = experiment.program.frontend.is_traced
    return PlannedCollective(
        part=Part.STAGE,
        kind=Kind.PERMUTE,
        axis="pp",
        groups=_neighbors(experiment.plan.mesh, sender),
        shape=shape,
        dtype=dtype,
        count=ticks - 1 if is_unrolled else ticks,
    )


@lru_cache(maxsize=CACHED_SENDS)
def _neighbors(mesh: Mesh, sender: int) -> Groups:
    """The pairs of devices at the same position in stage `sender` and the next."""
    n_each = mesh.n_devices // mesh.size("pp")
    first = sender * n_each
    return tuple((device, device + n_each) for device in range(first, first + n_each))


def _share_tokens(experiment: Experiment, phase: Phase) -> PlannedCollective:
    """All-reduce that brings the sampled tokens [b] to all stages: the other stages add zeros."""
    plan = experiment.plan
    return PlannedCollective(
        part=Part.SAMPLE,
        kind=Kind.ALL_REDUCE,
        axis="pp",
        groups=plan.mesh.groups("pp"),
        shape=(experiment.n_rows(phase),),
        dtype="s32",
    )
