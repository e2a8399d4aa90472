"""Decode attention that reads the positions present in the cache: a flash-decode kernel for TPUs.

The grid goes over groups of sequences and blocks of keys, with dynamic bounds: blocks before the first or after
the last position that a query attends to are neither fetched nor computed. Blocks are read in the dtype of the
cache and converted in VMEM. The sums follow FlashAttention (Dao et al., arXiv 2205.14135), algorithm 1.

A mask selects slots, for windows, for the positions that an indexer chose, for the tokens of a step and for the
share of the cache that cp leaves to a device. The values are a separate array or the first channels of the keys,
which are then fetched only once. JAX's paged attention has neither masks nor latents.

Shapes: L layers of a stack, B sequences, S tokens of each, K key and value heads, R queries of each (of all tokens),
T cache slots, H width of a key, V width of a value; rows are pairs of a sequence and a head.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshscope.model.mechanisms.attention import LANES
from meshscope.plans.kernel_choice import DECODE_BLOCKS
from meshscope.programs.jax.attention import AttentionScores
from meshscope.programs.jax.collectives import ShardLayout
from meshscope.programs.jax.numerics import MASKED, Array, soft_capped
from meshscope.programs.jax.state import LayerCache

# Bytes that one step of the grid fetches. A step adds some 0.35 us to its copies, in which HBM
# delivers 0.3 MB (v5e) to 1.3 MB (tpu7x).
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernel:
    """Attention of a decode step to the positions present in the cache.

    `mean_context` is the number of positions that the stated cost assumes. For global arrays, `mesh` is
    required: the compiler cannot partition a kernel, which therefore runs under `shard_map` over the
    batch and the heads. `is_interpreted` runs the kernel on a CPU.
    """

    layout: ShardLayout
    mean_context: float
    mesh: Mesh | None = None
    is_interpreted: bool = False

    def __call__(
        self,
        q: Array,
        cache: LayerCache,
        names: Sequence[str],
        mask: Array,
        scores: AttentionScores,
        **settings: Any,
    ) -> tuple[Array, Array]:
        """Attention [B, S, N, V] of q [B, S, N, H] to the slots of these arrays by `mask` [S, T] or [B, S, T].

        Also returns the logarithms [B, S, N] of the sums of exp(score). `settings` are `decode_attention`'s.
        """
        arrays, n_tokens = cache.stacks(names), q.shape[1]
        bias = jnp.where(mask if mask.ndim == 3 else mask[None], 0.0, MASKED)

        def local(q: Array, bias: Array, caches: Sequence[Array], layer: Array) -> Any:
            n_heads = caches[0].shape[2]
            by_head = _by_head(q, n_heads)
            if n_tokens > 1:
                bias = jnp.repeat(bias, by_head.shape[2] // n_tokens, axis=1)
            outs = decode_attention(
                by_head,
                bias,
                caches,
                layer,
                scores,
                mean_context=self.mean_context,
                is_interpreted=self.is_interpreted,
                **settings,
            )
            return [_by_token(out, n_tokens) for out in outs]

        if self.mesh is not None:
            data, tp = self.layout.data, self.layout.axis("tp")
            heads, per_head = tp if arrays[0].shape[2] > 1 else None, P(data, None, tp, None)
            of_bias = P(data if bias.shape[0] > 1 else None, None, None)
            stacks = [P(None, data, heads, None, None)] * len(arrays)
            local = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(per_head, of_bias, stacks, P()),
                out_specs=per_head,
                check_vma=False,
            )
        out, logs = local(q, bias, arrays, jnp.int32(0 if cache.index is None else cache.index))
        return out, logs[..., 0]


def _by_head(q: Array, n_heads: int) -> Array:
    """[B, S, N, H] -> [B, K, R, H]: the queries of each head, token by token."""
    n_sequences, n_tokens, _, width = q.shape
    if n_tokens > 1:
        q = q.reshape(n_sequences, n_tokens, n_heads, -1, width).swapaxes(1, 2)
    return q.reshape(n_sequences, n_heads, -1, width)


def _by_token(out: Array, n_tokens: int) -> Array:
    """[B, K, R, V] -> [B, S, N, V], the inverse of `_by_head`."""
    n_sequences, n_heads, _, width = out.shape
    if n_tokens > 1:
        out = out.reshape(n_sequences, n_heads, n_tokens, -1, width).swapaxes(1, 2)
    return out.reshape(n_sequences, n_tokens, -1, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks:
    """The block of one grid step: `n_keys` slots of `n_together` sequences with all their heads."""

    n_together: int
    n_keys: int

    def n_fetched(
        self, n_present: int, n_slots: int, window: int | None, *, is_chunked: bool = False
    ) -> int:
        """Slots that one sequence fetches when `n_present` positions are in the cache."""
        start = 0
        if window is not None:
            last = n_present - 1
            start = last // window * window if is_chunked else max(last - window + 1, 0)
        end = -(-n_present // self.n_keys) * self.n_keys
        return min(end, n_slots) - start // self.n_keys * self.n_keys


def decode_blocks(n_sequences: int, n_slots: int, slot_bytes: int) -> DecodeBlocks:
    """Blocks of about `BLOCK_BYTES` for a cache with `slot_bytes` per sequence and slot.

    `n_slots` is the most that a query attends to: a window or the whole cache.
    """
    fitting = (n for n in DECODE_BLOCKS if n * slot_bytes <= BLOCK_BYTES and n <= n_slots)
    n_keys = next(fitting, DECODE_BLOCKS[-1])
    most = max(1, min(n_sequences, BLOCK_BYTES // (n_keys * slot_bytes)))
    together = max(n for n in range(1, most + 1) if n_sequences % n == 0)
    return DecodeBlocks(n_together=together, n_keys=n_keys)


def decode_attention(  # noqa: PLR0913  the arrays of attention, and what they mean
    q: Array,
    bias: Array,
    caches: Sequence[Array],
    layer: Array | int,
    scores: AttentionScores,
    *,
    value_width: int,
    mean_context: float,
    window: int | None = None,
    is_chunked: bool = False,
    is_interpreted: bool = False,
) -> tuple[Array, Array]:
    """Attention [B, K, R, V] of q [B, K, R, H] to a layer's slots whose `bias` [B or 1, R or 1, T] is 0.

    `caches` [L, B, K, T, H] have the keys and the values, or one array for both, whose first `value_width`
    channels are the values. The output comes with the logarithms [B, K, R, lanes] of the sums, without sinks.
    The kernel states the FLOPs and bytes of a step with `mean_context` positions, or the window of them.
    """
    (n_sequences, n_heads, n_queries, width), n_slots = q.shape, caches[0].shape[-2]
    # Bytes of one slot of one head in memory, whose rows are padded to whole tiles.
    row_bytes = sum(-(-x.shape[-1] // LANES) * LANES * x.dtype.itemsize for x in caches)
    n_seen = min(n_slots, window or sys.maxsize)
    blocks = decode_blocks(n_sequences, n_seen, n_heads * row_bytes)
    n_rows, n_keys = blocks.n_together * n_heads, blocks.n_keys
    is_seen = (bias == 0).any(axis=(0, 1))
    first, last = jnp.argmax(is_seen) // n_keys, n_slots - 1 - jnp.argmax(is_seen[::-1])
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, first, last)])

    def per_sequence(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.n_together, *array.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    def fetched(cache: Array) -> pl.BlockSpec:
        shape = (None, blocks.n_together, n_heads, n_keys, cache.shape[-1])
        return pl.BlockSpec(shape, lambda b, t, scalars: (scalars[0], b, 0, scalars[1] + t, 0))

    has_sequences = bias.shape[0] > 1
    of_bias = pl.BlockSpec(
        (blocks.n_together if has_sequences else 1, bias.shape[1], n_keys),
        lambda b, t, scalars: (b if has_sequences else 0, 0, scalars[1] + t),
    )
    n_fetched = blocks.n_fetched(
        min(round(mean_context), n_slots), n_slots, window, is_chunked=is_chunked
    )
    n_all = n_sequences * n_heads * n_queries
    small = q.dtype.itemsize * n_all * (width + value_width)
    outs = [
        jax.ShapeDtypeStruct((*q.shape[:-1], value_width), jnp.float32),
        jax.ShapeDtypeStruct((*q.shape[:-1], LANES), jnp.float32),
    ]
    call = pl.pallas_call(
        partial(_attend_block, n_caches=len(caches), of=scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n_sequences // blocks.n_together, last // n_keys + 1 - first),
            in_specs=[per_sequence(q), of_bias, *map(fetched, caches)],
            out_specs=[*map(per_sequence, outs)],
            scratch_shapes=[
                pltpu.VMEM((n_rows, n_queries, width), jnp.float32)
                for width in (LANES, LANES, value_width)
            ],
        ),
        out_shape=outs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_all * n_fetched * (width + value_width),
            transcendentals=n_all * n_fetched,
            bytes_accessed=small + n_sequences * n_heads * row_bytes * n_fetched,
        ),
        name=f"decode_attention_b{blocks.n_together}_k{n_keys}_block",
        interpret=is_interpreted,
    )
    # The cache stays in HBM: else XLA may copy all of its slots to VMEM and back in every step.
    in_hbm = (
        x if is_interpreted else pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in caches
    )
    return call(scalars, q, bias, *in_hbm)


def _attend_block(
    scalars: Any, q_ref: Any, bias_ref: Any, *refs: Any, n_caches: int, of: AttentionScores
) -> None:
    """One block of keys for one group of sequences; `scalars` are the layer, the first block and the last slot.

    The last three refs are sums over the keys so far, [rows, R, ...] (see `PartialAttention`).
    """
    cache_refs, (out_ref, logs_ref), sums = refs[:n_caches], refs[n_caches:-3], refs[-3:]
    largest_ref, total_ref, weighted_ref = sums
    step = pl.program_id(1)
    is_last = step == pl.num_programs(1) - 1
    n_keys = cache_refs[0].shape[-2]

    @pl.when(step == 0)
    def _() -> None:
        for ref, value in zip(sums, (MASKED, 0.0, 0.0), strict=True):
            ref[...] = jnp.full(ref.shape, value, jnp.float32)

    def attend(*, is_last: bool) -> None:
        q = _rows(q_ref)
        keys, values = (_rows(cache_refs[i]).astype(q.dtype) for i in (0, -1))
        scores = soft_capped(_dot(q, keys, 2) * of.scale, of.softcap) + _per_row(bias_ref, len(q))
        values = values[..., : weighted_ref.shape[-1]]
        if is_last:  # later slots may hold anything
            n_seen = scalars[2] + 1 - (scalars[1] + step) * n_keys
            place = lax.broadcasted_iota(jnp.int32, (1, 1, n_keys), 2)
            scores = jnp.where(place < n_seen, scores, MASKED)
            place = lax.broadcasted_iota(jnp.int32, (1, n_keys, 1), 1)
            values = jnp.where(place < n_seen, values, jnp.zeros_like(values))
        before = largest_ref[...]
        largest = jnp.maximum(before, scores.max(axis=2, keepdims=True))
        factor = jnp.exp(before - largest)
        shares = jnp.exp(scores - largest[..., :1])
        largest_ref[...] = largest
        total_ref[...] = total_ref[...] * factor + shares.sum(axis=2, keepdims=True)
        added = _dot(shares.astype(values.dtype), values, 1)
        weighted_ref[...] = weighted_ref[...] * factor[..., :1] + added

    pl.when(jnp.logical_not(is_last))(partial(attend, is_last=False))
    pl.when(is_last)(partial(attend, is_last=True))

    @pl.when(is_last)
    def _() -> None:
        total = total_ref[...]
        logs_ref[...] = (largest_ref[...] + jnp.log(total)).reshape(logs_ref.shape)
        out_ref[...] = (weighted_ref[...] / total[..., :1]).reshape(out_ref.shape)


def _rows(ref: Any) -> Array:
    """A block [B, K, ...] as rows [B*K, ...]."""
    return ref[...].reshape(-1, *ref.shape[2:])


def _per_row(ref: Any, n_rows: int) -> Array:
    """A block [B, R, T] for all heads as [rows, R, T]; one for all sequences as is."""
    n_together, *shape = ref.shape
    if n_together == 1:
        return ref[...]
    heads = jnp.broadcast_to(ref[...][:, None], (n_together, n_rows // n_together, *shape))
    return heads.reshape(n_rows, *shape)


def _dot(left: Array, right: Array, contracted: int) -> Array:
    """Products of each row in float32, over the last dim of `left` and this one of `right`."""
    dims = (((2,), (contracted,)), ((0,), (0,)))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
