"""Collectives of meshscope's pipeline: each stage's, the stage sends and the shared ones.

A stage repeats its collectives once per micro-batch. It sends activations to the next stage on
every tick of the pipeline, even while idle; the receiver discards those (programs/jax/pipeline.py).
TorchXLA programs send nothing after the last tick, and all their stages compute embedding and logits
(programs/torchxla/stages.py).
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

from meshscope.cost.planned import PlannedCollective, PlannedStage
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.plans.caches import cache_slots, joined_narrow_heads, layer_cache, local_tokens
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.stages import n_ticks, stage_layers, stage_sends

SentArray = tuple[tuple[int, ...], str]  # shape and dtype
CACHED_SENDS = 256  # tuples with thousands of pairs on large slices


def sent_arrays(
    experiment: Experiment, phase: Phase, residual: tuple[int, ...]
) -> Iterator[SentArray]:
    """What a device sends to its peer in the next stage: the residual stream, and results that later layers read.

    Dimensions: b sequences of a micro-batch, s tokens of a step of each, T positions attended to.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    sends, is_prefill = stage_sends(model, plan.pp), phase is Phase.PREFILL
    n_tokens = local_tokens(plan, phase, experiment.n_positions(phase))
    n_sequences = experiment.n_sequences(phase) // experiment.n_microbatches(phase)
    yield residual, workload.activation_dtype
    # The entries [b,heads,s,width] of the step in each cache that layers of later stages share.
    for kind in sends.caches:
        arrays = layer_cache(model, plan, kind)
        if experiment.kernels.decode_attention.kernel is not None:
            arrays = joined_narrow_heads(arrays)
        for array in arrays:
            *heads, width = array.local_shape(plan)
            yield (n_sequences, *heads, n_tokens, width), array.dtype or workload.cache_dtype
    if sends.has_choice:  # the mask [b,s,T] of the positions that the last indexer chose
        n_positions = workload.prompt if is_prefill else cache_slots(plan, workload)
        yield (n_sequences, n_tokens, n_positions), "pred"
    # The embeddings [b,s,layers,width] of later layers, split like the residual stream; every TorchXLA stage
    # computes them.
    if model.layer_inputs is not None and not experiment.program.frontend.is_traced:
        shape = (*residual[:-1], sends.n_inputs, model.layer_inputs.width)
        yield shape, workload.activation_dtype


def pipeline_stages(  # noqa: PLR0913  what a step consists of
    experiment: Experiment,
    phase: Phase,
    *,
    whole: PlannedStage,
    sent: Iterator[SentArray],
    ends: PlannedStage | None = None,
    chosen: Collection[int] | None = None,
) -> tuple[PlannedStage, ...]:
    """The stages of a step; the last entry, without index, holds the collectives over all stages.

    `whole` is the program without a pipeline: embedding and layers for each micro-batch, the head
    for all sequences. With `ends`, all stages compute these, for all sequences. `sent` are the arrays that a device
    sends to its peer in the next stage on every tick. With `chosen`, only those stages have layers.
    """
    mesh, n_microbatches = experiment.plan.mesh, experiment.n_microbatches(phase)
    last, n_each = mesh.size("pp") - 1, mesh.n_devices // mesh.size("pp")
    # Layers of one kind share one tuple of collectives, and these their groups: each is moved once per stage.
    placed: dict[tuple[int, int], tuple[PlannedCollective, ...]] = {}
    stage_groups: dict[tuple[int, int], Groups] = {}

    def groups_of(groups: Groups, stage: int) -> Groups:
        """The groups of a stage: in mesh order they follow one another, as pp is outermost."""
        key = (id(groups), stage)
        if key not in stage_groups:
            first = bisect_left(groups, stage * n_each, key=itemgetter(0))
            end = bisect_left(groups, (stage + 1) * n_each, key=itemgetter(0))
            stage_groups[key] = groups[first:end]
        return stage_groups[key]

    def place(
        collectives: tuple[PlannedCollective, ...], stage: int
    ) -> tuple[PlannedCollective, ...]:
        """The collectives on the devices of `stage`."""
        key = (id(collectives), stage)
        if key not in placed:
            moved = (replace(one, groups=groups_of(one.groups, stage)) for one in collectives)
            placed[key] = tuple(moved)
        return placed[key]

    n_sends = n_ticks(n_microbatches, last + 1) - experiment.program.frontend.is_traced
    send = PlannedCollective(
        part=Part.STAGE, kind=Kind.PERMUTE, axis="pp", groups=(), shape=(), dtype="", count=n_sends
    )
    sends = [replace(send, shape=shape, dtype=dtype) for shape, dtype in sent]
    stages = tuple(
        PlannedStage(
            before=place(whole.before, 0) if stage == 0 and ends is None else (),
            layers=tuple(
                (layer, place(collectives, stage))
                for layer, collectives in whole.layers[layers.start : layers.stop]
                if chosen is None or stage in chosen
            ),
            after=(place(whole.after, last) if ends is None else ())
            if stage == last
            else tuple(replace(one, groups=_neighbors(mesh, stage)) for one in sends),
            index=stage,
        )
        for stage, layers in enumerate(stage_layers(len(whole.layers), last + 1))
    )
    # The all-reduce that brings the sampled tokens [b] to all stages: the other stages add zeros.
    tokens = PlannedCollective(
        part=Part.SAMPLE,
        kind=Kind.ALL_REDUCE,
        axis="pp",
        groups=mesh.groups("pp"),
        shape=(experiment.n_rows(phase),),
        dtype="s32",
    )
    return (*stages, ends or PlannedStage(before=(), layers=(), after=(tokens,)))


@lru_cache(maxsize=CACHED_SENDS)
def _neighbors(mesh: Mesh, sender: int) -> Groups:
    """The pairs of devices at the same position in stage `sender` and the next."""
    n_each = mesh.n_devices // mesh.size("pp")
    first = sender * n_each
    return tuple((device, device + n_each) for device in range(first, first + n_each))
