"""Decode attention that reads the positions present in the cache: a flash-decode kernel for TPUs.

The kernel attends to the cache and writes the new position in place. Its grid goes over groups of
sequences and blocks of keys, with dynamic bounds: blocks after the current position or before the window
are neither fetched nor computed. Blocks are converted in VMEM. The sums follow FlashAttention (Dao et al., arXiv
2205.14135), algorithm 1, for one query. A step with several tokens of each sequence writes their positions first;
the kernel then reads each block once for all of them.

Where cp splits the cache, each device attends to its own slots and returns the logarithms of its sums, by
which the parts are merged. The values are a separate array or the first channels of the keys, which are then
fetched only once. JAX's paged attention has neither sinks, masks nor latents.

Shapes: L layers of a stack, B sequences, K key and value heads, G query heads of each, T cache slots,
H width of a key, V width of a value; rows are pairs of a sequence and a head.
"""

import sys
from collections.abc import Mapping
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

from meshscope.model.arrays import LANES
from meshscope.plans.kernel_choice import DECODE_BLOCKS
from meshscope.programs.jax.collectives import ShardLayout
from meshscope.programs.jax.numerics import MASKED, Array, Arrays, soft_capped
from meshscope.programs.jax.state import LayerCache

TILE_BYTES = 32  # of a column of a tile: 8 rows of 4 bytes, 16 of 2, 32 of 1
# Bytes that one step of the grid fetches. A step adds some 0.35 us to its copies, in which HBM
# delivers 0.3 MB (v5e) to 1.3 MB (tpu7x).
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShare:
    """The slots of this device's share of the cache that a query attends to, if cp splits it; perhaps none."""

    last: Array  # the slot of the new position if it `is_new_here`, else the last one present
    is_new_here: Array
    lowest: Array | int = 0  # the first slot in the window


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernel:
    """Attention of a decode step to the positions present in the cache."""

    layout: ShardLayout
    mean_context: float  # positions that the stated cost assumes
    mesh: Mesh | None = None  # for global arrays, as in `PrefillKernel`
    is_interpreted: bool = False  # on a CPU

    def __call__(  # noqa: PLR0913  the arrays of attention
        self,
        q: Array,
        new: Mapping[str, Array],
        cache: LayerCache,
        positions: Array,
        *,
        share: CacheShare | None = None,
        sinks: Array | None = None,
        mask: Array | None = None,
        **settings: Any,
    ) -> tuple[Array, Array | None, LayerCache]:
        """Attention [B, S, N, V] of q [B, S, N, H], and the cache with `new` at these positions [S].

        `new` has the arrays [B, K, S, H] of the new positions by their names in the cache; without any, the
        cache has the new positions already. `settings` are fields of `DecodeInputs`. For a share of the cache,
        the output is in float32 and comes with the logarithms [B, S, N] of the sums.
        """
        n_tokens = positions.shape[0]
        if n_tokens > 1:  # a tile of the cache, which the kernel would write, may have some of them
            for name, array in new.items():
                has_heads = cache.arrays[name].ndim - (cache.index is not None) == 4
                cache = cache.written(name, array if has_heads else array[:, 0])
            new = {}
        arrays = cache.stacks(list(new or cache.arrays))

        def local(q: Array, new: Any, caches: Any, at: tuple[Array, ...], extra: Any) -> Any:
            n_heads, sinks = caches[0].shape[2], extra[0]
            if sinks is not None:
                sinks = sinks.reshape(n_heads, -1)
                sinks = sinks if n_tokens == 1 else jnp.tile(sinks, (1, n_tokens))
            n_sequences, _, _, width = q.shape
            if n_tokens > 1:  # the queries of each head, token by token
                q = q.reshape(n_sequences, n_tokens, n_heads, -1, width).swapaxes(1, 2)
            inputs = DecodeInputs(
                q=q.reshape(n_sequences, n_heads, -1, width),
                new=new,
                caches=caches,
                layer=at[0],
                position=at[1],
                sinks=sinks,
                mask=extra[1],
                share=share,
                n_tokens=n_tokens,
                **settings,
            )
            out, *others = decode_attention(
                inputs, mean_context=self.mean_context, is_interpreted=self.is_interpreted
            )
            width = out.shape[-1]
            if n_tokens > 1:
                out = out.reshape(n_sequences, n_heads, n_tokens, -1, width).swapaxes(1, 2)
            return out.reshape(n_sequences, n_tokens, -1, width), others

        if self.mesh is not None:
            data, tp = self.layout.data, self.layout.axis("tp")
            heads, per_head = tp if arrays[0].shape[2] > 1 else None, P(data, None, tp, None)
            stack = P(None, data, heads, None, None)
            extra = (None if sinks is None else P(tp), None if mask is None else P(data, heads))
            rows = [P(data, heads, None, None)] * len(new)
            local = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(per_head, rows, [stack] * len(arrays), (P(), P()), extra),
                out_specs=(per_head, [stack] * len(new)),
                check_vma=False,
            )
        position = positions[-1] if share is None else share.last
        at = (jnp.int32(0 if cache.index is None else cache.index), position)
        out, others = local(q, list(new.values()), arrays, at, (sinks, mask))
        logs = None if share is None else others.pop(0)[..., 0].reshape(q.shape[:-1])
        return out, logs, cache.with_stacks(list(new), others)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks:
    """The block of one grid step: `n_keys` slots of `n_together` sequences with all their heads."""

    n_together: int
    n_keys: int

    def first(self, position: Array, window: int | None, *, is_chunked: bool) -> Any:
        """The index of the first block that a query at this position attends to; chunks are whole blocks."""
        if window is None:
            return 0
        if is_chunked:
            return lax.div(position, window) * (window // self.n_keys)
        return self.index(lax.max(position - window + 1, 0))

    def index(self, position: Array) -> Array:
        """The index of the block with this position; a shift, as sizes are powers of two."""
        return lax.shift_right_logical(position, self.n_keys.bit_length() - 1)

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
    """Blocks of about `BLOCK_BYTES` for a cache with `slot_bytes` per sequence and slot, `n_slots` of which a query sees."""
    fitting = (n for n in DECODE_BLOCKS if n * slot_bytes <= BLOCK_BYTES and n <= n_slots)
    n_keys = next(fitting, DECODE_BLOCKS[-1])
    most = max(1, min(n_sequences, BLOCK_BYTES // (n_keys * slot_bytes)))
    together = max(n for n in range(1, most + 1) if n_sequences % n == 0)
    return DecodeBlocks(n_together=together, n_keys=n_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The queries of a decode step and the cache: keys and values, or one array for both.

    With `n_tokens` tokens, G has each token's queries in turn, and the cache has their positions already.
    """

    q: Array  # [B, K, G, H]
    new: Arrays  # [B, K, 1, H] of the new position; empty if the cache has it already
    caches: Arrays  # [L, B, K, T, H]
    value_width: int  # the first channels of the last array
    layer: Array | int
    position: Array  # the last one
    scale: float
    window: int | None = None
    is_chunked: bool = False
    softcap: float | None = None
    sinks: Array | None = None  # [K, G] logits of a position without a value
    mask: Array | None = None  # [B, K, T] slots
    share: CacheShare | None = None
    n_tokens: int = 1


def decode_attention(
    inputs: DecodeInputs, *, mean_context: float, is_interpreted: bool = False
) -> tuple[Array, ...]:
    """Attention [B, K, G, V] to the slots up to `position`, or a window of them, and the new caches, if any.

    For a share of the cache, the output is in float32, followed by the logarithms [B, K, G, lanes] of the sums.
    """
    n_sequences, n_heads, n_group, _ = inputs.q.shape
    n_slots = min(inputs.caches[0].shape[-2], inputs.window or sys.maxsize)
    blocks = decode_blocks(n_sequences, n_slots, n_heads * sum(map(_row_bytes, inputs.caches)))
    share, of_share, position = inputs.share, (), inputs.position
    if share is None:
        first = position if inputs.n_tokens == 1 else position - (inputs.n_tokens - 1)
        first = blocks.first(first, inputs.window, is_chunked=inputs.is_chunked)
    else:
        first = blocks.index(lax.min(jnp.int32(share.lowest), share.last))
        of_share = (share.is_new_here, share.lowest)
    n_blocks = blocks.index(position) + 1 - first
    values = (inputs.layer, first, position, *of_share)
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in values])

    def per_sequence(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.n_together, *array.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    def of_cache(cache: Array, n_rows: int, row: Any) -> pl.BlockSpec:
        shape = (None, blocks.n_together, n_heads, n_rows, cache.shape[-1])
        return pl.BlockSpec(shape, lambda b, t, scalars: (scalars[0], b, 0, row(t, scalars), 0))

    def fetched(cache: Array) -> pl.BlockSpec:
        return of_cache(cache, blocks.n_keys, lambda t, scalars: scalars[1] + t)

    def written(cache: Array) -> pl.BlockSpec:
        n_rows = TILE_BYTES // cache.dtype.itemsize
        return of_cache(cache, n_rows, lambda _, scalars: lax.div(scalars[2], n_rows))

    in_specs = [per_sequence(x) for x in (inputs.q, *inputs.new)]
    in_specs += [fetched(x) for x in inputs.caches]
    # The cache stays in HBM: else XLA may copy all of its slots to VMEM and back in every step.
    in_hbm = inputs.caches
    if not is_interpreted:
        in_hbm = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in in_hbm]
    arguments = [inputs.q, *inputs.new, *in_hbm]
    if inputs.sinks is not None:
        arguments.append(inputs.sinks.astype(jnp.float32)[..., None])
        in_specs.append(pl.BlockSpec((n_heads, n_group, 1), lambda *_: (0, 0, 0)))
    if inputs.mask is not None:
        bias = jnp.where(inputs.mask, 0.0, MASKED)
        arguments += [bias, lax.dynamic_slice_in_dim(bias, position, 1, axis=2)]
        rows, of_block = (
            (blocks.n_together, bias.shape[1]),
            lambda b, t, scalars: (b, 0, scalars[1] + t),
        )
        in_specs += [
            pl.BlockSpec((*rows, blocks.n_keys), of_block),
            pl.BlockSpec((*rows, 1), lambda b, *_: (b, 0, 0)),
        ]
    out_dtype = inputs.q.dtype if share is None else jnp.float32
    outs = [jax.ShapeDtypeStruct((*inputs.q.shape[:-1], inputs.value_width), out_dtype)]
    if share is not None:
        outs.append(jax.ShapeDtypeStruct((*inputs.q.shape[:-1], LANES), jnp.float32))
    changed = inputs.caches[: len(inputs.new)]
    n_rows = blocks.n_together * n_heads
    call = pl.pallas_call(
        partial(_attend_block, of=inputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n_sequences // blocks.n_together, n_blocks),
            in_specs=in_specs,
            out_specs=[*map(per_sequence, outs), *map(written, changed)],
            scratch_shapes=[
                pltpu.VMEM((n_rows, n_group, width), jnp.float32)
                for width in (LANES, LANES, inputs.value_width)
            ],
        ),
        out_shape=[*outs, *(pltpu.HBM(x.shape, x.dtype) for x in changed)],
        # Operands count from the scalars.
        input_output_aliases={2 + len(changed) + i: len(outs) + i for i in range(len(changed))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(inputs, blocks, round(mean_context)),
        name=f"decode_attention_b{blocks.n_together}_k{blocks.n_keys}_block",
        interpret=is_interpreted,
    )
    return tuple(call(scalars, *arguments))


def _row_bytes(cache: Array) -> int:
    """Bytes of one slot of one head in memory, whose rows are padded to whole tiles."""
    return -(-cache.shape[-1] // LANES) * LANES * cache.dtype.itemsize


def _cost(inputs: DecodeInputs, blocks: DecodeBlocks, n_present: int) -> pl.CostEstimate:
    n_sequences, n_heads, n_group, width = inputs.q.shape
    n_slots = inputs.caches[0].shape[-2]
    n_fetched = blocks.n_fetched(
        min(n_present, n_slots), n_slots, inputs.window, is_chunked=inputs.is_chunked
    )
    n_rows = n_sequences * n_heads
    small = inputs.q.dtype.itemsize * n_rows * n_group * (width + inputs.value_width)
    cache_bytes = n_rows * sum(
        _row_bytes(x) * (n_fetched + (TILE_BYTES // x.dtype.itemsize if inputs.new else 0))
        for x in inputs.caches
    )
    return pl.CostEstimate(
        flops=2 * n_rows * n_group * n_fetched * (width + inputs.value_width),
        transcendentals=n_rows * n_group * n_fetched,
        bytes_accessed=small + cache_bytes,
    )


def _attend_block(  # noqa: C901, PLR0915  the form of a kernel
    scalars: Any, q_ref: Any, *refs: Any, of: DecodeInputs
) -> None:
    """One block of keys for one group of sequences; it reads only static fields of the inputs `of`."""
    has_new, is_part, has_sinks = bool(of.new), of.share is not None, of.sinks is not None
    sizes = (len(of.new), len(of.caches), has_sinks, 2 * (of.mask is not None), 1, is_part)
    taken = iter(refs)
    new_refs, cache_refs, sinks_ref, bias_refs, (out_ref,), logs_ref, written_refs, sums = (
        [next(taken) for _ in range(n)] for n in (*sizes, len(of.new), 3)
    )
    largest_ref, total_ref, weighted_ref = sums
    step = pl.program_id(1)
    is_last = step == pl.num_programs(1) - 1
    n_keys = cache_refs[0].shape[-2]
    start, position = (scalars[1] + step) * n_keys, scalars[2]
    if is_part:
        lowest, n_cached = scalars[4], position + 1 - (scalars[3] if has_new else 0)
        is_new_here = scalars[3] == 1
    else:
        is_open = of.window is None or (of.is_chunked and of.n_tokens == 1)
        n_cached = position if has_new else position + 1
        lowest, is_new_here = None if is_open else position - of.window + 1, None
    q = _rows(q_ref)

    @pl.when(step == 0)
    def _() -> None:
        score = jnp.full((*largest_ref.shape[:2], 1), MASKED, jnp.float32)
        value = jnp.zeros((largest_ref.shape[0], 1, of.value_width), jnp.float32)
        if has_new:
            new = [_rows(x).astype(c.dtype) for x, c in zip(new_refs, cache_refs, strict=True)]
            products = q.astype(jnp.float32) * new[0].astype(q.dtype).astype(jnp.float32)
            score = soft_capped(products.sum(axis=2, keepdims=True) * of.scale, of.softcap)
            if bias_refs:
                score += _per_row(bias_refs[1], score.shape[0])
            score = score if is_new_here is None else jnp.where(is_new_here, score, MASKED)
            value = new[-1][..., : of.value_width]
        score = jnp.broadcast_to(score, largest_ref.shape)
        value = value.astype(jnp.float32)
        if not has_sinks:
            largest_ref[...] = score
            total_ref[...] = jnp.ones_like(score)
            weighted_ref[...] = jnp.broadcast_to(value, weighted_ref.shape)
            return
        sinks = sinks_ref[0]
        shape = (score.shape[0] // sinks.shape[0], *sinks.shape[:2], score.shape[2])
        sink = jnp.broadcast_to(sinks[...][None], shape).reshape(score.shape)
        largest = jnp.maximum(score, sink)
        share = jnp.exp(score - largest)
        largest_ref[...] = largest
        total_ref[...] = share + jnp.exp(sink - largest)
        weighted_ref[...] = share[..., :1] * value

    def attend(*, is_last: bool) -> None:
        keys, values = (_rows(cache_refs[i]).astype(q.dtype) for i in (0, -1))
        scores = soft_capped(_dot(q, keys, 2) * of.scale, of.softcap)
        if bias_refs:
            scores += _per_row(bias_refs[0], scores.shape[0])
        at = start + lax.broadcasted_iota(jnp.int32, (1, 1, n_keys), 2)
        if of.n_tokens > 1:
            scores = jnp.where(_token_mask(of, at, position), scores, MASKED)
        elif lowest is not None:
            scores = jnp.where(at >= lowest, scores, MASKED)
        values = values[..., : of.value_width]
        if is_last:  # later slots may hold anything, and the new position is already counted
            scores = jnp.where(at < n_cached, scores, MASKED)
            at = start + lax.broadcasted_iota(jnp.int32, (1, n_keys, 1), 1)
            values = jnp.where(at < n_cached, values, jnp.zeros_like(values))
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
        for ref in logs_ref:
            ref[...] = (largest_ref[...] + jnp.log(total_ref[...])).reshape(ref.shape)
        out = weighted_ref[...] / total_ref[...][..., :1]
        out_ref[...] = out.reshape(out_ref.shape).astype(out_ref.dtype)
        for new, cache, written in zip(
            new_refs, cache_refs[: len(new_refs)], written_refs, strict=True
        ):
            # The tile of the new position; unchanged if another device has it.
            n_tile, offset = written.shape[-2], position - start
            first = pl.multiple_of(lax.div(offset, n_tile) * n_tile, n_tile)
            tile = cache[:, :, pl.ds(first, n_tile), :]
            is_new = first + lax.broadcasted_iota(jnp.int32, (1, 1, n_tile, 1), 2) == offset
            is_new = is_new if is_new_here is None else is_new & is_new_here
            written[...] = jnp.where(is_new, new[...].astype(tile.dtype), tile)


def _token_mask(of: DecodeInputs, at: Array, last: Array) -> Array:
    """The mask [1, S*G, T] of the slots `at` [1, 1, T] that the queries of several tokens, the last at `last`, attend to."""
    n_queries = of.q.shape[2]
    row = lax.broadcasted_iota(jnp.int32, (1, n_queries, 1), 1)
    first, of_token = last - (of.n_tokens - 1), n_queries // of.n_tokens
    # Tokens are in at most two chunks, and the first block starts with the first one.
    started = [(row >= n * of_token).astype(jnp.int32) for n in range(1, of.n_tokens)]
    of_query = sum(started, jnp.full(row.shape, first, jnp.int32))
    seen = at <= of_query
    if of.window is None:
        return seen
    if not of.is_chunked:
        return seen & (at > of_query - of.window)
    start = lax.div(last, of.window) * of.window
    return seen & (at >= jnp.where(of_query >= start, start, 0))


def _rows(ref: Any) -> Array:
    return ref[...].reshape(-1, *ref.shape[2:])


def _per_row(ref: Any, n_rows: int) -> Array:
    n_together, _, n_keys = ref.shape
    heads = jnp.broadcast_to(ref[...][:, :, None], (n_together, n_rows // n_together, 1, n_keys))
    return heads.reshape(n_rows, 1, n_keys)


def _dot(left: Array, right: Array, contracted: int) -> Array:
    dims = (((2,), (contracted,)), ((0,), (0,)))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
