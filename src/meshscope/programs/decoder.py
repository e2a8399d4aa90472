"""One decoder for every family and every plan: prefill and decode differ only in what attends to what.

The text holds for global arrays (the compiler partitions) and for one device's share (under
`shard_map`) alike: sizes are read from the arrays, never from the model.

Shapes: B batch, S positions of this step, T positions attended to, D residual width, N query heads,
K key and value heads, G query heads a key head, H head width, F MLP width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshscope.arch.model import GroupedAttention, Model, Rope, RopeType
from meshscope.plan.weights import Weight
from meshscope.programs.points import Array, Points, scope
from meshscope.table.kinds import Part, Phase

Weights = Mapping[str, Array]
Cache = tuple[Array, Array]  # keys and values, each [B, context, K, H]

MASKED = -1e30  # added to a score that must not count; finite, so that a row never becomes NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The decoder of one phase: its model, its meeting points, its weights' declarations."""

    model: Model
    phase: Phase
    points: Points
    specs: Mapping[str, Weight]
    activation_dtype: Any

    def step(self, weights: Mapping[str, Any], tokens: Array, cache: Any, position: Array) -> Any:
        """Next tokens [B], logits [B, V] and the new cache after one step of the phase.

        `tokens` is [B, S], `position` the index of the first of them. `weights["layers"]` and
        `cache` are sequences, one entry a layer (unrolled), or have a leading layer dimension
        (scanned).
        """
        with scope(self.phase.value):
            with scope(Part.EMBED):
                table = self._weight(weights, "embed")
                x = self.points.embedded(table, tokens).astype(self.activation_dtype)
            positions = position + jnp.arange(tokens.shape[1])
            is_unrolled = isinstance(weights["layers"], Sequence)
            layers = self._unrolled if is_unrolled else self._scanned
            x, cache = layers(x, weights["layers"], cache, positions)
            with scope(Part.LM_HEAD):
                is_tied = self.model.has_tied_embeddings
                logits = self._logits(weights, x, table if is_tied else None)
            with scope(Part.SAMPLE):
                next_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return next_tokens, logits, cache

    def _weight(self, weights: Weights, name: str) -> Array:
        return self.points.weight(weights[name], self.specs[name]).astype(self.activation_dtype)

    def _logits(self, weights: Weights, x: Array, table: Array | None) -> Array:
        """[B, S, D] -> [B, V] for the last position; padding of the vocabulary is cut off.

        `table` is the embedding where the head is tied to it: gathered once in a step, as root
        parameters are under fsdp.
        """
        x = self.points.last(x)
        x = _rms_norm(x, weights["final_norm"], self.model.norm_eps)
        head = self._weight(weights, "lm_head") if table is None else table
        return self.points.logits(jnp.einsum("bd,vd->bv", x, head))[:, : self.model.vocab]

    def _unrolled(self, x: Array, layers: Any, caches: Any, positions: Array) -> tuple[Array, Any]:
        updated = []
        for index, (weights, cache) in enumerate(zip(layers, caches, strict=True)):
            with scope(f"layer{index}"):
                x, cache_after = self._layer(x, weights, cache, positions)
            updated.append(cache_after)
        return x, updated

    def _scanned(self, x: Array, layers: Any, cache: Any, positions: Array) -> tuple[Array, Any]:
        def body(x: Array, layer: tuple[Weights, Cache]) -> tuple[Array, Cache]:
            return self._layer(x, *layer, positions)

        with scope(f"layers0-{self.model.n_layers - 1}"):
            return lax.scan(body, x, (layers, cache))

    def _layer(
        self, x: Array, weights: Weights, cache: Cache, positions: Array
    ) -> tuple[Array, Cache]:
        with scope(Part.ATTN):
            h = self.points.entered(_rms_norm(x, weights["attn_norm"], self.model.norm_eps))
            h, cache = self._attention(h, weights, cache, positions)
            x = x + self._with_bias(self.points.summed(h), weights, "bo")
        with scope(Part.MLP):
            h = self.points.entered(_rms_norm(x, weights["mlp_norm"], self.model.norm_eps))
            x = x + self._with_bias(self.points.summed(self._mlp(h, weights)), weights, "b_down")
        return x, cache

    def _with_bias(self, x: Array, weights: Weights, name: str) -> Array:
        return x + self._weight(weights, name) if name in weights else x

    def _mlp(self, x: Array, weights: Weights) -> Array:
        gate = self._with_bias(x @ self._weight(weights, "w_gate"), weights, "b_gate")
        up = self._with_bias(x @ self._weight(weights, "w_up"), weights, "b_up")
        return (jax.nn.silu(gate) * up) @ self._weight(weights, "w_down")

    def _attention(
        self, x: Array, weights: Weights, cache: Cache, positions: Array
    ) -> tuple[Array, Cache]:
        """[B, S, D] -> [B, S, D] before the sum over heads of other devices."""
        attention = self.model.attention
        q = self._heads(x, weights, "q")  # [B, S, N, H]
        k, v = self._heads(x, weights, "k"), self._heads(x, weights, "v")  # [B, S, K, H]
        if attention.has_qk_norm:
            q = _rms_norm(q, weights["q_norm"], self.model.norm_eps)
            k = _rms_norm(k, weights["k_norm"], self.model.norm_eps)
        angles = _rope_angles(attention, positions)
        q, k = _rotated(q, angles), _rotated(k, angles)
        cache = (_written(cache[0], k, positions[0]), _written(cache[1], v, positions[0]))
        if self.phase is Phase.DECODE:
            k, v = (c.astype(x.dtype) for c in cache)
        out = _attended(q, k, v, positions)
        return jnp.einsum("bsnh,nhd->bsd", out, self._weight(weights, "wo")), cache

    def _heads(self, x: Array, weights: Weights, letter: str) -> Array:
        heads = jnp.einsum("bsd,dnh->bsnh", x, self._weight(weights, f"w{letter}"))
        return self._with_bias(heads, weights, f"b{letter}")


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm over the last dimension, in float32 inside."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _written(cache: Array, new: Array, start: Array) -> Array:
    """The cache [B, T, K, H] with `new` [B, S, K, H] at position `start`."""
    return lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), start, axis=1)


def _attended(q: Array, k: Array, v: Array, positions: Array) -> Array:
    """Causal attention of q [B, S, N, H] over k, v [B, T, K, H]; key t is position t."""
    n_groups = q.shape[2] // k.shape[2]
    q = q.reshape(*q.shape[:2], k.shape[2], n_groups, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32)
    is_seen = jnp.arange(k.shape[1])[None, :] <= positions[:, None]  # [S, T]
    scores = jnp.where(is_seen, scores * q.shape[-1] ** -0.5, MASKED)
    shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgst,btkh->bskgh", shares, v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def _rope_angles(attention: GroupedAttention, positions: Array) -> Array:
    """Angle of each pair of channels at each position: [S, H/2], float32."""
    return positions.astype(jnp.float32)[:, None] * rope_frequencies(
        attention.rope, attention.head_dim
    )


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians a position, for each of the H/2 channel pairs.

    Source: transformers modeling_rope_utils, `_compute_default_rope_parameters`,
    `_compute_linear_scaling_rope_parameters`, `_compute_llama3_parameters`.
    """
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.rope_type:
        case RopeType.DEFAULT:
            scaled = plain
        case RopeType.LINEAR:
            scaled = plain / rope.factor
        case RopeType.LLAMA3:
            scaled = _llama3_frequencies(plain, rope)
    return scaled.astype(np.float32)


def _llama3_frequencies(plain: np.ndarray, rope: Rope) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position * plain / (2 * np.pi)  # turns over the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(share, 0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def _rotated(x: Array, angles: Array) -> Array:
    """Rotated x [B, S, N, H]: channel i pairs with channel i + H/2, as in Hugging Face models."""
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)
