"""Compressed attention: a sliding window and compressed entries of all earlier positions (DeepSeek-V4).

Every `rate` positions (a window) form one entry: a softmax-weighted sum of their values, channel by
channel. In sparse layers, an entry also includes the positions of the previous window through separate
channels, and an indexer with separate entries selects the entries of each query.

Ring buffers hold the latest positions. Decode recomputes the entries of the windows of its positions in every
step, and queries attend to them once their windows are complete. Tokens after the first in a step may be rejected:
the next step rewrites their positions and entries, and the ring buffers are long enough for it.

A chunk of a prompt has whole windows. It reads the latest positions before it from the ring buffers, and
the entries of earlier chunks from the cache.

If cp splits the prompt, every device gathers the keys of all positions, as a ring would send the same bytes. If
blocks are whole windows, each device computes the entries of its block, and the entries are gathered; otherwise
the inputs of the entries are. In decode, every device has the latest positions (rank 0's count) and interleaved entries.

Source: transformers' DeepSeek-V4, which cites sections 2.3.1 and 2.3.2 of the model's report.

Shapes: B batch, S query positions, T key positions and entries, D residual width, N heads, H head
width, R rank of queries, E entries, M positions of a window, C channels of a position (twice an
entry's in sparse layers), G groups of heads, I width of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import n_open_windows
from meshscope.model.mechanisms.compressed import OneKeyAttention, compressed_of
from meshscope.programs.jax.attention import (
    AttentionInputs,
    AttentionScores,
    PartialAttention,
    dot_product_attention,
    partial_attention,
)
from meshscope.programs.jax.context_parallel import Context, LayerStep
from meshscope.programs.jax.numerics import (
    MASKED,
    Array,
    Arrays,
    by_row,
    by_sequence,
    causal_mask,
    index_scores,
    rms_norm,
    rope_angles,
    rope_scale,
    unscaled_rms_norm,
)
from meshscope.programs.jax.state import Attended, LayerCache, LayerWeights

PARTS = ("kv", "gate")  # an entry's values and the logits of their weights


def compressed_attention(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """Attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new cache; no kernel takes a computed mask."""
    positions, eps = step.positions, step.model.norm_eps
    state = CompressionStep(
        attention=compressed_of(step.model.attention),
        kind=step.layer.attention,
        positions=positions,
        context=step.context,
        eps=eps,
    )
    q_latent = rms_norm(w.dot(x, "wq_a"), w("q_a_norm"), eps)
    q = unscaled_rms_norm(w.einsum("bsr,rnh->bsnh", q_latent, "wq_b"), eps)
    q = by_sequence(q, positions)
    *seen, cache = state.window(x, w, cache)
    parts = [seen]
    if step.layer.attention is not AttentionKind.SLIDING:
        *seen, cache = state.entries(x, q_latent, w, cache)
        parts.append(seen)
    return state.output(q, parts, x, w), cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStep:
    """What makes the entries of one layer in one step; a decode step has one position or a few."""

    kind: AttentionKind
    positions: Array
    context: Context

    @property
    def rate(self) -> int:
        """Positions of an entry."""
        raise NotImplementedError

    @property
    def overlaps(self) -> bool:
        """Whether an entry also includes the positions of the window before."""
        return False

    def finished(self, _name: str, pooled: Array, _windows: Array, _w: LayerWeights) -> Array:
        """The entries [B, E, H] of weighted sums of windows with indices [E]."""
        return pooled

    def whole_entries(self, entries: Array) -> Array:
        """The mask [S, E] of entries [B, E, H] whose windows are complete for each query."""
        numbers = jnp.arange(entries.shape[1])
        if self.context.is_decode:
            numbers = numbers * self.context.size + self.context.rank
        return numbers[None, :] < ((self.positions + 1) // self.rate)[:, None]

    def compressed(self, name: str, latest: Arrays, w: LayerWeights, cache: LayerCache) -> Attended:
        """Entries [B, E, H] of the prompt up to the end of the chunk; in decode, the local entries so far.

        `latest` are the values and the logits of the new positions [B, S, C].
        """
        if self.context.is_decode:  # [B, S, C]
            return self._decode_entries(name, latest, w, cache)
        n_before = self.context.n_cached // self.rate
        if self.context.splits_step and latest[0].shape[1] % self.rate == 0:
            entries, cache = self._block_entries(name, latest, w, cache)
        else:
            if self.context.splits_step:
                latest = [self.context.gathered(x) for x in latest]
            before = None
            if self.overlaps and self.context.n_cached:
                before = [
                    self._before_chunk(cache, f"{name}_{part}", new)[:, None, -self.rate :]
                    for part, new in zip(PARTS, latest, strict=True)
                ]
            for part, new in zip(PARTS, latest, strict=True):
                cache = self._write_latest(cache, f"{name}_{part}", new)
            full = [self._full_windows(x) for x in latest]
            windows = n_before + jnp.arange(full[0].shape[1])
            entries = self._pool_windows(name, full, windows, w, before)
        cache = cache.written(name, self.context.interleaved(entries), at=n_before)
        if n_before:
            slots = range(n_before + entries.shape[1])
            entries = cache.part(name, entries.dtype, n_rows=entries.shape[0], slots=slots)
        return entries, cache

    def _before_chunk(self, cache: LayerCache, name: str, new: Array) -> Array:
        n_slots = cache.n_slots(name)
        slots = cache.part(name, new.dtype, n_rows=new.shape[0], slots=range(n_slots))
        return jnp.roll(slots, -(self.context.n_cached % n_slots), axis=1)

    def _block_entries(
        self, name: str, latest: Arrays, w: LayerWeights, cache: LayerCache
    ) -> Attended:
        full = [self._full_windows(x) for x in latest]
        rank, before, n_windows = self.context.rank, None, full[0].shape[1]
        if self.overlaps:  # for the next block and for decode
            lasts = [self.context.gathered(windows[:, -1:]) for windows in full]
            for part, last in zip(PARTS, lasts, strict=True):
                at = (self.context.n_prompt - self.rate) % cache.n_slots(f"{name}_{part}")
                cache = cache.written(f"{name}_{part}", last[:, -1], at=at)
            earlier = jnp.maximum(rank - 1, 0)
            before = [lax.dynamic_index_in_dim(last, earlier, axis=1) for last in lasts]
        windows = rank * n_windows + jnp.arange(n_windows)
        return self._gathered(self._pool_windows(name, full, windows, w, before)), cache

    def _decode_entries(
        self, name: str, latest: Arrays, w: LayerWeights, cache: LayerCache
    ) -> Attended:
        """The local entries, after updating the windows of new positions [B, S, C]."""
        for part, new in zip(PARTS, latest, strict=True):
            cache = self._write_latest(cache, f"{name}_{part}", new)
        dtypes = [new.dtype for new in latest]
        stored = (cache.read(f"{name}_{part}", d) for part, d in zip(PARTS, dtypes, strict=True))
        full = [x.reshape(x.shape[0], -1, self.rate, x.shape[-1]) for x in stored]
        n_windows, n_open = full[0].shape[1], n_open_windows(self.rate, self.positions.shape[0])
        last = self.positions[-1] // self.rate
        order = (last + 1 + jnp.arange(n_windows)) % n_windows  # the last position's window last
        full = [jnp.take(x, order, axis=1) for x in full]
        windows = last - jnp.arange(n_windows)[::-1]
        entries = self._pool_windows(name, full, windows, w)
        for at in range(n_windows - n_open, n_windows):
            slot, is_local = self.context.interleaved_slot(windows[at])
            if n_open > 1:  # the step may be in fewer windows
                is_new = windows[at] >= self.positions[0] // self.rate
                is_local = is_new if is_local is None else is_local & is_new
            entry = lax.slice_in_dim(entries, at, at + 1, axis=1)
            cache = cache.written(name, entry, at=slot, is_local=is_local)
        return cache.read(name, entries.dtype), cache

    def _pool_windows(
        self, name: str, full: Arrays, windows: Array, w: LayerWeights, before: Arrays | None = None
    ) -> Array:
        """Entries [B, E, H] of windows [B, E, M, C] with indices [E]: finished weighted sums.

        If they overlap, the first half of a position's channels contributes to the next entry; `before` has the window
        before the first, [B, 1, M, C].
        """
        kv, gate = full
        bias = w(f"{name}_bias")
        if before is not None:
            before = [before[0], before[1] + bias]
        gate = gate + bias
        if self.overlaps:
            width = kv.shape[-1] // 2
            before = before or [jnp.zeros_like(x[:, :1]) for x in (kv, gate)]
            earlier_kv, earlier_gate = (
                jnp.concatenate([first, x[:, :-1]], axis=1)[..., :width]
                for first, x in zip(before, (kv, gate), strict=True)
            )
            earlier_gate = jnp.where((windows > 0)[None, :, None, None], earlier_gate, MASKED)
            kv = jnp.concatenate([earlier_kv, kv[..., width:]], axis=2)
            gate = jnp.concatenate([earlier_gate, gate[..., width:]], axis=2)
        shares = jax.nn.softmax(gate.astype(jnp.float32), axis=2).astype(kv.dtype)
        return self.finished(name, (kv * shares).sum(axis=2), windows, w)

    def _gathered(self, keys: Array) -> Array:
        """All-gathers keys, [B, S, H] -> [B, T, H], in the shape of a single head."""
        return self.context.gathered(keys[:, :, None, :])[:, :, 0]

    def _full_windows(self, x: Array) -> Array:
        n_windows = x.shape[1] // self.rate
        return x[:, : n_windows * self.rate].reshape(x.shape[0], n_windows, self.rate, x.shape[-1])

    def _write_latest(self, cache: LayerCache, name: str, new: Array) -> LayerCache:
        n_slots = cache.n_slots(name)
        if self.context.is_decode:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionStep(EntryStep):
    """The attention of one layer in one step; a decode step has one position or a few."""

    attention: OneKeyAttention
    eps: float

    @property
    def rate(self) -> int:
        """Positions of an entry."""
        return self.attention.entry_rate(self.kind)

    @property
    def overlaps(self) -> bool:
        """Whether an entry also includes the positions of the window before."""
        return self.kind is AttentionKind.COMPRESSED_SPARSE

    def finished(self, name: str, pooled: Array, windows: Array, w: LayerWeights) -> Array:
        """The entries, normed and rotated."""
        entries = rms_norm(pooled, w(f"{name}_norm"), self.eps)
        return self.rotate(entries[:, :, None, :], windows * self.rate)[:, :, 0]

    def rotate(
        self, x: Array, positions: Array | None = None, *, is_inverse: bool = False
    ) -> Array:
        """Rotates the last channels of x [B, S, N, H] by their positions, or back."""
        positions = self.positions if positions is None else positions
        is_plain = self.kind is AttentionKind.SLIDING
        rope = self.attention.rope if is_plain else self.attention.compressed_rope
        angles = rope_angles(rope, self.attention.rope_dim, positions)
        return rotate_pairs(x, -angles if is_inverse else angles, rope_scale(rope))

    def window(
        self, x: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Keys of the window [B, T, H], their mask [S, T], and the new cache."""
        kv = by_sequence(rms_norm(w.dot(x, "wkv"), w("kv_norm"), self.eps), self.positions)
        kv = self.rotate(kv[:, :, None, :])[:, :, 0]
        k_positions, before = self.positions, None
        if self.context.n_cached and not self.context.is_decode:
            before = self._before_chunk(cache, "window", kv)
        if self.context.splits_step:
            kv, k_positions = self._gathered(kv), jnp.arange(self.context.n_prompt)
        cache = self._write_latest(cache, "window", kv)
        if before is not None:
            kv = jnp.concatenate([before, kv], axis=1)
            k_positions = self.context.n_cached - before.shape[1] + jnp.arange(kv.shape[1])
        if self.context.is_decode:
            kv, now = cache.read("window", x.dtype), self.positions[-1]
            k_positions = now - (now - jnp.arange(kv.shape[1])) % kv.shape[1]
        mask = causal_mask(self.positions, k_positions, self.attention.window) & (k_positions >= 0)
        if self.context.is_split and self.context.is_decode:
            mask &= self.context.rank == 0
        return kv, mask, cache

    def entries(
        self, x: Array, q_latent: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Entries [B, E, H], their mask [B, S, E], and the new cache."""
        entries, cache = self._compressed("entry", x, w, cache)
        mask = self.whole_entries(entries)
        mask = jnp.broadcast_to(mask, (entries.shape[0], *mask.shape))
        if self.kind is AttentionKind.COMPRESSED_SPARSE:
            index_entries, cache = self._compressed("index", x, w, cache)
            if not entries.shape[1]:
                return entries, mask, cache
            q = by_sequence(w.einsum("bsr,rnh->bsnh", q_latent, "index_wq"), self.positions)
            weights = by_sequence(x @ w("index_weights"), self.positions)
            indexer = self.attention.indexer
            scores = index_scores(self.rotate(q), index_entries, weights)
            scores = jnp.where(mask, scores, MASKED)
            mask &= self.context.top_k_mask(scores, indexer.top_k)
        return entries, mask, cache

    def output(self, q: Array, parts: Sequence[Arrays], x: Array, w: LayerWeights) -> Array:
        """The output [B, S, D] of attention of queries [B, S, N, H] before their rotation, in the form of x."""
        out = self.attend(self.rotate(q), parts, w("sinks"))
        out = by_row(self.rotate(out, is_inverse=True), x)  # values are rotated like keys
        wo_a = w.matrix("wo_a")
        out = out.reshape(*out.shape[:2], wo_a.values.shape[1], -1)
        out = wo_a.einsum("bsgi,igr->bsgr", out)
        return w.einsum("bsgr,grd->bsd", out, "wo_b")

    def attend(self, q: Array, parts: Sequence[Arrays], sinks: Array) -> Array:
        """Attention of q [B, S, N, H] to parts [B, T, H], both keys and values, with masks [.., S, T]."""
        scores = AttentionScores(scale=self.attention.head_dim**-0.5, sinks=sinks)
        if self.context.is_decode and not self.context.is_split:  # no copy that joins the parts
            partials = (
                partial_attention(q, kv[:, :, None, :], kv[:, :, None, :], mask, scores)
                for kv, mask in parts
                if kv.shape[1]
            )
            part = reduce(PartialAttention.merged, partials)
            return part.with_sinks(sinks).normalized(q.dtype)
        masks = [jnp.broadcast_to(x, (q.shape[0], *x.shape[-2:])) for _, x in parts]
        kv = jnp.concatenate([x for x, _ in parts], axis=1)[:, :, None, :]
        mask = jnp.concatenate(masks, axis=-1)
        if not self.context.is_decode:
            return dot_product_attention(q, kv, kv, mask, scores)
        inputs = AttentionInputs(
            q=q, keys=lambda kv: (kv, kv), mask_of=lambda _: mask, scores=scores
        )
        return self.context.attend(inputs, (kv,), self.positions)

    def _compressed(self, name: str, x: Array, w: LayerWeights, cache: LayerCache) -> Attended:
        latest = [by_sequence(w.dot(x, f"{name}_w{part}"), self.positions) for part in PARTS]
        return self.compressed(name, latest, w, cache)


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
