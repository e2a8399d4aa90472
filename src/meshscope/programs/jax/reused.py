"""Attention to entries and choices that layers share (DeepSeek-V4.1), and to a window of each layer.

Entries, keys of the indexer and windows are stored in 4 and 8 bits with scales, and rounded in every phase before they
are used. In a prompt, layers share all entries and a mask of those chosen. In decode they share the chosen entries
alone, which the layer that chooses takes from the cache of the layer that made them.

Shapes: B batch, S query positions, D residual width, N heads, H head width, E entries, K chosen entries,
C candidates of a choice, M positions of an entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.reused import (
    CHOOSING,
    DECODER,
    ENTRY_FORMAT,
    FULL,
    INDEX_FORMAT,
    WINDOW_FORMAT,
    ReusedAttention,
    StoredRows,
    reused_of,
)
from meshscope.programs.jax.compressed import CompressionStep
from meshscope.programs.jax.context_parallel import LayerStep
from meshscope.programs.jax.matrix import FLOAT_EXPONENTS, decoded, wide_scales
from meshscope.programs.jax.numerics import MASKED, Array, causal_mask, index_scores, rms_norm
from meshscope.programs.jax.state import Attended, LayerCache, LayerWeights

# What layers share: `entries` [B, E or K, H] with their `mask` [B, S, E or K]; `keys` [B, C, h] of the indexer, the
# queries that may choose each (`allowed` [B, S, C]) and, in decode, the `numbers` [B, C] of their entries.
Shared = Mapping[str, Array]


def reused_attention(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """Attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new cache."""
    state = _state(step)
    q_latent = rms_norm(w.dot(x, "wq_a"), w("q_a_norm"), state.eps)
    q = w.einsum("bsr,rnh->bsnh", q_latent, "wq_b")
    *seen, cache = state.window(x, w, cache)
    parts = [seen]
    n_positions = state.positions.shape[0] * step.context.size
    is_made = n_positions < step.context.n_new and not state.context.is_decode
    if state.kind in FULL and not is_made:
        cache = state.made(x, w, cache)
    if state.kind in CHOOSING:
        cache = replace(cache, chosen=state.choice(x, q_latent, w, cache))
    if state.kind is not AttentionKind.SLIDING:
        parts.append([cache.chosen["entries"], cache.chosen["mask"]])
    return state.output(q, parts, x, w), cache


def prompt_entries(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> LayerCache:
    """The cache with the entries of all positions of a prompt, of which only the last pass through the layer."""
    return _state(step).made(x, w, cache)


def _state(step: LayerStep) -> "_ReusedStep":
    context = step.context
    n_positions = step.positions.shape[0] * context.size
    n_before = context.n_cached + context.n_new - n_positions
    return _ReusedStep(
        attention=reused_of(step.model.attention),
        kind=step.layer.attention,
        positions=step.positions,
        context=replace(context, n_cached=0 if context.is_decode else n_before),
        eps=step.model.norm_eps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReusedStep(CompressionStep):
    """The attention of one layer in one step; a decode step has one position."""

    attention: ReusedAttention

    def window(
        self, x: Array, w: LayerWeights, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Keys of the window [B, T, H], their mask [S, T], and the new cache."""
        kv = rms_norm(w.dot(x, "wkv"), w("kv_norm"), self.eps)
        rows = stored_rows(self.rotate(kv[:, :, None, :])[:, :, 0], WINDOW_FORMAT)
        k_positions, names = self.positions, ("window", "window_scale")
        before: list[Array] = []
        if self.context.n_cached and not self.context.is_decode and self.kind not in DECODER:
            before = [
                self._before_chunk(cache, name, array)
                for name, array in zip(names, rows, strict=True)
            ]
        if self.context.splits_step:
            rows, k_positions = self._of_all_blocks(rows), jnp.arange(self.context.n_prompt)
        for name, array in zip(names, rows, strict=True):
            cache = self._write_latest(cache, name, array)
        if before:
            values, scales = (
                jnp.concatenate(parts, axis=1) for parts in zip(before, rows, strict=True)
            )
            rows = (values, scales)
            k_positions = self.context.n_cached - before[0].shape[1] + jnp.arange(values.shape[1])
        if self.context.is_decode:
            rows, now = _read(cache, "window"), self.positions[-1]
            k_positions = now - (now - jnp.arange(rows[0].shape[1])) % rows[0].shape[1]
        mask = causal_mask(self.positions, k_positions, self.attention.window) & (k_positions >= 0)
        return wide_rows(rows, x.dtype), mask, cache

    def made(self, x: Array, w: LayerWeights, cache: LayerCache) -> LayerCache:
        """The cache with new entries and keys of the indexer, as `chosen` if they are those of a whole prompt."""
        is_decode, rate = self.context.is_decode, self.rate
        pooled = w.dot(x, "entry_wkv")
        if rate > 1:
            latest = [w.dot(x, f"entry_{part}").astype(jnp.float32) for part in ("wkv", "wgate")]
            names = ("entry_kv", "entry_gate")
            # The blocks of cp are whole entries, none of them open.
            for name, new in () if self.context.splits_step else zip(names, latest, strict=True):
                cache = self._write_latest(cache, name, new)
            if is_decode:  # the ring has the positions of one entry
                latest = [cache.read(name, jnp.float32) for name in names]
            kv, gate = (self._full_windows(one) for one in latest)
            pooled = (kv * jax.nn.softmax(gate, axis=2)).sum(axis=2).astype(x.dtype)
        n_before = self.context.n_cached // rate
        numbers = self.positions // rate if is_decode else self._numbers(n_before, pooled.shape[1])
        entry = rms_norm(pooled, w("entry_norm"), self.eps)
        key = rms_norm(w.dot(entry, "index_wk"), w("index_k_norm"), self.eps)
        first = numbers[0] if is_decode else n_before
        wide: dict[str, Array] = {}
        for name, new, form in (
            ("entry", entry, ENTRY_FORMAT),
            ("index", key, INDEX_FORMAT),
        ):
            rotated = self.rotate(new[:, :, None, :], numbers * rate)[:, :, 0]
            rows = self._of_all_blocks(stored_rows(rotated, form))
            for array, values in zip((name, f"{name}_scale"), rows, strict=True):
                if values.shape[1]:
                    cache = cache.written(array, values, at=first)
            if n_before:
                slots = range(n_before + pooled.shape[1])
                stored = (
                    cache.part(array, cache.arrays[array].dtype, n_rows=x.shape[0], slots=slots)
                    for array in (name, f"{name}_scale")
                )
                rows = (next(stored), next(stored))
            wide[name] = wide_rows(rows, x.dtype)
        if is_decode:
            return cache
        return replace(cache, chosen={"entries": wide["entry"], "keys": wide["index"]})

    def _numbers(self, n_before: int, n_new: int) -> Array:
        """The numbers of a prompt's new entries after `n_before`, or of this device's block of them under cp."""
        first = self.context.rank * n_new if self.context.splits_step else n_before
        return first + jnp.arange(n_new)

    def _of_all_blocks(self, rows: tuple[Array, Array]) -> tuple[Array, Array]:
        """Stored values and scales [B, S, H], of all blocks under cp."""
        values, scales = rows
        if self.context.splits_step:
            return self._gathered(values), self._gathered(scales)
        return rows

    def choice(self, x: Array, q_latent: Array, w: LayerWeights, cache: LayerCache) -> Shared:
        """What layers after this one share, with the entries that its indexer chose."""
        is_decode, is_full, shared = self.context.is_decode, self.kind in FULL, cache.chosen
        if is_full and is_decode:
            shared = {"keys": wide_rows(_read(cache, "index"), x.dtype)}
        if is_full:
            n_full = (self.positions + 1) // self.rate
            allowed = jnp.arange(shared["keys"].shape[1])[None, :] < n_full[:, None]
            allowed = jnp.broadcast_to(allowed, (x.shape[0], *allowed.shape))
            shared = {**shared, "allowed": allowed}
        if not shared["keys"].shape[1]:
            return {**shared, "mask": shared["allowed"]}
        indexer = self.attention.indexer
        q = self.rotate(w.einsum("bsr,rnh->bsnh", q_latent, "index_wq"))
        q = wide_rows(stored_rows(q, INDEX_FORMAT), x.dtype)
        scores = index_scores(q, shared["keys"], x @ w("index_weights"))
        scores = jnp.where(shared["allowed"], scores, MASKED)
        n_best = min(indexer.top_k, scores.shape[-1])
        if not is_decode:
            mask = self.context.top_k_mask(scores, n_best) & shared["allowed"]
        else:
            n_best = n_best if is_full else shared["mask"].shape[-1]
            best, places = lax.top_k(scores[:, 0], n_best)
            mask = (best > MASKED)[:, None]
            numbers = places if is_full else jnp.take_along_axis(shared["numbers"], places, axis=1)
            source = cache if is_full or cache.source is None else cache.source
            shared = {**shared, "entries": _taken(source, "entry", numbers, x.dtype)}
        if self.kind is AttentionKind.DECODER_FULL:
            shared = self._candidates(scores, shared, cache, x)
        elif is_full:  # nothing after it chooses among these
            shared = {name: shared[name] for name in ("entries",)}
        return {**shared, "mask": mask}

    def _candidates(self, scores: Array, shared: Shared, cache: LayerCache, x: Array) -> Shared:
        """What layers share, cut to the blocks of entries with the highest scores, and the newest."""
        size, n_entries = self.attention.candidate_block, scores.shape[-1]
        padded = jnp.pad(scores, ((0, 0), (0, 0), (0, -n_entries % size)), constant_values=MASKED)
        blocks = padded.reshape(*scores.shape[:2], -1, size).max(axis=-1)
        n_full = (self.positions + 1) // self.rate
        is_newest = jnp.arange(blocks.shape[-1])[None, :] == ((n_full - 1) // size)[:, None]
        blocks = jnp.where(is_newest, jnp.inf, blocks)
        n_best = min(self.attention.n_candidates // size, blocks.shape[-1])
        if not self.context.is_decode:
            is_kept = jnp.repeat(self.context.top_k_mask(blocks, n_best), size, axis=-1)
            return {**shared, "allowed": shared["allowed"] & is_kept[..., :n_entries]}
        places = lax.top_k(blocks[:, 0], n_best)[1]
        numbers = (places[..., None] * size + jnp.arange(size)).reshape(len(places), -1)
        allowed = (numbers < n_full)[:, None]
        numbers = jnp.minimum(numbers, n_entries - 1)
        keys = _taken(cache, "index", numbers, x.dtype)
        return {**shared, "keys": keys, "allowed": allowed, "numbers": numbers}


def _read(cache: LayerCache, name: str) -> tuple[Array, Array]:
    arrays = (cache.arrays[one] for one in (name, f"{name}_scale"))
    values, scales = (
        one if cache.index is None else lax.dynamic_index_in_dim(one, cache.index, keepdims=False)
        for one in arrays
    )
    return values, scales


def _taken(cache: LayerCache, name: str, numbers: Array, dtype: object) -> Array:
    """The rows [B, K, H] with these numbers [B, K] of a cached array."""
    values, scales = (
        jnp.take_along_axis(one, numbers[..., None], axis=1) for one in _read(cache, name)
    )
    return wide_rows((values, scales), dtype)


def stored_rows(x: Array, form: StoredRows) -> tuple[Array, Array]:
    """X [..., H] as it is stored: values, two of 4 bits in a byte, and the scale of each group of them.

    A scale of 8 exponent bits makes the largest magnitude of its group one with the largest exponent of the values (OCP
    Microscaling Formats Specification v1.0, section 6.3); one of e4m3 makes it their largest number.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, form.n_each)
    maxima = jnp.abs(groups).max(axis=-1)
    largest, is_fp4 = float(jnp.finfo(jnp.float8_e4m3fn).max), form.values == "f4e2m1fn"
    if form.scales == "u8":
        exponents = lax.bitcast_convert_type(maxima, jnp.int32) >> 23
        stored = jnp.clip(exponents - FLOAT_EXPONENTS[form.values], 1, 254).astype(jnp.uint8)
    else:
        stored = jnp.minimum(maxima / 6, largest).astype(jnp.float8_e4m3fn)
    factors = wide_scales(stored)
    scaled = groups / jnp.where(factors == 0, 1, factors)[..., None]
    scaled = scaled.reshape(x.shape)
    if not is_fp4:
        return jnp.clip(scaled, -largest, largest).astype(jnp.float8_e4m3fn), stored
    magnitude = jnp.abs(scaled)  # codes of e2m1: rounded to nearest, ties to even codes
    code = sum((magnitude > limit).astype(jnp.int32) for limit in (0.25, 1.25, 2.5, 5.0))
    code += sum((magnitude >= limit).astype(jnp.int32) for limit in (0.75, 1.75, 3.5))
    low, high = jnp.split(code | ((scaled < 0).astype(jnp.int32) << 3), 2, axis=-1)
    return (low | (high << 4)).astype(jnp.uint8), stored


def wide_rows(rows: tuple[Array, Array], dtype: object) -> Array:
    """The numbers [..., H] of stored values and scales."""
    values, scales = rows
    if values.dtype == jnp.uint8:
        codes = values.astype(jnp.int32)
        both = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        wide = decoded((both ^ 8) - 8)
    else:
        wide = values.astype(jnp.float32)
    factors = wide_scales(scales)
    groups = wide.reshape(*factors.shape, -1) * factors[..., None]
    return groups.reshape(wide.shape).astype(dtype)
