"""Collectives of meshscope's pipeline: those of each stage, the stage sends and the shared ones.

A stage repeats its collectives once per micro-batch. It sends activations to the next stage on
every tick of the pipeline, even while idle; the receiver discards those (programs/jax/pipeline.py).
TorchXLA programs send nothing after the last tick, and all their stages compute embedding and logits
(programs/torchxla/stages.py).
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.plans.caches import cache_slots, joined_narrow_heads, layer_cache, local_tokens
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.stages import n_ticks, stage_layers, stage_sends
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStage, PlannedStep

SentArray = tuple[tuple[int, ...], str]  # shape and dtype


def sent_arrays(
    experiment: Experiment, step: PlannedStep, residual: tuple[int, ...]
) -> tuple[SentArray, ...]:
    """The residual stream, and what layers of later stages read of earlier ones."""
    return (
        (residual, experiment.workload.activation_dtype),
        *_shared_entries(experiment, step),
        *_choice(experiment, step),
        *_layer_inputs(experiment, residual),
    )


def _layer_inputs(experiment: Experiment, residual: tuple[int, ...]) -> Iterator[SentArray]:
    """The embeddings [b,s,layers,width] of the layers behind the first stage, split like the residual stream.

    TorchXLA programs send none: all stages compute them.
    """
    inputs = experiment.model.layer_inputs
    if inputs is not None and not experiment.program.frontend.is_traced:
        n_layers = stage_sends(experiment.model, experiment.plan.pp).n_inputs
        shape = (*residual[:-1], n_layers, inputs.width)
        yield shape, experiment.workload.activation_dtype


def _choice(experiment: Experiment, step: PlannedStep) -> Iterator[SentArray]:
    """The mask [b,s,T] of the positions that the last indexer chose."""
    if stage_sends(experiment.model, experiment.plan.pp).has_choice:
        workload, n_positions = experiment.workload, step.n_tokens
        if step.phase is Phase.DECODE:
            n_positions = cache_slots(experiment.plan, workload)
        yield (*_step_shape(experiment, step), n_positions), "pred"


def _shared_entries(experiment: Experiment, step: PlannedStep) -> Iterator[SentArray]:
    """The entries [b,heads,s,width] of the step in each cache that layers of later stages share."""
    model, plan, cache_dtype = experiment.model, experiment.plan, experiment.workload.cache_dtype
    n_sequences, n_tokens = _step_shape(experiment, step)
    for kind in stage_sends(model, plan.pp).caches:
        arrays = layer_cache(model, plan, kind)
        if experiment.kernels.decode_attention.kernel is not None:
            arrays = joined_narrow_heads(arrays)
        for array in arrays:
            *heads, width = array.local_shape(plan)
            yield (n_sequences, *heads, n_tokens, width), array.dtype or cache_dtype


def _step_shape(experiment: Experiment, step: PlannedStep) -> tuple[int, int]:
    """Sequences of a micro-batch on one device, and tokens of the step of each."""
    is_prefill = step.phase is Phase.PREFILL
    n_tokens = step.n_tokens if is_prefill else experiment.workload.decode_tokens
    n_sequences = experiment.n_sequences(step.phase) // experiment.n_microbatches(step.phase)
    return n_sequences, local_tokens(experiment.plan, step.phase, n_tokens)


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
