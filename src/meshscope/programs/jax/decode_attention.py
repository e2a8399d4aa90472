"""Decode attention that reads the positions present in the cache: a flash-decode kernel for TPUs.

The kernel attends to the cache and writes the new position in place. Its grid goes over groups of
sequences and blocks of keys, with dynamic bounds: blocks after the current position or before the window
are neither fetched nor computed. Blocks are read in the dtype of the cache and converted in VMEM.

A step with several tokens of each sequence writes their positions first. The kernel then reads each block
once for all of them, and each query attends to the positions up to its own.

Where cp splits the cache, each device attends to its own slots and returns the logarithms of its sums, by
which the parts are merged.

The values are an array of their own or the first channels of the keys, which are then fetched only once.

Shapes: L layers of a stack, B sequences, K key and value heads, G query heads of each, T cache slots,
H width of a key, V width of a value.
"""

import sys
from collections.abc import Mapping, Sequence
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
from meshscope.programs.jax.collectives import ShardLayout
from meshscope.programs.jax.decode_kernel import QueryTokens, decode_block
from meshscope.programs.jax.numerics import MASKED, Array
from meshscope.programs.jax.state import LayerCache

TILE_BYTES = 32  # of a column of a tile: 8 rows of 4 bytes, 16 of 2, 32 of 1

# Bytes that one step of the grid fetches. A step takes some 0.35 us beside its copies, in which HBM
# delivers 0.3 MB (v5e) to 1.3 MB (tpu7x).
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShare:
    """The slots of this device's share of the cache that a query attends to, if cp splits it.

    `last` is the slot of the new position if `is_new_here`, else the last one present. `lowest` is the first
    slot in the window; a device may have none.
    """

    last: Array
    is_new_here: Array
    lowest: Array | int = 0


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

    def __call__(  # noqa: PLR0913  the inputs of attention
        self,
        q: Array,
        new: Mapping[str, Array],
        cache: LayerCache,
        positions: Array,
        *,
        scale: float,
        value_width: int,
        window: int | None = None,
        is_chunked: bool = False,
        softcap: float | None = None,
        sinks: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, LayerCache]:
        """Attention [B, S, N, V] of q [B, S, N, H], and the cache with `new` at these positions [S].

        `new` has the arrays [B, K, S, H] of the new positions by their names in the cache: keys and
        values, or one array whose first `value_width` channels are the values; without any, the cache has the
        new positions already. `mask` [B, T] selects slots among those of the window.
        """
        n_tokens = positions.shape[0]
        if (
            n_tokens > 1
        ):  # a tile of the cache, which the kernel would write, may have only a part of them
            for name, array in new.items():
                cache = cache.written(name, array if cache.has_heads(name) else array[:, 0])
            new = {}
        names = list(new or cache.arrays)

        def local(q: Array, new: Any, caches: Any, at: tuple[Array, ...], extra: Any) -> Any:
            sinks, mask = extra
            n_heads = caches[0].shape[2]
            inputs = DecodeInputs(
                q=_by_head(q, n_heads),
                new=new,
                caches=caches,
                value_width=value_width,
                layer=at[0],
                position=at[1],
                scale=scale,
                window=window,
                is_chunked=is_chunked,
                softcap=softcap,
                sinks=None if sinks is None else _of_queries(sinks.reshape(n_heads, -1), n_tokens),
                mask=mask,
                n_tokens=n_tokens,
            )
            out, *written = decode_attention(
                inputs, mean_context=self.mean_context, is_interpreted=self.is_interpreted
            )
            return _by_token(out, n_tokens), written

        if self.mesh is not None:
            has_extra = (sinks is not None, mask is not None)
            local = self._mapped(local, len(new), cache.stacks(names), has_extra)
        arrays = cache.stacks(names)
        at = (jnp.int32(cache.layer), positions[-1])
        out, written = local(q, list(new.values()), arrays, at, (sinks, mask))
        return out, cache.with_stacks(list(new), written)

    def part(  # noqa: PLR0913  the inputs of attention
        self,
        q: Array,
        new: Mapping[str, Array],
        cache: LayerCache,
        share: CacheShare,
        *,
        scale: float,
        value_width: int,
        window: int | None = None,
        softcap: float | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array, LayerCache]:
        """As `__call__`, for the local slots: also the logarithms [B, 1, N] of the sums, before the cache.

        The output is in float32. `new` is written on the device that has its slot.
        """
        caches = cache.stacks(list(new or cache.arrays))
        inputs = DecodeInputs(
            q=q.reshape(q.shape[0], caches[0].shape[2], -1, q.shape[-1]),
            new=list(new.values()),
            caches=caches,
            value_width=value_width,
            layer=jnp.int32(cache.layer),
            position=share.last,
            scale=scale,
            window=window,
            softcap=softcap,
            mask=mask,
            share=share,
        )
        out, logs, *written = decode_attention(
            inputs, mean_context=self.mean_context, is_interpreted=self.is_interpreted
        )
        out = out.reshape(*q.shape[:-1], value_width)
        return out, logs[..., 0].reshape(q.shape[:-1]), cache.with_stacks(list(new), written)

    def _mapped(
        self, local: Any, n_new: int, caches: Sequence[Array], has_extra: tuple[bool, bool]
    ) -> Any:
        """`local` on the shards of global arrays; `has_extra` is whether there are sinks and a mask."""
        data, tp = self.layout.data, self.layout.axis("tp")
        heads = tp if caches[0].shape[2] > 1 else None
        per_head, rows = P(data, None, tp, None), [P(data, heads, None, None)] * n_new
        stack = P(None, data, heads, None, None)
        stacks = [stack] * len(caches)
        extra = (P(tp) if has_extra[0] else None, P(data, None) if has_extra[1] else None)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(per_head, rows, stacks, (P(), P()), extra),
            out_specs=(per_head, [stack] * n_new),
            check_vma=False,
        )


def _by_head(q: Array, n_heads: int) -> Array:
    """[B, S, N, H] -> [B, K, S*G, H]: the queries of each head, token by token."""
    n_sequences, n_tokens, _, width = q.shape
    if n_tokens == 1:
        return q.reshape(n_sequences, n_heads, -1, width)
    grouped = q.reshape(n_sequences, n_tokens, n_heads, -1, width).swapaxes(1, 2)
    return grouped.reshape(n_sequences, n_heads, -1, width)


def _by_token(out: Array, n_tokens: int) -> Array:
    """[B, K, S*G, V] -> [B, S, N, V], the inverse of `_by_head`."""
    n_sequences, n_heads, _, width = out.shape
    if n_tokens > 1:
        out = out.reshape(n_sequences, n_heads, n_tokens, -1, width).swapaxes(1, 2)
    return out.reshape(n_sequences, n_tokens, -1, width)


def _of_queries(sinks: Array, n_tokens: int) -> Array:
    """Sinks [K, G] -> [K, S*G]."""
    return sinks if n_tokens == 1 else jnp.tile(sinks, (1, n_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks:
    """The block of one grid step: `n_keys` slots of `n_together` sequences with all their heads."""

    n_together: int
    n_keys: int

    @property
    def name(self) -> str:
        """The name of the kernel in the program."""
        return f"decode_attention_b{self.n_together}_k{self.n_keys}_block"

    def first(self, position: Any, window: int | None, *, is_chunked: bool = False) -> Any:
        """The index of the first block that a query at this position attends to.

        Chunks are whole blocks.
        """
        if window is None:
            return 0
        if is_chunked:
            start = position // window if isinstance(position, int) else lax.div(position, window)
            return start * (window // self.n_keys)
        if isinstance(position, int):
            return max(position - window + 1, 0) // self.n_keys
        return self.index(lax.max(position - window + 1, 0))

    def index(self, position: Array) -> Array:
        """The index of the block with this position; a shift, as sizes are powers of two."""
        return lax.shift_right_logical(position, self.n_keys.bit_length() - 1)

    def n_fetched(
        self, n_present: int, n_slots: int, window: int | None, *, is_chunked: bool = False
    ) -> int:
        """Slots that one sequence fetches when `n_present` positions are in the cache."""
        start = self.first(n_present - 1, window, is_chunked=is_chunked) * self.n_keys
        end = -(-n_present // self.n_keys) * self.n_keys
        return min(end, n_slots) - start


def decode_blocks(n_sequences: int, n_slots: int, slot_bytes: int) -> DecodeBlocks:
    """Blocks of about `BLOCK_BYTES` for a cache with `slot_bytes` per sequence and slot.

    `n_slots` are those that a query attends to at most: a window or the whole cache.
    """
    fitting = (n for n in DECODE_BLOCKS if n * slot_bytes <= BLOCK_BYTES and n <= n_slots)
    n_keys = next(fitting, DECODE_BLOCKS[-1])
    most = max(1, min(n_sequences, BLOCK_BYTES // (n_keys * slot_bytes)))
    together = max(n for n in range(1, most + 1) if n_sequences % n == 0)
    return DecodeBlocks(n_together=together, n_keys=n_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The query [B, K, G, H] and the new position [B, K, 1, H] of a decode step, and the cache.

    `new` and `caches` [L, B, K, T, H] have the keys and the values, or one array for both, whose first
    `value_width` channels are the values; `new` is empty if the cache has the new position already.
    `sinks` [K, G] are logits of a position without a value;
    `mask` [B, T] selects slots for all heads. With `n_tokens` tokens, G has the queries of one after those of
    the other, the cache has their positions already, and `position` is the last one.
    """

    q: Array
    new: Sequence[Array]
    caches: Sequence[Array]
    value_width: int
    layer: Array | int
    position: Array
    scale: float
    window: int | None = None
    is_chunked: bool = False
    softcap: float | None = None
    sinks: Array | None = None
    mask: Array | None = None
    share: CacheShare | None = None
    n_tokens: int = 1

    @property
    def first_position(self) -> Array:
        """The position of the first token."""
        return self.position if self.n_tokens == 1 else self.position - (self.n_tokens - 1)


def decode_attention(
    inputs: DecodeInputs, *, mean_context: float, is_interpreted: bool = False
) -> tuple[Array, ...]:
    """Attention [B, K, G, V] to the slots up to `position`, or a window of them, and the new caches, if any.

    For a share of the cache, the output is in float32, and behind it are the logarithms [B, K, G, lanes] of
    the sums.

    The kernel states the FLOPs and bytes of a step with `mean_context` positions.
    """
    n_sequences, n_heads, n_group, _ = inputs.q.shape
    blocks = _blocks(inputs)
    share, of_share = inputs.share, ()
    if share is None:
        first = blocks.first(inputs.first_position, inputs.window, is_chunked=inputs.is_chunked)
    else:
        first = blocks.index(lax.min(jnp.int32(share.lowest), share.last))
        of_share = (share.is_new_here, share.lowest)
    n_blocks = blocks.index(inputs.position) + 1 - first
    values = (inputs.layer, first, inputs.position, *of_share)
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in values])

    def per_sequence(array: Array) -> pl.BlockSpec:
        shape = (blocks.n_together, *array.shape[1:])
        return pl.BlockSpec(shape, lambda b, *_: (b, 0, 0, 0))

    def fetched(cache: Array) -> pl.BlockSpec:
        shape = (None, blocks.n_together, n_heads, blocks.n_keys, cache.shape[-1])
        return pl.BlockSpec(shape, lambda b, t, scalars: (scalars[0], b, 0, scalars[1] + t, 0))

    def written(cache: Array) -> pl.BlockSpec:
        n_rows = TILE_BYTES // cache.dtype.itemsize
        shape = (None, blocks.n_together, n_heads, n_rows, cache.shape[-1])

        def index(b: Any, _: Any, scalars: Any) -> tuple[Any, ...]:
            return (scalars[0], b, 0, lax.div(scalars[2], n_rows), 0)

        return pl.BlockSpec(shape, index)

    in_specs = [per_sequence(x) for x in (inputs.q, *inputs.new)]
    in_specs += [fetched(x) for x in inputs.caches]
    arguments = [inputs.q, *inputs.new, *(_in_hbm(x, is_interpreted) for x in inputs.caches)]
    if inputs.sinks is not None:
        arguments.append(inputs.sinks.astype(jnp.float32)[..., None])
        in_specs.append(pl.BlockSpec((n_heads, n_group, 1), lambda *_: (0, 0, 0)))
    if inputs.mask is not None:
        bias = jnp.where(inputs.mask, 0.0, MASKED)[:, None]
        of_new = lax.dynamic_slice_in_dim(bias, inputs.position, 1, axis=2)
        arguments += [bias, of_new]
        in_specs += [
            pl.BlockSpec(
                (blocks.n_together, 1, blocks.n_keys), lambda b, t, scalars: (b, 0, scalars[1] + t)
            ),
            pl.BlockSpec((blocks.n_together, 1, 1), lambda b, *_: (b, 0, 0)),
        ]
    out_dtype = inputs.q.dtype if share is None else jnp.float32
    outs = [jax.ShapeDtypeStruct((*inputs.q.shape[:-1], inputs.value_width), out_dtype)]
    if share is not None:
        outs.append(jax.ShapeDtypeStruct((*inputs.q.shape[:-1], LANES), jnp.float32))
    n_new, n_caches = len(inputs.new), len(inputs.caches)
    n_rows = blocks.n_together * n_heads
    call = pl.pallas_call(
        partial(
            decode_block,
            n_new=n_new,
            n_caches=n_caches,
            scale=inputs.scale,
            window=None if inputs.is_chunked and inputs.n_tokens == 1 else inputs.window,
            softcap=inputs.softcap,
            tokens=QueryTokens(n_tokens=inputs.n_tokens, is_chunked=inputs.is_chunked),
            has_sinks=inputs.sinks is not None,
            has_mask=inputs.mask is not None,
            is_part=share is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n_sequences // blocks.n_together, n_blocks),
            in_specs=in_specs,
            out_specs=[*map(per_sequence, outs), *(written(x) for x in inputs.caches[:n_new])],
            scratch_shapes=[
                pltpu.VMEM((n_rows, n_group, width), jnp.float32)
                for width in (LANES, LANES, inputs.value_width)
            ],
        ),
        out_shape=[*outs, *(pltpu.HBM(x.shape, x.dtype) for x in inputs.caches[:n_new])],
        # Operands count from the scalars.
        input_output_aliases={2 + n_new + i: len(outs) + i for i in range(n_new)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(inputs, blocks, round(mean_context)),
        name=blocks.name,
        interpret=is_interpreted,
    )
    return tuple(call(scalars, *arguments))


def _in_hbm(cache: Array, is_interpreted: bool) -> Array:  # noqa: FBT001
    """The cache, which stays in HBM: else XLA may copy all of its slots to VMEM and back in every step."""
    return cache if is_interpreted else pltpu.with_memory_space_constraint(cache, pltpu.HBM)


def _blocks(inputs: DecodeInputs) -> DecodeBlocks:
    n_slots = min(inputs.caches[0].shape[-2], inputs.window or sys.maxsize)
    n_heads = inputs.q.shape[1]
    slot_bytes = n_heads * sum(_row_bytes(x) for x in inputs.caches)
    return decode_blocks(inputs.q.shape[0], n_slots, slot_bytes)


def _row_bytes(cache: Array) -> int:
    """Bytes of one slot of one head in memory, whose rows are padded to whole tiles."""
    return -(-cache.shape[-1] // LANES) * LANES * cache.dtype.itemsize


def _cost(inputs: DecodeInputs, blocks: DecodeBlocks, n_present: int) -> pl.CostEstimate:
    """FLOPs and bytes of a step with `n_present` positions: those of the blocks that it fetches."""
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
