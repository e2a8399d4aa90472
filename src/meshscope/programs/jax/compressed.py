"""Compressed attention: a sliding window and compressed entries of all earlier positions (DeepSeek-V4).

Every `rate` positions (a window) form one entry: a softmax-weighted sum of their values, channel by
channel. In sparse layers, an entry also includes the positions of the previous window through separate
channels, and an indexer with separate entries selects the entries of each query.

The cache has a fixed shape. Ring buffers hold the latest positions. Decode recomputes the entries of the
windows of its positions in every step, and queries attend to them once their windows are complete. Of
several tokens in a step, those after the first may be rejected: the next step writes their positions again, and
with them the entries. The ring buffers are so much longer that no position that it needs is overwritten.

A chunk of a prompt has whole windows. It reads the latest positions before it from the ring buffers, and
the entries of earlier chunks from the cache.

If cp splits the prompt, every device gathers the keys of all positions for either context form, as a
ring would send the same bytes. If blocks are whole windows, each device computes the entries of its
block, and the entries are gathered; otherwise the inputs of the entries are. In decode, every device
has the latest positions, of which rank 0's count, and interleaved entries.

Source: transformers' DeepSeek-V4, which cites sections 2.3.1 and 2.3.2 of the model's report.

Shapes: B batch, S query positions, T key positions and entries, D residual width, N heads, H head
width, R rank of queries, E entries, M positions of a window, C channels of a position (twice those of
an entry in sparse layers), G groups of heads, I width of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.compressed import CompressedAttention, compressed_of, n_open_windows
from meshscope.model.model import Model
from meshscope.model.reader import Rope
from meshscope.programs.jax.attention import (
    AttentionInputs,
    AttentionScores,
    PartialAttention,
    PrefillKernel,
    dot_product_attention,
    partial_attention,
)
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.latent import index_scores
from meshscope.programs.jax.numerics import (
    MASKED,
    Array,
    by_row,
    by_sequence,
    causal_mask,
    rms_norm,
    rope_angles,
    rope_scale,
    unscaled_rms_norm,
)
from meshscope.programs.jax.state import LayerCache, LayerWeights


def compressed_attention(  # noqa: PLR0913  the inputs of a layer's attention
    x: Array,
    w: LayerWeights,
    cache: LayerCache,
    positions: Array,
    *,
    model: Model,
    layer: Layer,
    context: Context,
    kernel: PrefillKernel | DecodeKernel | None = None,  # noqa: ARG001  no kernel takes a computed mask
) -> tuple[Array, LayerCache]:
    """Attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new cache."""
    attention = compressed_of(model.attention)
    state = _CompressionStep(
        attention=attention,
        kind=layer.attention,
        positions=positions,
        context=context,
        eps=model.norm_eps,
    )
    q_latent = rms_norm(w.dot(x, "wq_a"), w("q_a_norm"), model.norm_eps)
    q = unscaled_rms_norm(w.einsum("bsr,rnh->bsnh", q_latent, "wq_b"), model.norm_eps)
    q = by_sequence(q, positions)
    *seen, cache = state.window(x, w, cache)
    parts = [seen]
    if layer.attention is not AttentionKind.SLIDING:
        *seen, cache = state.entries(x, q_latent, w, cache)
        parts.append(seen)
    out = state.attend(state.rotate(q), parts, w("sinks"))
    out = by_row(state.rotate(out, is_inverse=True), x)  # values are rotated like keys
    wo_a = w.matrix("wo_a")
    out = out.reshape(*out.shape[:2], wo_a.values.shape[1], -1)
    out = wo_a.einsum("bsgi,igr->bsgr", out)
    return w.einsum("bsgr,grd->bsd", out, "wo_b"), cache


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompressionStep:
    """The attention of one layer in one step; a decode step has one position or a few."""

    attention: CompressedAttention
    kind: AttentionKind
    positions: Array
    context: Context
    eps: float

    @property
    def phase(self) -> Phase:
        """Prefill or decode."""
        return self.context.phase

    @property
    def rope(self) -> Rope:
        """The rotary embedding of queries and keys in this kind of layer."""
        is_plain = self.kind is AttentionKind.SLIDING
        return self.attention.rope if is_plain else self.attention.compressed_rope

    @property
    def rate(self) -> int:
        """The number of positions of an entry."""
        is_sparse = self.kind is AttentionKind.COMPRESSED_SPARSE
        return self.attention.sparse_rate if is_sparse else self.attention.heavy_rate

    def rotate(
        self, x: Array, positions: Array | None = None, *, is_inverse: bool = False
    ) -> Array:
        """Rotates the last channels of x [B, S, N, H] by their positions, or back."""
        positions = self.positions if positions is None else positions
        angles = rope_angles(self.rope, self.attention.rope_dim, positions)
        return rotate_pairs(x, -angles if is_inverse else angles, rope_scale(self.rope))

    def window(
        self, x: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Keys of the window [B, T, H], their mask [S, T], and the new cache."""
        kv = by_sequence(rms_norm(w.dot(x, "wkv"), w("kv_norm"), self.eps), self.positions)
        kv = self.rotate(kv[:, :, None, :])[:, :, 0]
        k_positions = self.positions
        before = self._before_chunk(cache, "window", kv)
        if self.context.splits_step:
            kv, k_positions = self._gathered(kv), self.context.prompt_positions
        cache = self._write_latest(cache, "window", kv)
        if before is not None:
            first = self.context.n_cached - before.shape[1]
            kv, k_positions = (
                jnp.concatenate([before, kv], axis=1),
                first + jnp.arange(before.shape[1] + kv.shape[1]),
            )
        if self.phase is Phase.DECODE:
            kv, now = cache.read("window", x.dtype), self.positions[-1]
            k_positions = now - (now - jnp.arange(kv.shape[1])) % kv.shape[1]
        mask = causal_mask(self.positions, k_positions, self.attention.window) & (k_positions >= 0)
        if self.context.is_split and self.phase is Phase.DECODE:
            mask &= self.context.rank == 0
        return kv, mask, cache

    def entries(
        self, x: Array, q_latent: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Entries [B, E, H], their mask [B, S, E], and the new cache."""
        entries, cache = self._compressed("entry", x, w, cache)
        n_full = (self.positions + 1) // self.rate  # entries with complete windows for each query
        numbers = jnp.arange(entries.shape[1])
        if self.phase is Phase.DECODE:
            numbers = self.context.interleaved_indices(entries.shape[1])
        mask = numbers[None, :] < n_full[:, None]
        mask = jnp.broadcast_to(mask, (entries.shape[0], *mask.shape))
        if self.kind is AttentionKind.COMPRESSED_SPARSE:
            index_entries, cache = self._compressed("index", x, w, cache)
            if not entries.shape[1]:
                return entries, mask, cache
            q = by_sequence(w.einsum("bsr,rnh->bsnh", q_latent, "index_wq"), self.positions)
            weights = by_sequence(x @ w("index_weights"), self.positions)
            indexer = self.attention.indexer
            scores = index_scores(self.rotate(q), index_entries, weights, indexer)
            scores = jnp.where(mask, scores, MASKED)
            mask &= self.context.top_k_mask(scores, indexer.top_k)
        return entries, mask, cache

    def attend(self, q: Array, parts: Sequence[Sequence[Array]], sinks: Array) -> Array:
        """Attention of q [B, S, N, H] to parts [B, T, H], both keys and values, with masks [.., S, T]."""
        scores = AttentionScores(scale=self.attention.head_dim**-0.5, sinks=sinks)
        if self.phase is Phase.DECODE and not self.context.is_split:
            return _attended_in_place(q, parts, scores)
        masks = [jnp.broadcast_to(x, (q.shape[0], *x.shape[-2:])) for _, x in parts]
        kv = jnp.concatenate([x for x, _ in parts], axis=1)[:, :, None, :]
        mask = jnp.concatenate(masks, axis=-1)
        if not self.context.is_split or self.phase is Phase.PREFILL:
            return dot_product_attention(q, kv, kv, mask, scores)
        inputs = AttentionInputs(
            q=q,
            keys=lambda kv: (kv, kv),
            mask_of=lambda _: mask,
            scores=scores,
        )
        return self.context.attend(inputs, (kv,), self.positions)

    def _compressed(
        self, name: str, x: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, LayerCache]:
        """Entries [B, E, H] of the prompt up to the end of the chunk; in decode, the local entries so far."""
        kv, gate = (
            by_sequence(w.dot(x, f"{name}_{part}"), self.positions) for part in ("wkv", "wgate")
        )  # [B, S, C]
        if self.phase is Phase.DECODE:
            return self._decode_entries(name, kv, gate, w, cache)
        if self.context.splits_step and kv.shape[1] % self.rate == 0:
            entries, cache = self._block_entries(name, kv, gate, w, cache)
        else:
            if self.context.splits_step:
                kv, gate = self.context.gathered(kv), self.context.gathered(gate)
            before = self._window_before(name, kv, gate, cache)
            cache = self._write_latest(
                self._write_latest(cache, f"{name}_kv", kv), f"{name}_gate", gate
            )
            kv, gate = self._full_windows(kv), self._full_windows(gate)
            windows = self.context.n_cached // self.rate + jnp.arange(kv.shape[1])
            entries = self._pool_windows(name, kv, gate, windows, w, before)
        n_before = self.context.n_cached // self.rate
        cache = cache.written(name, self.context.interleaved(entries), at=n_before)
        if n_before:
            slots = range(n_before + entries.shape[1])
            entries = cache.part(name, entries.dtype, n_rows=entries.shape[0], slots=slots)
        return entries, cache

    def _before_chunk(self, cache: LayerCache, name: str, new: Array) -> Array | None:
        """The positions [B, T, ...] of a ring buffer before a chunk `new` [B, S, ...]; None in other steps."""
        n_cached, n_slots = self.context.n_cached, cache.arrays[name].shape[-2]
        if not n_cached or self.phase is Phase.DECODE:
            return None
        slots = cache.part(name, new.dtype, n_rows=new.shape[0], slots=range(n_slots))
        return jnp.roll(slots, -(n_cached % n_slots), axis=1)

    def _window_before(
        self, name: str, kv: Array, gate: Array, cache: LayerCache
    ) -> tuple[Array, ...] | None:
        """Values and gates [B, 1, M, C] of the window before a chunk; None if its entries do not include it."""
        if self.kind is not AttentionKind.COMPRESSED_SPARSE:
            return None
        parts = [
            self._before_chunk(cache, f"{name}_{part}", new)
            for part, new in (("kv", kv), ("gate", gate))
        ]
        return tuple(x[:, None, -self.rate :] for x in parts if x is not None) or None

    def _block_entries(
        self, name: str, kv: Array, gate: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, LayerCache]:
        """Computes the entries of the local block [B, S, C] of whole windows, and gathers them.

        If entries include the previous window, the last windows of all blocks are gathered, for the
        next block and for decode. The prompt ends with a complete window.
        """
        kv, gate = self._full_windows(kv), self._full_windows(gate)
        rank, before = self.context.rank, None
        if kv.shape[-1] != w(f"{name}_norm").shape[0]:
            lasts = [self.context.gathered(windows[:, -1:]) for windows in (kv, gate)]
            for part, last in zip(("kv", "gate"), lasts, strict=True):
                n_slots = cache.arrays[f"{name}_{part}"].shape[-2]
                at = (self.context.n_prompt - self.rate) % n_slots
                cache = cache.written(f"{name}_{part}", last[:, -1], at=at)
            before = [
                lax.dynamic_index_in_dim(last, jnp.maximum(rank - 1, 0), axis=1) for last in lasts
            ]
        windows = rank * kv.shape[1] + jnp.arange(kv.shape[1])
        entries = self._pool_windows(name, kv, gate, windows, w, before)
        return self._gathered(entries), cache

    def _decode_entries(
        self, name: str, kv: Array, gate: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, LayerCache]:
        """The local entries, after updating those of the windows of new positions [B, S, C]."""
        cache = self._write_latest(
            self._write_latest(cache, f"{name}_kv", kv), f"{name}_gate", gate
        )
        kv, gate = (
            self._last_windows(cache.read(f"{name}_{part}", kv.dtype)) for part in ("kv", "gate")
        )
        windows = self.positions[-1] // self.rate - jnp.arange(kv.shape[1])[::-1]
        entries = self._pool_windows(name, kv, gate, windows, w)
        n_open = n_open_windows(self.rate, self.positions.shape[0])
        for at in range(kv.shape[1] - n_open, kv.shape[1]):
            slot, is_local = self.context.interleaved_slot(windows[at])
            if n_open > 1:  # the step may be in fewer windows
                is_new = windows[at] >= self.positions[0] // self.rate
                is_local = is_new if is_local is None else is_local & is_new
            entry = lax.slice_in_dim(entries, at, at + 1, axis=1)
            cache = cache.written(name, entry, at=slot, is_local=is_local)
        return cache.read(name, entries.dtype), cache

    def _pool_windows(  # noqa: PLR0913, PLR0917  the inputs of an entry
        self,
        name: str,
        kv: Array,
        gate: Array,
        windows: Array,
        w: LayerWeights,
        before: Sequence[Array] | None = None,
    ) -> Array:
        """Entries [B, E, H] of windows [B, E, M, C] with indices [E]; `before` precedes the first."""
        bias = w(f"{name}_bias")
        if before is not None:
            before = [before[0], before[1] + bias]
        entries = _pooled(kv, gate + bias, windows, w(f"{name}_norm").shape[0], before)
        entries = rms_norm(entries, w(f"{name}_norm"), self.eps)
        return self.rotate(entries[:, :, None, :], windows * self.rate)[:, :, 0]

    def _gathered(self, keys: Array) -> Array:
        """All-gathers keys, [B, S, H] -> [B, T, H], in the shape of a single head."""
        return self.context.gathered(keys[:, :, None, :])[:, :, 0]

    def _full_windows(self, x: Array) -> Array:
        """The complete windows, [B, S, C] -> [B, E, M, C]."""
        n_windows = x.shape[1] // self.rate
        return x[:, : n_windows * self.rate].reshape(x.shape[0], n_windows, self.rate, x.shape[-1])

    def _last_windows(self, x: Array) -> Array:
        """The windows in a ring buffer, [B, W*M, C] -> [B, W, M, C], with that of the last position last."""
        windows = x.reshape(x.shape[0], -1, self.rate, x.shape[-1])
        n_windows = windows.shape[1]
        first = self.positions[-1] // self.rate + 1
        order = (first + jnp.arange(n_windows)) % n_windows
        return jnp.take(windows, order, axis=1)

    def _write_latest(self, cache: LayerCache, name: str, new: Array) -> LayerCache:
        """Writes the latest of `new` [B, S, ...] to the ring buffer `name`."""
        n_slots = cache.arrays[name].shape[-2]
        if self.phase is Phase.DECODE:
            for at in range(new.shape[1]):
                one = lax.slice_in_dim(new, at, at + 1, axis=1)
                cache = cache.written(name, one, at=self.positions[at] % n_slots)
            return cache
        first, n_new = self.context.n_cached, new.shape[1]
        if n_new > n_slots:
            new = jnp.roll(new[:, -n_slots:], (first + n_new) % n_slots, axis=1)
            return cache.written(name, new, at=0)
        at = first % n_slots
        n_wrapped = max(0, at + n_new - n_slots)
        cache = cache.written(name, new[:, : n_new - n_wrapped], at=at)
        return cache.written(name, new[:, n_new - n_wrapped :], at=0) if n_wrapped else cache


def _attended_in_place(
    q: Array, parts: Sequence[Sequence[Array]], scores: AttentionScores
) -> Array:
    """Attention [B, S, N, H] to parts [B, T, H] of the cache, without a copy that joins them."""
    partials = (
        partial_attention(q, kv[:, :, None, :], kv[:, :, None, :], mask, scores)
        for kv, mask in parts
        if kv.shape[1]
    )
    return reduce(PartialAttention.merged, partials).with_sinks(scores.sinks).normalized(q.dtype)


def _pooled(
    kv: Array, gate: Array, windows: Array, width: int, before: Sequence[Array] | None
) -> Array:
    """Entries [B, E, H] before norm and rotation: weighted sums of windows [B, E, M, C].

    If C is twice H, the first half of a position's channels contributes to the next entry. `before`
    has kv and gate of the window before the first, [B, 1, M, C].
    """
    if kv.shape[-1] == width:
        return _weighted(kv, gate)
    if before is None:
        before = [jnp.zeros_like(x[:, :1]) for x in (kv, gate)]
    earlier_kv, earlier_gate = (
        jnp.concatenate([first, x[:, :-1]], axis=1)[..., :width]
        for first, x in zip(before, (kv, gate), strict=True)
    )
    has_earlier = (windows > 0)[None, :, None, None]
    earlier_gate = jnp.where(has_earlier, earlier_gate, MASKED)
    return _weighted(
        jnp.concatenate([earlier_kv, kv[..., width:]], axis=2),
        jnp.concatenate([earlier_gate, gate[..., width:]], axis=2),
    )


def _weighted(kv: Array, gate: Array) -> Array:
    """Sums over positions with softmax weights per channel, [B, E, M, H] -> [B, E, H]."""
    shares = jax.nn.softmax(gate.astype(jnp.float32), axis=2).astype(kv.dtype)
    return (kv * shares).sum(axis=2)


def rotate_pairs(x: Array, angles: Array, scale: float) -> Array:
    """Rotates the last channels of x [B, S, N, H] in pairs 2i and 2i+1 by angles [S, P/2]."""
    width = 2 * angles.shape[-1]
    plain, pairs = x[..., :-width], x[..., -width:].astype(jnp.float32)
    cos, sin = (
        jnp.repeat(f(angles), 2, axis=-1)[None, :, None, :] * scale for f in (jnp.cos, jnp.sin)
    )
    is_first = lax.broadcasted_iota(jnp.int32, (width,), 0) % 2 == 0
    partner = jnp.where(is_first, -jnp.roll(pairs, -1, axis=-1), jnp.roll(pairs, 1, axis=-1))
    return jnp.concatenate([plain, (pairs * cos + partner * sin).astype(x.dtype)], axis=-1)
