"""Attention to a window of positions and to compressed entries of all before (DeepSeek-V4).

Every `rate` positions make one entry: a sum of their values, weighted by a softmax over the
positions, channel by channel. In sparse layers the positions of the entry before take part, too,
by values of their own, and an indexer with entries of its own chooses what a query sees.

The cache has a fixed shape. The last positions lie in slots that are used in turn; decode makes the
entry of the running window anew at every step, and none sees it before its window is full.

Where cp splits the prompt, every device gathers the keys of all positions, whichever form is asked
for: a ring of blocks would send the same bytes. Where blocks are whole windows, each device makes the
entries of its block, which are gathered; else all gather what entries are made of. In decode every
device has the last positions, of which the first one's count, and its share of the entries.

Source: transformers' DeepSeek-V4, which cites sections 2.3.1 and 2.3.2 of the model's report.

Shapes: B batch, S positions of this step, T positions and entries attended to, D residual width,
N heads, H head width, R rank of queries, E entries, M positions of an entry, C channels of a
position (twice those of an entry in sparse layers), G groups of heads, I width of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.programs.jax.context_parallel import Attending, Context
from meshscope.programs.jax.kernels import PrefillKernel
from meshscope.programs.jax.latent import index_scores
from meshscope.programs.jax.numerics import (
    MASKED,
    Array,
    attended,
    rms_norm,
    rope_angles,
    rope_scale,
    seen,
    unscaled_rms_norm,
)
from meshscope.programs.jax.state import LayerCache, LayerWeights
from meshscope.spec.model.model import AttentionKind, CompressedAttention, Layer, Model, Rope


def compressed_attention(  # noqa: PLR0913  the inputs of a layer's attention
    x: Array,
    w: LayerWeights,
    cache: LayerCache,
    positions: Array,
    *,
    model: Model,
    layer: Layer,
    context: Context,
    kernel: PrefillKernel | None = None,  # noqa: ARG001  none has masks that are computed
) -> tuple[Array, LayerCache]:
    """[B, S, D] -> [B, S, D] before the sum over heads of other devices, and the new cache."""
    attention = model.attention
    assert isinstance(attention, CompressedAttention)
    state = _CompressionStep(
        attention=attention,
        kind=layer.attention,
        positions=positions,
        context=context,
        eps=model.norm_eps,
    )
    q_latent = rms_norm(x @ w("wq_a"), w("q_a_norm"), model.norm_eps)
    q = unscaled_rms_norm(jnp.einsum("bsr,rnh->bsnh", q_latent, w("wq_b")), model.norm_eps)
    kv, is_seen, cache = state.window(x, w, cache)
    if layer.attention is not AttentionKind.SLIDING:
        entries, is_entry_seen, cache = state.entries(x, q_latent, w, cache)
        kv = jnp.concatenate([kv, entries], axis=1)
        batch = (x.shape[0], *is_seen.shape)
        is_seen = jnp.concatenate([jnp.broadcast_to(is_seen, batch), is_entry_seen], axis=-1)
    out = state.attended(state.turned(q), kv[:, :, None, :], is_seen, w("sinks"))
    out = state.turned(out, is_back=True)  # values were turned as keys are
    into_rank = w("wo_a")
    out = out.reshape(*out.shape[:2], into_rank.shape[1], -1)
    out = jnp.einsum("bsgi,igr->bsgr", out, into_rank)
    return jnp.einsum("bsgr,grd->bsd", out, w("wo_b")), cache


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompressionStep:
    """One layer's attention in one step; decode is a step of one position."""

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
        """How queries and keys of this kind of layer turn."""
        is_plain = self.kind is AttentionKind.SLIDING
        return self.attention.rope if is_plain else self.attention.compressed_rope

    @property
    def rate(self) -> int:
        """Positions of an entry."""
        is_sparse = self.kind is AttentionKind.COMPRESSED_SPARSE
        return self.attention.sparse_rate if is_sparse else self.attention.heavy_rate

    def turned(self, x: Array, positions: Array | None = None, *, is_back: bool = False) -> Array:
        """The last channels of x [B, S, N, H] turned by their positions, or back."""
        positions = self.positions if positions is None else positions
        angles = rope_angles(self.rope, self.attention.rope_dim, positions)
        return turned(x, -angles if is_back else angles, rope_scale(self.rope))

    def window(
        self, x: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Keys of the positions [B, T, H], which of them are seen [S, T], and the new cache."""
        kv = rms_norm(x @ w("wkv"), w("kv_norm"), self.eps)
        kv = self.turned(kv[:, :, None, :])[:, :, 0]
        k_positions = self.positions
        if self.context.splits_step:
            kv, k_positions = self._gathered(kv), self.context.prompt_positions
        cache = self._kept(cache, "window", kv)
        if self.phase is Phase.DECODE:
            kv, now = cache.read("window", x.dtype), self.positions[0]
            k_positions = now - (now - jnp.arange(kv.shape[1])) % kv.shape[1]
        is_seen = seen(self.positions, k_positions, self.attention.window) & (k_positions >= 0)
        if self.context.is_split and self.phase is Phase.DECODE:
            is_seen &= self.context.rank == 0
        return kv, is_seen, cache

    def entries(
        self, x: Array, q_latent: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Entries [B, E, H], which of them are seen [B, S, E], and the new cache."""
        entries, cache = self._compressed("entry", x, w, cache)
        n_full = (self.positions + 1) // self.rate  # entries whose window a query has behind it
        numbers = jnp.arange(entries.shape[1])
        if self.phase is Phase.DECODE:
            numbers = self.context.dealt_numbers(entries.shape[1])
        is_seen = numbers[None, :] < n_full[:, None]
        is_seen = jnp.broadcast_to(is_seen, (x.shape[0], *is_seen.shape))
        if self.kind is AttentionKind.COMPRESSED_SPARSE:
            index_entries, cache = self._compressed("index", x, w, cache)
            if not entries.shape[1]:
                return entries, is_seen, cache
            q = self.turned(jnp.einsum("bsr,rnh->bsnh", q_latent, w("index_wq")))
            indexer = self.attention.indexer
            scores = index_scores(q, index_entries, x @ w("index_weights"), indexer)
            scores = jnp.where(is_seen, scores, MASKED)
            is_seen &= self.context.best(scores, indexer.top_k)
        return entries, is_seen, cache

    def attended(self, q: Array, kv: Array, is_seen: Array, sinks: Array) -> Array:
        """[B, S, N, H] of q [B, S, N, H] and kv [B, T, 1, H], which is keys and values in one."""
        scale = self.attention.head_dim**-0.5
        if not self.context.is_split or self.phase is Phase.PREFILL:
            return attended(q, kv, kv, is_seen, scale=scale, sinks=sinks)
        attending = Attending(
            q=q,
            keys=lambda held: (held, held),
            sight=lambda _: is_seen,
            scale=scale,
            sinks=sinks,
        )
        return self.context.attended(attending, (kv,), self.positions)

    def _compressed(
        self, name: str, x: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, LayerCache]:
        """Entries [B, E, H]: all of the prompt; in decode, of those so far, those that lie here."""
        kv, gate = x @ w(f"{name}_wkv"), x @ w(f"{name}_wgate")  # [B, S, C]
        if self.phase is Phase.DECODE:
            return self._grown(name, kv, gate, w, cache)
        if self.context.splits_step and kv.shape[1] % self.rate == 0:
            entries, cache = self._of_blocks(name, kv, gate, w, cache)
        else:
            if self.context.splits_step:
                kv, gate = self.context.gathered(kv), self.context.gathered(gate)
            cache = self._kept(self._kept(cache, f"{name}_kv", kv), f"{name}_gate", gate)
            kv, gate = self._full_windows(kv), self._full_windows(gate)
            entries = self._entries_of(name, kv, gate, jnp.arange(kv.shape[1]), w)
        return entries, cache.written(name, self.context.dealt(entries), at=0)

    def _of_blocks(
        self, name: str, kv: Array, gate: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, LayerCache]:
        """Each device's block [B, S, C] of whole windows made into entries, and those gathered.

        Where the window before takes part, the last ones of all blocks are gathered: that of the
        block before is needed now, that of the prompt in decode. None is open where the prompt ends.
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
        entries = self._entries_of(name, kv, gate, windows, w, before)
        return self._gathered(entries), cache

    def _grown(
        self, name: str, kv: Array, gate: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, LayerCache]:
        """The entries that lie here, that of the running window made of one position more [B, 1, C]."""
        cache = self._kept(self._kept(cache, f"{name}_kv", kv), f"{name}_gate", gate)
        kv, gate = (
            self._last_windows(cache.read(f"{name}_{part}", kv.dtype)) for part in ("kv", "gate")
        )
        windows = self.positions[0] // self.rate - jnp.arange(kv.shape[1])[::-1]
        entry = self._entries_of(name, kv, gate, windows, w)[:, -1:]
        slot, is_here = self.context.dealt_slot(windows[-1])
        cache = cache.written(name, entry, at=slot, is_here=is_here)
        return cache.read(name, entry.dtype), cache

    def _entries_of(  # noqa: PLR0913, PLR0917  what an entry is made of
        self,
        name: str,
        kv: Array,
        gate: Array,
        windows: Array,
        w: LayerWeights,
        before: Sequence[Array] | None = None,
    ) -> Array:
        """[B, E, H] of windows [B, E, M, C] with these numbers [E], and perhaps the one `before` them."""
        bias = w(f"{name}_bias")
        if before is not None:
            before = [before[0], before[1] + bias]
        entries = _pooled(kv, gate + bias, windows, w(f"{name}_norm").shape[0], before)
        entries = rms_norm(entries, w(f"{name}_norm"), self.eps)
        return self.turned(entries[:, :, None, :], windows * self.rate)[:, :, 0]

    def _gathered(self, keys: Array) -> Array:
        """[B, T, H] of [B, S, H] of all devices, as heads of one key, which is what attention wants."""
        return self.context.gathered(keys[:, :, None, :])[:, :, 0]

    def _full_windows(self, x: Array) -> Array:
        """[B, S, C] -> [B, E, M, C], the positions of an unfinished window left out."""
        n_windows = x.shape[1] // self.rate
        return x[:, : n_windows * self.rate].reshape(x.shape[0], n_windows, self.rate, x.shape[-1])

    def _last_windows(self, x: Array) -> Array:
        """Slots [B, W*M, C] -> [B, W, M, C], the running window last."""
        windows = x.reshape(x.shape[0], -1, self.rate, x.shape[-1])
        n_windows = windows.shape[1]
        first = self.positions[0] // self.rate + 1
        order = (first + jnp.arange(n_windows)) % n_windows
        return jnp.take(windows, order, axis=1)

    def _kept(self, cache: LayerCache, name: str, new: Array) -> LayerCache:
        """The cache with the last of `new` [B, S, ...] in the slots of their positions."""
        n_slots = cache.arrays[name].shape[-2]
        if self.phase is Phase.DECODE:
            return cache.written(name, new, at=self.positions[0] % n_slots)
        n_new = new.shape[1]  # prefill starts at position 0
        if n_new > n_slots:
            new = jnp.roll(new[:, -n_slots:], n_new % n_slots, axis=1)
        return cache.written(name, new, at=0)


def _pooled(
    kv: Array, gate: Array, windows: Array, width: int, before: Sequence[Array] | None
) -> Array:
    """[B, E, H]: the weighted sums of windows [B, E, M, C], before norm and rotation.

    Where C is twice H, the first half of a position's channels counts for the entry after its own;
    `before` holds kv and gate of the window before the first, [B, 1, M, C], where there may be one.
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
    """[B, E, H] of [B, E, M, H]: each channel summed over positions with softmax weights."""
    shares = jax.nn.softmax(gate.astype(jnp.float32), axis=2).astype(kv.dtype)
    return (kv * shares).sum(axis=2)


def turned(x: Array, angles: Array, scale: float) -> Array:
    """The last channels of x [B, S, N, H] turned in pairs 2i and 2i+1 by angles [S, P/2]."""
    width = 2 * angles.shape[-1]
    plain, pairs = x[..., :-width], x[..., -width:].astype(jnp.float32)
    cos, sin = (
        jnp.repeat(f(angles), 2, axis=-1)[None, :, None, :] * scale for f in (jnp.cos, jnp.sin)
    )
    is_first = lax.broadcasted_iota(jnp.int32, (width,), 0) % 2 == 0
    partner = jnp.where(is_first, -jnp.roll(pairs, -1, axis=-1), jnp.roll(pairs, 1, axis=-1))
    return jnp.concatenate([plain, (pairs * cos + partner * sin).astype(x.dtype)], axis=-1)
