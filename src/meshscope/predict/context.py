"""Where the devices of cp meet in one layer's attention of meshscope's own decoder.

Dimensions: b batch of one device, s tokens of a step on one device, S of the prompt, N query heads
and K key and value heads of one device, H head width, R latent rank, P rotated width, V value width.
"""

from collections.abc import Iterator
from typing import assert_never

from meshscope.arch.model import CompressedAttention, GroupedAttention, LatentAttention
from meshscope.plan.context import (
    ContextForm,
    cache_slots,
    index_candidates,
    local_tokens,
    ring_pairs,
)
from meshscope.plan.experiment import Experiment
from meshscope.plan.weights import stored_kv_heads
from meshscope.predict.meeting import Meeting, Step
from meshscope.table.kinds import Kind, Part, Phase


def context_meetings(experiment: Experiment, step: Step) -> tuple[Meeting, ...]:
    """The meetings of one layer over cp, in program order; none where cp is 1."""
    if experiment.plan.cp == 1:
        return ()
    if step.phase is Phase.PREFILL:
        return (*_index_keys(experiment), *_blocks(experiment))
    return (*_index_candidates(experiment), *_merged(experiment))


def _blocks(experiment: Experiment) -> Iterator[Meeting]:
    """Every array that keys are made of, around the ring or gathered."""
    plan, workload = experiment.plan, experiment.workload
    n_local = local_tokens(plan, Phase.PREFILL, workload.prompt)
    for shape in _held(experiment):
        match experiment.program.context:
            case ContextForm.RING:
                local = (_local_batch(experiment, Phase.PREFILL), n_local, *shape)
                yield _meeting(experiment, Kind.PERMUTE, local, count=plan.cp - 1)
            case ContextForm.ALLGATHER:
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
            raise AssertionError("an experiment refuses cp for compressed attention")
        case _:
            assert_never(attention)


def _index_keys(experiment: Experiment) -> Iterator[Meeting]:
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


def _index_candidates(experiment: Experiment) -> Iterator[Meeting]:
    """The scores of the positions that each device proposes, [b,1,n] of each."""
    attention, plan = experiment.model.attention, experiment.plan
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        n_slots = cache_slots(plan, experiment.workload)
        n_proposed = plan.cp * index_candidates(attention.indexer, n_slots)
        shape = (_local_batch(experiment, Phase.DECODE), 1, n_proposed)
        yield _meeting(experiment, Kind.ALL_GATHER, shape, dtype="f32")


def _merged(experiment: Experiment) -> Iterator[Meeting]:
    """The maxima [b,1,N] of all devices, then their numerators and denominators [b,1,N(H+1)]."""
    attention, plan = experiment.model.attention, experiment.plan
    match attention:
        case GroupedAttention():
            width = attention.head_dim
        case LatentAttention():
            width = attention.value_dim
        case CompressedAttention():
            raise AssertionError("an experiment refuses cp for compressed attention")
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
) -> Meeting:
    groups = experiment.plan.mesh.groups("cp")
    return Meeting(
        part=Part.ATTN,
        kind=kind,
        axis="cp",
        groups=ring_pairs(groups) if kind is Kind.PERMUTE else groups,
        shape=shape,
        dtype=dtype or experiment.workload.activation_dtype,
        count=count,
    )
