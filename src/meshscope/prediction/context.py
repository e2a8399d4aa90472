"""Context-parallel collectives in one attention layer of meshscope's own decoder.

Dimensions, all per device: b sequences, s tokens of a step, N query heads, K key and value heads,
H head width, R latent rank, P rotated width. S is the whole prompt.
"""

from collections.abc import Iterator
from typing import assert_never

from meshscope.events.enums import Kind, Part, Phase
from meshscope.model.flops import linear_of, of_kind, window_of
from meshscope.model.model import (
    Attention,
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Layer,
)
from meshscope.plans.caches import layer_cache
from meshscope.plans.context_form import (
    ContextForm,
    cache_slots,
    index_candidates,
    local_tokens,
    ring_pairs,
    ring_sends,
)
from meshscope.plans.experiment import Experiment
from meshscope.plans.weights import stored_kv_heads
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStep


def context_collectives(
    experiment: Experiment, step: PlannedStep, layer: Layer, *, reads_received: bool = False
) -> tuple[PlannedCollective, ...]:
    """The collectives of one layer over cp, in program order; none if cp=1.

    `reads_received` is whether the layer is the first of its stage that reads keys and values of an earlier stage.
    """
    if experiment.plan.cp == 1:
        return ()
    if layer.attention is AttentionKind.LINEAR:
        is_prefill = step.phase is Phase.PREFILL
        return tuple(_pass_states(experiment, step)) if is_prefill else ()
    if step.phase is Phase.DECODE:
        return (*_gather_index_scores(experiment, layer), *_merge_softmax(experiment, layer))
    if step.is_cut:
        return tuple(_share_queries(experiment, step, layer))
    if isinstance(experiment.model.attention, CompressedAttention):
        return tuple(_gather_entries(experiment, layer))
    of_keys = _share_keys(experiment, layer, reads_received=reads_received)
    return (*_gather_index_keys(experiment, layer), *of_keys)


def _share_keys(
    experiment: Experiment, layer: Layer, *, reads_received: bool
) -> Iterator[PlannedCollective]:
    """Keys and values (or latents) of the other blocks, by ring permutes or an all-gather.

    With a kernel, the ring leaves out blocks beyond the window. In TorchXLA programs, XLA merges the equal permutes
    of layers of a stage that share a cache; JAX programs send the blocks for each of them.
    """
    is_traced = experiment.program.frontend.is_traced
    is_merged = is_traced and layer.shares_cache and not reads_received
    plan, workload = experiment.plan, experiment.workload
    n_local = local_tokens(plan, Phase.PREFILL, workload.prompt)
    local_batch = _local_batch(experiment, Phase.PREFILL)
    has_window = (
        experiment.kernels.prefill_attention.kernel is not None
        and layer.attention is not AttentionKind.CHUNKED
    )
    window = window_of(experiment.model.attention, layer.attention) if has_window else None
    for shape in _position_shapes(experiment, layer):
        match experiment.context_form:
            case ContextForm.RING if is_merged:
                return
            case ContextForm.RING:
                local = (local_batch, n_local, *shape)
                n_sends = ring_sends(plan.cp, n_local, window)
                yield _collective(experiment, Kind.PERMUTE, local, count=n_sends)
            case _:
                whole = (local_batch, workload.prompt, *shape)
                yield _collective(experiment, Kind.ALL_GATHER, whole)


def _share_queries(
    experiment: Experiment, step: PlannedStep, layer: Layer
) -> Iterator[PlannedCollective]:
    """In chunks: the queries of all blocks, then each device's outputs and sums for their owners."""
    attention, plan = of_kind(experiment.model.attention, layer.attention), experiment.plan
    match attention:
        case GroupedAttention():
            width, value_width = attention.head_dim, attention.head_dim
        case LatentAttention():
            width, value_width = attention.qk_dim, attention.value_dim
        case CompressedAttention():
            raise AssertionError("compressed attention keeps prompts whole")
        case _:
            assert_never(attention)
    n_heads, local_batch = attention.n_heads // plan.tp, _local_batch(experiment, Phase.PREFILL)
    of_device = (plan.cp, local_batch, local_tokens(plan, Phase.PREFILL, step.n_tokens))
    yield _collective(experiment, Kind.ALL_GATHER, (local_batch, step.n_tokens, n_heads, width))
    yield _collective(experiment, Kind.ALL_TO_ALL, (*of_device, n_heads * value_width))
    yield _collective(experiment, Kind.ALL_TO_ALL, (*of_device, n_heads), dtype="f32")


def _pass_states(experiment: Experiment, step: PlannedStep) -> Iterator[PlannedCollective]:
    """In linear attention: the last inputs of the convolution in each block, then how it maps the states.

    The map has a matrix [K,K] and what is added [K,H], in float32, for each of V value heads of K keys and H values.
    """
    linear, plan = linear_of(experiment.model.attention), experiment.plan
    local_batch = _local_batch(experiment, Phase.PREFILL)
    n_last = min(linear.conv_width - 1, local_tokens(plan, Phase.PREFILL, step.n_tokens))
    tails = (local_batch, plan.cp * n_last, linear.n_channels // plan.tp)
    n_maps = plan.cp * linear.n_value_heads // plan.tp
    maps = (local_batch, n_maps, linear.key_dim, linear.key_dim + linear.value_dim)
    yield _collective(experiment, Kind.ALL_GATHER, tails)
    yield _collective(experiment, Kind.ALL_GATHER, maps, dtype="f32")


def _position_shapes(experiment: Experiment, layer: Layer) -> tuple[tuple[int, ...], ...]:
    """Shapes cached per position on one device: [K,H] for keys and values, or the latent [R+P]."""
    attention, plan = of_kind(experiment.model.attention, layer.attention), experiment.plan
    match attention:
        case GroupedAttention():
            return ((stored_kv_heads(attention, plan) // plan.tp, attention.head_dim),) * 2
        case LatentAttention():
            return ((attention.kv_rank + attention.rope_dim,),)
        case CompressedAttention():
            raise AssertionError("the cached shapes of compressed attention depend on the layer")
        case _:
            assert_never(attention)


def _gather_entries(experiment: Experiment, layer: Layer) -> Iterator[PlannedCollective]:
    """All-gathers of compressed attention: keys of all positions, then all compressed entries.

    If a block is not a whole number of entries, the positions (`kv` and `gate`) are gathered and
    compressed afterwards. If an entry also reads the positions before its own, the last positions
    of each block are gathered as well.
    """
    plan, n_prompt = experiment.plan, experiment.workload.prompt
    n_local = local_tokens(plan, Phase.PREFILL, n_prompt)
    widths = {array.name: array.shape for array in layer_cache(experiment.model, plan, layer)}

    def gather(*shape: int) -> PlannedCollective:
        whole = (_local_batch(experiment, Phase.PREFILL), *shape)
        return _collective(experiment, Kind.ALL_GATHER, whole)

    yield gather(n_prompt, 1, *widths["window"])
    rate = _rate(experiment.model.attention, layer)
    for name in ("entry", "index"):
        if name not in widths:
            continue
        position = widths[f"{name}_kv"]
        if n_local % rate:
            yield from [gather(n_prompt, *position)] * 2
            continue
        if position != widths[name]:
            yield from [gather(plan.cp, rate, *position)] * 2
        yield gather(n_prompt // rate, 1, *widths[name])


def _rate(attention: Attention, layer: Layer) -> int:
    """Positions per compressed entry in this layer."""
    assert isinstance(attention, CompressedAttention)
    is_sparse = layer.attention is AttentionKind.COMPRESSED_SPARSE
    return attention.sparse_rate if is_sparse else attention.heavy_rate


def _gather_index_keys(experiment: Experiment, layer: Layer) -> Iterator[PlannedCollective]:
    """All-gather of the indexer's single key head: it selects among all positions of the prompt."""
    attention, workload = experiment.model.attention, experiment.workload
    if layer.attention is AttentionKind.SHARED:
        return
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        shape = (
            _local_batch(experiment, Phase.PREFILL),
            workload.prompt,
            1,
            attention.indexer.head_dim,
        )
        yield _collective(experiment, Kind.ALL_GATHER, shape)


def _gather_index_scores(experiment: Experiment, layer: Layer) -> Iterator[PlannedCollective]:
    """All-gather of the indexer scores [b,s,n] of the positions or entries each device proposes."""
    attention, plan = experiment.model.attention, experiment.plan
    arrays = {array.name: array for array in layer_cache(experiment.model, plan, layer)}
    index_array = arrays.get("index_k", arrays.get("index"))
    if isinstance(attention, GroupedAttention) or attention.indexer is None or index_array is None:
        return
    n_slots = index_array.n_slots(cache_slots(plan, experiment.workload))
    n_candidates = plan.cp * index_candidates(attention.indexer, n_slots)
    shape = (
        _local_batch(experiment, Phase.DECODE),
        experiment.n_positions(Phase.DECODE),
        n_candidates,
    )
    yield _collective(experiment, Kind.ALL_GATHER, shape, dtype="f32")


def _merge_softmax(experiment: Experiment, layer: Layer) -> Iterator[PlannedCollective]:
    """All-reduces that merge partial softmaxes: maxima [b,s,N], then sums [b,s,N(H+1)]."""
    attention, plan = of_kind(experiment.model.attention, layer.attention), experiment.plan
    match attention:
        case GroupedAttention() | CompressedAttention():
            width = attention.head_dim
        case LatentAttention():
            width = attention.value_dim
        case _:
            assert_never(attention)
    n_heads = attention.n_heads // plan.tp
    for size in (n_heads, n_heads * (width + 1)):
        shape = (_local_batch(experiment, Phase.DECODE), experiment.n_positions(Phase.DECODE), size)
        yield _collective(experiment, Kind.ALL_REDUCE, shape, dtype="f32")


def _local_batch(experiment: Experiment, phase: Phase) -> int:
    """Sequences of one device, of one of its chunks, or of one micro-batch in a pipeline."""
    return experiment.n_sequences(phase) // experiment.n_microbatches(phase)


def _collective(
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
