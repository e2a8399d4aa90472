"""Context parallelism: a ring or an all-gather of keys in prefill, merged partial softmaxes in decode.

Prefill: each device has a contiguous block of the prompt and attends to the keys of all blocks.
Ring attention (Liu et al., arXiv 2310.01889) forwards each block n-1 times and merges partial
softmaxes; the gather form all-gathers the blocks and attends once. Keys and values have separate
permutes: packing them would save one start per step and cost a copy of both. With a kernel, a device
computes the blocks up to its own; without one, future blocks are computed and masked, as in the paper.

Decode: cp splits the cache by positions. All devices have the same token, and each attends to its
local positions. The merge all-reduces the maximum (N) and the numerators and denominators (N(H+1)) in
float32: each device sends 8 N (H+2) (n-1)/n bytes per token. An all-gather of outputs and sums would
send 4 N (H+1) (n-1): 1/(H+2) less for n=2, more for larger n.

Shapes: B batch, S query positions, T key positions, N query heads, K key and value heads, H width of
a value; n devices of cp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.model.layers import Layer
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm, ring_sends
from meshscope.plans.kernel_choice import splash_block
from meshscope.programs.jax.attention import AttentionInputs, PartialAttention, PrefillKernel
from meshscope.programs.jax.decode_attention import CacheShare, DecodeKernel
from meshscope.programs.jax.numerics import MASKED, Array, Arrays
from meshscope.programs.jax.state import LayerCache

AXIS = "cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The distribution of a sequence over the `size` devices of cp in one phase."""

    size: int
    form: ContextForm
    phase: Phase
    n_prompt: int  # of the whole prompt
    n_cached: int = 0  # positions before a chunk of prefill
    n_chunk: int | None = None  # positions of a chunk, of which every device has a block

    @property
    def is_split(self) -> bool:
        """Whether cp has more than one device."""
        return self.size > 1

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode step."""
        return self.phase is Phase.DECODE

    @property
    def splits_step(self) -> bool:
        """Whether each device has different tokens of the step."""
        return self.is_split and not self.is_decode

    @property
    def rank(self) -> Array | int:
        """The index of this device on the cp axis."""
        return lax.axis_index(AXIS) if self.is_split else 0

    @property
    def n_new(self) -> int:
        """Positions of a prompt in one step: its chunk, or all."""
        return self.n_chunk or self.n_prompt

    @property
    def ends_prompt(self) -> bool:
        """Whether this is a decode step, or has the last tokens of prompts."""
        return self.is_decode or self.n_cached + self.n_new == self.n_prompt

    def positions(self, first: Array | int, n_local: int) -> Array:
        """The positions [S] of the local tokens in a step that starts at `first`."""
        if self.splits_step:
            first = first + self.rank * n_local
        return first + jnp.arange(n_local)

    def query_positions(self, local: Array) -> Array:
        """The positions of the queries that a device computes: all of a chunk if prompts are cut, else its own."""
        if self.n_chunk is None or self.is_decode:
            return local
        return self.n_cached + jnp.arange(self.n_chunk)

    def chunk_slots(self, n_positions: int, window: int | None = None) -> range:
        """The cache slots that a chunk attends to, from the start of a kernel's block on; under cp, this device's."""
        if self.is_split:
            return range(self.n_cached // self.size + n_positions)
        n_before = self.n_cached if window is None else min(self.n_cached, window - 1)
        block = splash_block(n_positions) or 1
        return range((self.n_cached - n_before) // block * block, self.n_cached + n_positions)

    def place(self, positions: Array) -> tuple[Array | int, Array | None]:
        """The first cache slot of these tokens, and whether it is in the local cache; None if in all."""
        if not self.is_split:
            return positions[0], None
        if not self.is_decode:
            return self.n_cached // self.size, None
        number = positions[0] - self.n_prompt
        return self.n_prompt // self.size + number // self.size, number % self.size == self.rank

    def layer_cache(
        self, arrays: Mapping[str, Array], positions: Array, **fields: Any
    ) -> LayerCache:
        """The cache of a layer, in which new entries go to the slots of these tokens."""
        start, is_local = self.place(positions)
        return LayerCache(arrays=arrays, start=start, is_local=is_local, **fields)

    def written(self, cache: LayerCache, new: Mapping[str, Array], positions: Array) -> LayerCache:
        """The cache with the entries [B, ..., S, H] of the step; decode may write several to different devices."""
        is_spread = self.is_split and self.is_decode and positions.shape[0] > 1
        for name, array in new.items():
            if not is_spread:
                cache = cache.written(name, array)
            for at in range(positions.shape[0] if is_spread else 0):
                one = lax.slice_in_dim(array, at, at + 1, axis=-2)
                slot, is_local = self.place(positions[at:])
                cache = cache.written(name, one, at=slot, is_local=is_local)
        return cache

    def stored(self, cache: LayerCache, positions: Array, *, n_rows: int) -> dict[str, Array]:
        """The step's entries [B, ..., S, H] in this device's cache; in decode, other devices' entries are unset."""
        slots, starts = range(positions.shape[0]), [0]
        if self.is_decode:
            slots, starts = range(1), [self.place(positions[at:])[0] for at in slots]

        def entries(name: str, array: Array) -> Array:
            parts = [
                cache.part(name, array.dtype, n_rows=n_rows, slots=slots, at=at) for at in starts
            ]
            return jnp.concatenate(parts, axis=-2)

        return {name: entries(name, array) for name, array in cache.arrays.items()}

    def attended(
        self, cache: LayerCache, name: str, new: Array, window: int | None = None
    ) -> Array | None:
        """The slots [B, ..., T, H] of an array that the step attends to; None if they are `new` [B, S, ...]."""
        if self.is_decode:
            return cache.read(name, new.dtype)
        if not self.n_cached:
            return None
        slots = self.chunk_slots(new.shape[1], window)
        return cache.part(name, new.dtype, n_rows=new.shape[0], slots=slots)

    def cache_positions(self, n_slots: int) -> Array:
        """The position [T] of each slot in the local cache."""
        slots = jnp.arange(n_slots)
        if not self.is_split:
            return slots
        rank, n_block = self.rank, self.n_prompt // self.size
        generated = self.n_prompt + (slots - n_block) * self.size + rank
        n_local = (self.n_chunk or self.n_prompt) // self.size  # of a chunk
        before = slots // n_local * n_local * self.size  # positions in earlier chunks
        return jnp.where(slots < n_block, before + rank * n_local + slots % n_local, generated)

    def share(self, position: Array, window: int | None, *, is_chunked: bool) -> CacheShare:
        """The local slots that a query at this position of decode attends to, which are the last ones under a window."""
        rank, n_block = self.rank, self.n_prompt // self.size
        number = position - self.n_prompt
        turn, n_rounds = number % self.size, number // self.size
        last = n_block + n_rounds - (turn < rank).astype(jnp.int32)
        if window is None:
            return CacheShare(last=last, is_new_here=turn == rank)
        start = position // window * window if is_chunked else position - window + 1
        n_chunk = self.n_chunk or self.n_prompt
        n_local, in_prompt = n_chunk // self.size, jnp.clip(start, 0, self.n_prompt)
        n_before = in_prompt // n_chunk * n_local
        n_before += jnp.clip(in_prompt % n_chunk - rank * n_local, 0, n_local)
        n_before += -(-jnp.maximum(start - self.n_prompt - rank, 0) // self.size)
        return CacheShare(last=last, is_new_here=turn == rank, lowest=n_before)

    def top_k_mask(self, scores: Array, n_best: int, *, is_whole: bool = False) -> Array:
        """The mask [B, S, T] of the `n_best` positions with the highest scores [B, S, T]; ties go to the first.

        In decode under cp, each device proposes its local top `n_best`, and all choose the same ones. A mask that
        `is_whole` has the interleaved entries of all devices, whose numbers the proposals then have, too.
        """
        if not self.is_split or self.splits_step:
            return best_mask(scores, n_best)
        values, places = lax.top_k(scores, min(n_best, scores.shape[-1]))
        if is_whole:  # numbers below 2^24 are exact in float32
            numbers = (places * self.size + self.rank).astype(values.dtype)
            both = lax.all_gather(jnp.concatenate([values, numbers], -1), AXIS, axis=2, tiled=True)
            both = both.reshape(*values.shape[:2], self.size, 2, -1).swapaxes(2, 3)
            values, numbers = jnp.split(both.reshape(*values.shape[:2], 2, -1), 2, axis=2)
            top_indices = lax.top_k(values[:, :, 0], min(n_best, values.shape[-1]))[1]
            places = jnp.take_along_axis(numbers[:, :, 0], top_indices, axis=2).astype(jnp.int32)
            shape = (*scores.shape[:2], scores.shape[-1] * self.size)
            return _marked(shape, places, values=True)
        proposed = lax.all_gather(values, AXIS, axis=2, tiled=True)
        top_indices = lax.top_k(proposed, min(n_best, proposed.shape[-1]))[1]
        is_chosen = _marked(proposed.shape, top_indices, values=True)
        start = self.rank * values.shape[-1]
        local = lax.dynamic_slice_in_dim(is_chosen, start, values.shape[-1], axis=2)
        return _marked(scores.shape, places, values=local)

    def of_keys(self, mask: Array, positions: Array) -> Array:
        """The columns of a mask [..., T] of the whole prompt for these keys; in decode, it has those of local slots."""
        if self.is_decode:
            return mask
        if self.n_chunk is not None:
            return mask[..., positions]
        return lax.dynamic_slice_in_dim(mask, positions[0], positions.shape[0], axis=-1)

    def gathered(self, x: Array) -> Array:
        """All-gathers blocks, [B, S, ...] -> [B, T, ...]."""
        return lax.all_gather(x, AXIS, axis=1, tiled=True)

    def interleaved(self, x: Array) -> Array:
        """Every n-th entry of a replicated x [B, T, ...], starting at this device's rank, padded."""
        if not self.is_split:
            return x
        n_each = -(-x.shape[1] // self.size)
        missing = n_each * self.size - x.shape[1]
        padded = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        rounds = padded.reshape(x.shape[0], n_each, self.size, *x.shape[2:])
        return lax.dynamic_index_in_dim(rounds, self.rank, axis=2, keepdims=False)

    def interleaved_slot(self, number: Array) -> tuple[Array, Array | None]:
        """The slot of an interleaved entry, and whether it is on this device (None: on all)."""
        if not self.is_split:
            return number, None
        return number // self.size, number % self.size == self.rank

    def decode(  # noqa: PLR0913  the arrays of attention
        self,
        kernel: DecodeKernel,
        q: Array,
        new: Mapping[str, Array],
        cache: LayerCache,
        positions: Array,
        *,
        columns: slice = slice(None),
        project: Callable[[Array], Array] = lambda x: x,
        window: int | None = None,
        is_chunked: bool = False,
        sinks: Array | None = None,
        **settings: Any,
    ) -> tuple[Array, LayerCache]:
        """By the kernel: attention [B, S, N, V] of the positions to the cache, and the cache with them.

        `columns` of the output are kept. If cp splits the cache, the devices' outputs, each after `project`, are merged.
        """
        settings["window"] = window
        if not self.is_split:
            settings |= {"is_chunked": is_chunked, "sinks": sinks}
            out, _, cache = kernel(q, new, cache, positions, **settings)
            return out[..., columns], cache
        share = self.share(positions[0], window, is_chunked=is_chunked)
        out, logs, cache = kernel(q, new, cache, positions, share=share, **settings)
        part = PartialAttention.of_normalized(out[..., columns], logs)
        return self._merged(part, project).with_sinks(sinks).normalized(q.dtype), cache

    def attend(self, inputs: AttentionInputs, local: Arrays, positions: Array) -> Array:
        """Attention [B, S, N, H] to the positions of all devices; `local` are this device's arrays of the step or the cache."""
        if self.is_decode:
            merged = self._merged(inputs.part(local, positions), inputs.project)
            return merged.with_sinks(inputs.scores.sinks).normalized(inputs.q.dtype)
        if self.n_chunk is not None:
            return self._by_queries(inputs, local, positions)
        if self.form is ContextForm.RING:
            return self._ring(inputs, local, positions)
        gathered = [self.gathered(x) for x in local]
        if (kernel := inputs.kernel) is None:
            return _finished(inputs, inputs.part(gathered, jnp.arange(self.n_prompt)))
        k, v = inputs.keys(*gathered)

        def attend(n_keys: int) -> Array:
            return kernel(inputs.q, k[:, :n_keys], v[:, :n_keys], inputs.scores)

        # The blocks up to this device's: a branch for each device, as masks are static.
        n_keys = ((rank + 1) * inputs.q.shape[1] for rank in range(self.size))
        out = lax.switch(self.rank, [partial(attend, n) for n in n_keys])
        return inputs.project(out).astype(inputs.q.dtype)

    def _by_queries(self, inputs: AttentionInputs, local: Arrays, positions: Array) -> Array:
        """All queries of a chunk attend to the local positions, and each device merges its own parts.

        Queries travel, not keys, as a chunk may have many positions before it. Source: Yang et al., arXiv 2411.01783
        ("pass-Q"), here with an all-gather instead of a ring.
        """
        every = replace(inputs, q=self.gathered(inputs.q))
        if inputs.kernel is None:
            part = every.part(local, positions)
        else:
            part = self._by_kernel(every, local, n_local=inputs.q.shape[1])
        outs = self._to_owners(part.normalized(inputs.q.dtype))
        logarithms = self._to_owners(part.largest + jnp.log(part.total))
        parts = map(PartialAttention.of_normalized, outs, logarithms)
        return _finished(inputs, reduce(PartialAttention.merged, parts))

    def _by_kernel(
        self, every: AttentionInputs, local: Arrays, *, n_local: int
    ) -> PartialAttention:
        """Attention of the queries of a chunk to this device's positions before it, and to its block of it."""
        n_before, window = local[0].shape[1] - n_local, every.scores.window

        # The queries before the block do not attend to it: a branch for each device, as shapes are static.
        def attend(rank: int) -> PartialAttention:
            first = rank * n_local
            behind = replace(every, q=every.q[:, first:])
            part = behind.block([x[:, n_before:] for x in local], 0)
            missing = ((0, 0), (first, 0), (0, 0))
            part = PartialAttention(
                numerator=jnp.pad(part.numerator, (*missing, (0, 0))),
                total=jnp.pad(part.total, missing, constant_values=1),
                largest=jnp.pad(part.largest, missing, constant_values=MASKED),
            )
            if window is None:
                return part
            for start in range(self.n_cached // self.size - n_local, -1, -n_local):
                offset = self.n_cached - start * self.size - rank * n_local
                if offset - n_local >= window - 1:  # this block and earlier ones are outside
                    break
                block = [x[:, start : start + n_local] for x in local]
                part = part.merged(every.block(block, offset))
            return part

        part = lax.switch(self.rank, [partial(attend, rank) for rank in range(self.size)])
        if window is not None or n_before == 0:
            return part
        return part.merged(every.block([x[:, :n_before] for x in local], n_before))

    def _to_owners(self, x: Array) -> Array:
        """[B, T, ...] for all queries -> [n, B, S, ...] for the local ones, from each device."""
        blocks = x.reshape(x.shape[0], self.size, -1, prod(x.shape[2:])).swapaxes(0, 1)
        received = lax.all_to_all(blocks, AXIS, split_axis=0, concat_axis=0, tiled=True)
        return received.reshape(*received.shape[:3], *x.shape[2:])

    def _ring(self, inputs: AttentionInputs, local: Arrays, positions: Array) -> Array:
        rank, n_local = self.rank, positions.shape[0]
        pairs = [(source, (source + 1) % self.size) for source in range(self.size)]
        window = None if inputs.kernel is None else inputs.scores.window
        n_sends = ring_sends(self.size, n_local, window)
        merged: PartialAttention | None = None
        for step in range(n_sends + 1):
            is_last = step == n_sends
            received = [] if is_last else [lax.ppermute(x, AXIS, perm=pairs) for x in local]
            source = (rank - step) % self.size
            if inputs.kernel is None:
                part = inputs.part(local, positions + (source - rank) * n_local)
            else:
                part = self._earlier_block(inputs, local, step)
            merged = part if merged is None else merged.merged(part)
            local = received
        assert merged is not None
        return _finished(inputs, merged)

    def _earlier_block(self, inputs: AttentionInputs, local: Arrays, step: int) -> PartialAttention:
        """By the kernel: attention to the block of a step of the ring, unless it is a later one."""
        attend = partial(inputs.block, local, step * inputs.q.shape[1])

        def skip() -> PartialAttention:
            of = jax.eval_shape(attend)
            return PartialAttention(
                numerator=jnp.zeros(of.numerator.shape, of.numerator.dtype),
                total=jnp.ones(of.total.shape, of.total.dtype),
                largest=jnp.full(of.largest.shape, MASKED, of.largest.dtype),
            )

        return attend() if step == 0 else lax.cond(self.rank >= step, attend, skip)

    def _merged(
        self, part: PartialAttention, project: Callable[[Array], Array]
    ) -> PartialAttention:
        """The attention of all devices of cp to their positions, after `project`, as values are narrower."""
        part = part.rescaled(lax.pmax(part.largest, AXIS))
        narrow = project(part.numerator)
        # One flat array: the width H+1 would be padded to the next multiple of 128.
        numerator = narrow.reshape(*narrow.shape[:2], -1)
        both = lax.psum(jnp.concatenate([numerator, part.total], axis=-1), AXIS)
        n_heads = part.total.shape[-1]
        return PartialAttention(
            numerator=both[..., :-n_heads].reshape(narrow.shape),
            total=both[..., -n_heads:],
            largest=part.largest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """What a layer's attention needs besides its input, weights and cache."""

    model: Model
    layer: Layer
    context: Context
    positions: Array  # [S] of the local tokens
    kernel: PrefillKernel | DecodeKernel | None = None

    @property
    def prefill_kernel(self) -> PrefillKernel | None:
        """The kernel of prefill."""
        return self.kernel if isinstance(self.kernel, PrefillKernel) else None


def best_mask(scores: Array, n_best: int) -> Array:
    """The mask [..., T] of the `n_best` highest scores; ties go to the first."""
    values = lax.top_k(scores, min(n_best, scores.shape[-1]))[0]
    # A scatter of the indices of `top_k` would work element by element.
    least, n_best = values[..., -1:], values.shape[-1]
    is_above, is_equal = scores > least, scores == least
    n_left = n_best - is_above.sum(axis=-1, keepdims=True)
    return is_above | (is_equal & (jnp.cumsum(is_equal, axis=-1) <= n_left))


def _finished(inputs: AttentionInputs, merged: PartialAttention) -> Array:
    shared = merged.with_sinks(inputs.scores.sinks).normalized(inputs.q.dtype)
    return inputs.project(shared).astype(shared.dtype)


def _marked(shape: tuple[int, ...], places: Array, *, values: Array | bool) -> Array:
    rows = jnp.arange(shape[0])[:, None, None], jnp.arange(shape[1])[None, :, None]  # of [B, S, n]
    return jnp.zeros(shape, bool).at[(*rows, places)].set(values)
