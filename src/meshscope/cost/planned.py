"""The collectives of a pipeline stage in one step: their types, and meshscope's pipeline.

A stage of meshscope's pipeline repeats its collectives once per micro-batch. It sends activations to the next
stage on every tick of the pipeline, even while idle; the receiver discards those (programs/jax/pipeline.py).
TorchXLA programs send nothing after the last tick, and all their stages compute embedding and logits
(programs/torchxla/stages.py).
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from operator import itemgetter

from msgspec import Struct, structs

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.model.arrays import Weight
from meshscope.plans.caches import cache_slots, joined_narrow_heads, layer_cache, local_tokens
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.stages import n_ticks, stage_layers, stage_sends
from meshscope.plans.workload import Workload
from meshscope.units import array_bytes

SentArray = tuple[tuple[int, ...], str]  # shape and dtype
CACHED_SENDS = 256  # tuples with thousands of pairs on large slices


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedFor:
    """Numbers of sequences on a device at which the compiler uses an all-reduce instead.

    Numbers up to `n_sequences` with a payload of more than `over_bytes`, and numbers that `multiple` does not
    divide.
    """

    n_sequences: float
    over_bytes: float = 0
    multiple: int = 1


NEVER_REDUCED, ALWAYS_REDUCED = ReducedFor(n_sequences=0), ReducedFor(n_sequences=inf)
REDUCED_FOR_ONE = ReducedFor(n_sequences=1)


class PlannedCollective(Struct, frozen=True, kw_only=True):
    """One collective of the program: its kind, device groups and payload (`shape`, `dtype`).

    The compiler may pad it to `carried`. A device has `n_sequences` in it; at some counts it becomes an all-reduce (`reduced_for`).
    """

    part: Part
    kind: Kind
    axis: str
    groups: Groups  # of positions in the mesh; of devices in a row
    shape: tuple[int, ...]
    dtype: str
    count: int = 1
    n_sequences: int = 1
    carried: tuple[int, ...] | None = None
    reduced_for: ReducedFor = NEVER_REDUCED
    is_of_end: bool = False  # only in the chunk of prefill with the last tokens of prompts
    weight: Weight | None = None  # that it gathers

    @property
    def payload_bytes(self) -> int:
        """Bytes of the logical array."""
        return array_bytes(self.dtype, self.shape)

    @property
    def carried_bytes(self) -> int:
        """Bytes of the array as it is sent, with padding."""
        return array_bytes(self.dtype, self.carried or self.shape)

    def with_weights_of(self, workload: Workload) -> "PlannedCollective":
        """The collective with the dtype of the weight that it gathers, if it gathers one.

        The compiler converts before it gathers, except for experts, whose kernel reads f32.
        """
        if self.weight is None:
            return self
        dtype = self.weight.stored_dtype(workload.weight_dtype)
        if workload.weight_dtype == "f32" and self.part is not Part.MOE_EXPERTS:
            dtype = workload.activation_dtype
        return structs.replace(self, dtype=dtype)

    @property
    def executed_as(self) -> Kind | None:
        """The kind that the compiler turns it into, if different."""
        rule = self.reduced_for
        is_small = self.n_sequences <= rule.n_sequences and self.payload_bytes > rule.over_bytes
        return Kind.ALL_REDUCE if is_small or self.n_sequences % rule.multiple else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """The collectives of one pipeline stage in one step, in program order.

    `layers` pairs each layer index of the stage with its collectives. `index` is None without a
    pipeline, and for collectives that all stages share.
    """

    before: tuple[PlannedCollective, ...]
    layers: tuple[tuple[int, tuple[PlannedCollective, ...]], ...]
    after: tuple[PlannedCollective, ...]
    index: int | None = None


def _sent_arrays(
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
    if sends.has_weights:  # the weights of streams, [b,s,streams]
        yield residual[:-1], "f32"
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
    residual: tuple[int, ...],
    ends: PlannedStage | None = None,
    shared: tuple[PlannedCollective, ...] = (),
) -> tuple[PlannedStage, ...]:
    """The stages of a step; the last entry, without index, holds the collectives over all stages, `shared` first.

    `whole` is the program without a pipeline: embedding and layers for each micro-batch, the head
    for all sequences. With `ends`, all stages compute these, for all sequences. `residual` is what a device sends of the
    residual stream on every tick.
    """
    mesh, n_microbatches = experiment.plan.mesh, experiment.n_microbatches(phase)
    last, n_each = mesh.size("pp") - 1, mesh.n_devices // mesh.size("pp")
    # Layers of one kind share one tuple of collectives, and these their groups: each is moved once per stage.
    placed: dict[tuple[int, int], tuple[PlannedCollective, ...]] = {}
    stage_groups: dict[tuple[int, int], Groups] = {}

    def moved(one: PlannedCollective, stage: int) -> PlannedCollective:
        key = (id(one.groups), stage)
        if key not in stage_groups:  # in mesh order they follow one another, as pp is outermost
            first, end = (
                bisect_left(one.groups, n * n_each, key=itemgetter(0)) for n in (stage, stage + 1)
            )
            stage_groups[key] = one.groups[first:end]
        return structs.replace(one, groups=stage_groups[key])

    def place(
        collectives: tuple[PlannedCollective, ...], stage: int
    ) -> tuple[PlannedCollective, ...]:
        """The collectives on the devices of `stage`."""
        key = (id(collectives), stage)
        if key not in placed:
            placed[key] = tuple(moved(one, stage) for one in collectives)
        return placed[key]

    n_sends = n_ticks(n_microbatches, last + 1) - experiment.program.frontend.is_traced
    send = PlannedCollective(
        part=Part.STAGE, kind=Kind.PERMUTE, axis="pp", groups=(), shape=(), dtype="", count=n_sends
    )
    sends = [
        structs.replace(send, shape=shape, dtype=dtype)
        for shape, dtype in _sent_arrays(experiment, phase, residual)
    ]
    before, after = (), ()
    if ends is None:
        before, after = place(whole.before, 0), place(whole.after, last)
    stages = tuple(
        PlannedStage(
            before=before if stage == 0 else (),
            layers=tuple(
                (layer, place(collectives, stage))
                for layer, collectives in whole.layers
                if layer in layers
            ),
            after=after
            if stage == last
            else tuple(structs.replace(one, groups=_neighbors(mesh, stage)) for one in sends),
            index=stage,
        )
        for stage, layers in enumerate(stage_layers(experiment.model.n_layers, last + 1))
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
    return (*stages, ends or PlannedStage(before=shared, layers=(), after=(tokens,)))


@lru_cache(maxsize=CACHED_SENDS)
def _neighbors(mesh: Mesh, sender: int) -> Groups:
    """The pairs of devices at the same position in stage `sender` and the next."""
    n_each = mesh.n_devices // mesh.size("pp")
    first = sender * n_each
    return tuple((device, device + n_each) for device in range(first, first + n_each))
