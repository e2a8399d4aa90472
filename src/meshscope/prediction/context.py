"""Where the devices of cp meet in one layer's attention of meshscope's own decoder.

Dimensions: b batch of one device, s tokens of a step on one device, S of the prompt, N query heads
and K key and value heads of one device, H head width, R latent rank, P rotated width, V value width;
of compressed attention, E entries, M positions of an entry, C channels of a position.
"""

from collections.abc import Iterator
from typing import assert_never

from meshscope.events.enums import Kind, Part, Phase
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStep
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import (
    Attention,
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Layer,
)
from meshscope.spec.plan.caches import layer_cache
from meshscope.spec.plan.context_form import (
    ContextForm,
    cache_slots,
    index_candidates,
    local_tokens,
    ring_pairs,
)
from meshscope.spec.plan.weights import stored_kv_heads


def context_meetings(
    experiment: Experiment, step: PlannedStep, layer: Layer
) -> tuple[PlannedCollective, ...]:
    """The meetings of one layer over cp, in program order; none where cp is 1."""
    if experiment.plan.cp == 1:
        return ()
    if step.phase is Phase.DECODE:
        return (*_index_candidates(experiment, layer), *_merged(experiment))
    if isinstance(experiment.model.attention, CompressedAttention):
        return tuple(_compressed(experiment, layer))
    return (*_index_keys(experiment), *_blocks(experiment))


def _blocks(experiment: Experiment) -> Iterator[PlannedCollective]:
    """Every array that keys are made of, around the ring or gathered."""
    plan, workload = experiment.plan, experiment.workload
    n_local = local_tokens(plan, Phase.PREFILL, workload.prompt)
    for shape in _held(experiment):
        match experiment.context_form:
            case ContextForm.RING:
                local = (_local_batch(experiment, Phase.PREFILL), n_local, *shape)
                yield _meeting(experiment, Kind.PERMUTE, local, count=plan.cp - 1)
            case _:
                whole = (_local_batch(experiment, Phase.PREFILL), workload.prompt, *shape)
                yield _meeting(experiment, Kind.ALL_GATHER, whole)


def _held(experiment: Experiment) -> tuple[tuple[int, ...], ...]:
    """What a device holds of each position: [K,H] of keys and of values, or the latent [R+P]."""
    attention, plan = experiment.model.attention, experiment.plan
    match attention:
        case GroupedAttention():
            return ((stored_kv_heads(attention, plan) // plan.tp, attention.head_dim),) * 2
        case LatentAttention():
            return ((attention.kv_rank + attention.rope_dim,),)
        case CompressedAttention():
            raise AssertionError("layers of compressed attention hold different things")
        case _:
            assert_never(attention)


def _compressed(experiment: Experiment, layer: Layer) -> Iterator[PlannedCollective]:
    """The keys of all positions, and all entries or, where blocks are no whole windows, their makings.

    Where an entry takes part of the window before its own, so are the last windows of all blocks.
    """
    plan, n_prompt = experiment.plan, experiment.workload.prompt
    n_local = local_tokens(plan, Phase.PREFILL, n_prompt)
    widths = {array.name: array.shape for array in layer_cache(experiment.model, plan, layer)}

    def gathered(*shape: int) -> PlannedCollective:
        whole = (_local_batch(experiment, Phase.PREFILL), *shape)
        return _meeting(experiment, Kind.ALL_GATHER, whole)

    yield gathered(n_prompt, 1, *widths["window"])
    rate = _rate(experiment.model.attention, layer)
    for name in ("entry", "index"):
        if name not in widths:
            continue
        makings, has_whole_windows = widths[f"{name}_kv"], n_local % rate == 0
        if not has_whole_windows:
            yield from [gathered(n_prompt, *makings)] * 2
            continue
        if makings != widths[name]:
            yield from [gathered(plan.cp, rate, *makings)] * 2
        yield gathered(n_prompt // rate, 1, *widths[name])


def _rate(attention: Attention, layer: Layer) -> int:
    """Positions of an entry of this layer."""
    assert isinstance(attention, CompressedAttention)
    is_sparse = layer.attention is AttentionKind.COMPRESSED_SPARSE
    return attention.sparse_rate if is_sparse else attention.heavy_rate


def _index_keys(experiment: Experiment) -> Iterator[PlannedCollective]:
    """An indexer chooses among all positions at once: every device has the one key head of all."""
    attention, workload = experiment.model.attention, experiment.workload
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        shape = (
            _local_batch(experiment, Phase.PREFILL),
            workload.prompt,
            1,
            attention.indexer.head_dim,
        )
        yield _meeting(experiment, Kind.ALL_GATHER, shape)


def _index_candidates(experiment: Experiment, layer: Layer) -> Iterator[PlannedCollective]:
    """The scores of the positions, or entries, that each device proposes, [b,1,n] of each."""
    attention, plan = experiment.model.attention, experiment.plan
    arrays = {array.name: array for array in layer_cache(experiment.model, plan, layer)}
    of_index = arrays.get("index_k", arrays.get("index"))
    if isinstance(attention, GroupedAttention) or attention.indexer is None or of_index is None:
        return
    n_slots = of_index.n_slots(cache_slots(plan, experiment.workload))
    n_proposed = plan.cp * index_candidates(attention.indexer, n_slots)
    shape = (_local_batch(experiment, Phase.DECODE), 1, n_proposed)
    yield _meeting(experiment, Kind.ALL_GATHER, shape, dtype="f32")


def _merged(experiment: Experiment) -> Iterator[PlannedCollective]:
    """The maxima [b,1,N] of all devices, then their numerators and denominators [b,1,N(H+1)]."""
    attention, plan = experiment.model.attention, experiment.plan
    match attention:
        case GroupedAttention() | CompressedAttention():
            width = attention.head_dim
        case LatentAttention():
            width = attention.value_dim
        case _:
            assert_never(attention)
    n_heads = attention.n_heads // plan.tp
    for size in (n_heads, n_heads * (width + 1)):
        shape = (_local_batch(experiment, Phase.DECODE), 1, size)
        yield _meeting(experiment, Kind.ALL_REDUCE, shape, dtype="f32")


def _local_batch(experiment: Experiment, phase: Phase) -> int:
    """Sequences of one device, or in a pipeline of one of its micro-batches."""
    local_batch = experiment.workload.batch // experiment.plan.data_size
    return local_batch // experiment.n_microbatches(phase)


def _meeting(
    experiment: Experiment,
    kind: Kind,
    shape: tuple[int, ...],
    *,
    count: int = 1,
    dtype: str | None = None,
) -> PlannedCollective:
    groups = experiment.plan.mesh.groups("cp")
    return PlannedCollective(
        part=Part.ATTN,
        kind=kind,
        axis="cp",
        groups=ring_pairs(groups) if kind is Kind.PERMUTE else groups,
        shape=shape,
        dtype=dtype or experiment.workload.activation_dtype,
        count=count,
    )
