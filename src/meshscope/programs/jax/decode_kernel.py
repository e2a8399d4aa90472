"""The body of the decode attention kernel: one block of keys for one group of sequences.

The sums are those of FlashAttention (Dao et al., arXiv 2205.14135), algorithm 1, for one query. Shapes are
those of `decode_attention`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshscope.programs.jax.numerics import MASKED, Array, soft_capped


def decode_block(  # noqa: C901, PLR0913  the form of a kernel
    scalars: Any,
    q_ref: Any,
    *refs: Any,
    n_new: int,
    n_caches: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    tokens: "QueryTokens",
    has_sinks: bool,
    has_mask: bool,
    is_part: bool,
) -> None:
    """One block of keys for one group of sequences.

    `scalars` are the layer, the first block and the position; for a part of the positions (see `CacheShare`),
    whether the new one is among them and the lowest slot in the window, too. The output is then in float32
    and comes with the logarithms of the sums. Without new positions (`n_new` is 0), the cache has this one.
    With several `tokens`, it is the last one of the cached ones.
    """
    new_refs, cache_refs = refs[:n_new], refs[n_new : n_new + n_caches]
    sinks_ref = refs[n_new + n_caches] if has_sinks else None
    n_inputs = n_new + n_caches + has_sinks + 2 * has_mask
    bias_ref, new_bias_ref = refs[n_inputs - 2 : n_inputs] if has_mask else (None, None)
    out_ref, *written_refs = refs[n_inputs:-3]
    logs_ref = written_refs.pop(0) if is_part else None
    sums = _Sums(*refs[-3:])
    step = pl.program_id(1)
    n_keys = cache_refs[0].shape[-2]
    start, position = (scalars[1] + step) * n_keys, scalars[2]
    seen = _seen_slots(scalars, window, has_new=n_new > 0, is_part=is_part)
    q = _rows(q_ref)
    value_width = sums.weighted.shape[-1]

    @pl.when(step == 0)
    def _() -> None:
        if not new_refs:
            n_rows, n_group = sums.largest.shape[:2]
            none = jnp.full((n_rows, n_group, 1), MASKED, jnp.float32)
            sums.start(none, jnp.zeros((n_rows, 1, value_width), jnp.float32), sinks_ref)
            return
        new = [_rows(x).astype(c.dtype) for x, c in zip(new_refs, cache_refs, strict=True)]
        score = soft_capped(_scores(q, new[0]) * scale, softcap)
        if new_bias_ref is not None:
            score += _per_row(new_bias_ref, score.shape[0])
        score = seen.with_new(score)
        sums.start(score, new[-1][..., :value_width], sinks_ref)

    def attend(*, is_last: bool) -> None:
        keys, values = (_rows(cache_refs[i]).astype(q.dtype) for i in (0, -1))
        scores = soft_capped(_dot(q, keys, 2) * scale, softcap)
        if bias_ref is not None:
            scores += _per_row(bias_ref, scores.shape[0])
        at = start + lax.broadcasted_iota(jnp.int32, (1, 1, n_keys), 2)
        if tokens.n_tokens > 1:
            of_query = tokens.positions(position, q.shape[1])
            scores = jnp.where(tokens.sees(of_query, at, position, window), scores, MASKED)
        elif seen.lowest is not None:
            scores = jnp.where(at >= seen.lowest, scores, MASKED)
        values = values[..., :value_width]
        if is_last:  # later slots may hold anything, and the new position is already counted
            scores = jnp.where(at < seen.n_cached, scores, MASKED)
            at = start + lax.broadcasted_iota(jnp.int32, (1, n_keys, 1), 1)
            values = jnp.where(at < seen.n_cached, values, jnp.zeros_like(values))
        sums.add(scores, values)

    is_last = step == pl.num_programs(1) - 1
    pl.when(jnp.logical_not(is_last))(partial(attend, is_last=False))
    pl.when(is_last)(partial(attend, is_last=True))

    @pl.when(is_last)
    def _() -> None:
        if logs_ref is not None:
            logs_ref[...] = sums.logarithms().reshape(logs_ref.shape)
        out_ref[...] = sums.normalized().reshape(out_ref.shape).astype(out_ref.dtype)
        for new, cache, written in zip(new_refs, cache_refs[:n_new], written_refs, strict=True):
            _write(new, cache, written, position - start, seen.is_new_here)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTokens:
    """The tokens of a sequence whose queries follow one another in the rows of a head."""

    n_tokens: int
    is_chunked: bool

    def positions(self, last: Array, n_queries: int) -> Array:
        """The position [1, S*G, 1] of each query, if that of the last token is `last`."""
        of_token = n_queries // self.n_tokens
        row = lax.broadcasted_iota(jnp.int32, (1, n_queries, 1), 1)
        first = last - (self.n_tokens - 1)
        started = [(row >= at * of_token).astype(jnp.int32) for at in range(1, self.n_tokens)]
        return sum(started, jnp.full(row.shape, first, jnp.int32))

    def sees(self, of_query: Array, at: Array, last: Array, window: int | None) -> Array:
        """The mask [1, S*G, T] of the slots `at` [1, 1, T] that queries at these positions attend to.

        Tokens are in at most two chunks, and the first block starts with the first one.
        """
        seen = at <= of_query
        if window is None:
            return seen
        if not self.is_chunked:
            return seen & (at > of_query - window)
        start = lax.div(last, window) * window
        return seen & (at >= jnp.where(of_query >= start, start, 0))


@dataclass(frozen=True, slots=True)
class _SeenSlots:
    """The cached slots that a query attends to, and whether the new position is here (None: always)."""

    lowest: Any
    n_cached: Any
    is_new_here: Any

    def with_new(self, score: Array) -> Array:
        """The score of the new position, masked if it is on another device."""
        return score if self.is_new_here is None else jnp.where(self.is_new_here, score, MASKED)


def _seen_slots(scalars: Any, window: int | None, *, has_new: bool, is_part: bool) -> _SeenSlots:
    position = scalars[2]
    if is_part:
        n_new = scalars[3] if has_new else 0
        return _SeenSlots(scalars[4], position + 1 - n_new, scalars[3] == 1)
    n_cached = position if has_new else position + 1
    return _SeenSlots(None if window is None else position - window + 1, n_cached, None)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the keys so far in VMEM, [rows, G, ...]: see `PartialAttention`."""

    largest: Any
    total: Any
    weighted: Any

    def start(self, score: Array, value: Array, sinks: Any | None) -> None:
        """Starts with the score [rows, G, 1] of the new position, and the sinks [K, G, 1]."""
        score = jnp.broadcast_to(score, self.largest.shape)
        value = value.astype(jnp.float32)
        if sinks is None:
            self.largest[...] = score
            self.total[...] = jnp.ones_like(score)
            self.weighted[...] = jnp.broadcast_to(value, self.weighted.shape)
            return
        shape = (score.shape[0] // sinks.shape[0], *sinks.shape[:2], score.shape[2])
        sink = jnp.broadcast_to(sinks[...][None], shape).reshape(score.shape)
        largest = jnp.maximum(score, sink)
        share = jnp.exp(score - largest)
        self.largest[...] = largest
        self.total[...] = share + jnp.exp(sink - largest)
        self.weighted[...] = share[..., :1] * value

    def add(self, scores: Array, values: Array) -> None:
        """Adds scores [rows, G, T] and values [rows, T, V]."""
        before = self.largest[...]
        largest = jnp.maximum(before, scores.max(axis=2, keepdims=True))
        factor = jnp.exp(before - largest)
        shares = jnp.exp(scores - largest[..., :1])
        self.largest[...] = largest
        self.total[...] = self.total[...] * factor + shares.sum(axis=2, keepdims=True)
        added = _dot(shares.astype(values.dtype), values, 1)
        self.weighted[...] = self.weighted[...] * factor[..., :1] + added

    def normalized(self) -> Array:
        """The attention output [rows, G, V]."""
        return self.weighted[...] / self.total[...][..., :1]

    def logarithms(self) -> Array:
        """The logarithms [rows, G, lanes] of the sums of exp(score)."""
        return self.largest[...] + jnp.log(self.total[...])


def _rows(ref: Any) -> Array:
    """A block [B, K, ...] as rows [B*K, ...]."""
    return ref[...].reshape(-1, *ref.shape[2:])


def _per_row(ref: Any, n_rows: int) -> Array:
    """A block [B, 1, T] for all heads as [rows, 1, T]."""
    n_together, _, n_keys = ref.shape
    heads = jnp.broadcast_to(ref[...][:, None], (n_together, n_rows // n_together, 1, n_keys))
    return heads.reshape(n_rows, 1, n_keys)


def _scores(q: Array, key: Array) -> Array:
    """Products [rows, G, 1] of queries [rows, G, H] and one key [rows, 1, H], in float32."""
    products = q.astype(jnp.float32) * key.astype(q.dtype).astype(jnp.float32)
    return products.sum(axis=2, keepdims=True)


def _dot(left: Array, right: Array, contracted: int) -> Array:
    """Products of each row in float32, over the last dim of `left` and this one of `right`."""
    dims = (((2,), (contracted,)), ((0,), (0,)))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _write(
    new_ref: Any, cache_ref: Any, written_ref: Any, offset: Array, is_new_here: Array | None
) -> None:
    """Writes the tile of the new position, at `offset` in the fetched block; unchanged if it is elsewhere."""
    n_rows = written_ref.shape[-2]
    first = pl.multiple_of(lax.div(offset, n_rows) * n_rows, n_rows)
    tile = cache_ref[:, :, pl.ds(first, n_rows), :]
    is_new = first + lax.broadcasted_iota(jnp.int32, (1, 1, n_rows, 1), 2) == offset
    if is_new_here is not None:
        is_new &= is_new_here
    written_ref[...] = jnp.where(is_new, new_ref[...].astype(tile.dtype), tile)
