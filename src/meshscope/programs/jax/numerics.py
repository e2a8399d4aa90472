"""Numerics that all model families share: norms, masks and rotary embeddings.

Shapes: B batch, S query positions, T key positions, N heads, H head width.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshscope.model.mechanisms.attention import Temperature
from meshscope.model.reader import Rope, RopeType

Array = Any  # jax.Array or a tracer
Arrays = Sequence[Array]

MASKED = -1e30  # replaces masked scores; finite to avoid NaN in fully masked rows


def by_sequence(x: Array, positions: Array) -> Array:
    """Rows [B*T, 1, ...] of a decode step, which fill whole tiles, as [B, T, ...], if it has T positions; [B, S, ...] as is."""
    n_positions = positions.shape[0]
    return x if x.shape[1] == n_positions else x.reshape(-1, n_positions, *x.shape[2:])


def by_row(x: Array, rows: Array) -> Array:
    """[B, T, ...] in the form of `rows`, the inverse of `by_sequence`."""
    return x if x.shape[:2] == rows.shape[:2] else x.reshape(*rows.shape[:2], *x.shape[2:])


def row_positions(x: Array, positions: Array) -> Array:
    """The position of every row of x [B*T, 1, ...] as [B*T, 1]; positions [S] of [B, S, ...] as is."""
    n_rows, n_positions = x.shape[0], positions.shape[0]
    if x.shape[1] == n_positions:
        return positions
    return jnp.tile(positions, n_rows // n_positions)[:, None]


def scaled_queries(q: Array, temperature: Temperature | None, positions: Array) -> Array:
    """Queries [B, S, N, H] times a scale that grows with their position; unchanged if there is none."""
    if temperature is None:
        return q
    numbers = row_positions(q, positions).astype(jnp.float32)
    if temperature.is_ratio:
        scale = jnp.log(jnp.maximum(numbers, temperature.floor)) / np.log(temperature.floor)
    else:
        steps = jnp.floor((numbers + temperature.offset) / temperature.floor)
        scale = jnp.log1p(steps) * temperature.strength + 1
    scale = scale if scale.ndim == 2 else scale[None]
    return (q * scale[..., None, None]).astype(q.dtype)


def rms_norm(x: Array, scale: Array, eps: float, *, offset: float = 0.0) -> Array:
    """Root-mean-square norm over the last dim, times `scale` plus `offset`, with an offset in float32 (transformers' Gemma)."""
    if not offset:
        return unscaled_rms_norm(x, eps) * scale.astype(x.dtype)
    wide = unscaled_rms_norm(x.astype(jnp.float32), eps)
    return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def soft_capped(x: Array, cap: float | None) -> Array:
    """Values of at most `cap` in magnitude, by a tanh; unchanged if it is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def unscaled_rms_norm(x: Array, eps: float) -> Array:
    """Root-mean-square norm without a learned scale."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array | None, eps: float) -> Array:
    """Mean and variance norm over the last dim, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = wide.astype(x.dtype) * scale.astype(x.dtype)
    return normed if bias is None else normed + bias.astype(x.dtype)


def causal_mask(
    q_positions: Array, k_positions: Array, window: int | None = None, *, is_chunked: bool = False
) -> Array:
    """The causal mask [S, T], optionally with a sliding window or chunks of `window` positions."""
    distance = q_positions[:, None] - k_positions[None, :]
    mask = distance >= 0
    if window is None:
        return mask
    if is_chunked:
        return mask & (q_positions[:, None] // window == k_positions[None, :] // window)
    return mask & (distance < window)


def rope_angles(rope: Rope, head_dim: int, positions: Array) -> Array:
    """The angles [..., R/2] of channel pairs at each position, in float32; R of the channels rotate."""
    frequencies = rope_frequencies(rope, rope.rotary_dim(head_dim))
    return positions.astype(jnp.float32)[..., None] * frequencies


def apply_rope(x: Array, angles: Array, rope: Rope, *, is_interleaved: bool | None = None) -> Array:
    """Applies rotary embeddings to x [B, S, N, H] by angles [S, R/2] or [B, S, R/2]; channels without an angle stay.

    Interleaved pairs are returned as halves, as in transformers' DeepSeek-V3; queries and keys are permuted alike.
    """
    n_turning = 2 * angles.shape[-1]
    if n_turning < x.shape[-1]:
        turned = apply_rope(x[..., :n_turning], angles, rope, is_interleaved=is_interleaved)
        return jnp.concatenate([turned, x[..., n_turning:]], axis=-1)
    scale = rope_scale(rope)
    at = (slice(None), slice(None), None) if angles.ndim == 3 else (None, slice(None), None)
    cos, sin = (f(angles)[at] * scale for f in (jnp.cos, jnp.sin))
    wide = x.astype(jnp.float32)
    is_paired = rope.is_interleaved if is_interleaved is None else is_interleaved
    low, high = (wide[..., 0::2], wide[..., 1::2]) if is_paired else jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position for each of the H/2 channel pairs (transformers modeling_rope_utils, `_compute_*_parameters`)."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.rope_type:
        case RopeType.DEFAULT:
            scaled = plain
        case RopeType.LINEAR:
            scaled = plain / rope.factor
        case RopeType.LLAMA3:
            turns = rope.original_max_position * plain / (2 * np.pi)  # over the original context
            span = rope.high_freq_factor - rope.low_freq_factor
            kept_frac = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
            scaled = plain * (kept_frac + (1 - kept_frac) / rope.factor)
        case RopeType.YARN:
            scaled = _yarn_frequencies(plain, rope, head_dim)
        case RopeType.LONGROPE:
            scaled = plain / np.array(rope.long_factors if rope.is_long else rope.short_factors)
        case RopeType.PROPORTIONAL:
            n_turning = int(rope.rotary_frac * head_dim // 2)
            scaled = np.where(np.arange(plain.size) < n_turning, plain / rope.factor, 0.0)
    return scaled.astype(np.float32)


def rope_scale(rope: Rope) -> float:
    """The factor of cosine and sine: the attention factor of YaRN and LongRoPE, else 1.

    Source: transformers modeling_rope_utils, `_compute_yarn_parameters`, `_compute_longrope_parameters`.
    """
    if rope.rope_type not in {RopeType.YARN, RopeType.LONGROPE}:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type is RopeType.LONGROPE:
        stretch = float(np.log(max(rope.factor, 1.0)) / np.log(rope.original_max_position))
        return (1 + stretch) ** 0.5
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's scale of attention logits by context length (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * float(np.log(factor)) + 1.0


def _yarn_frequencies(plain: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
    def channel(n_turns: float) -> float:
        turns = rope.original_max_position / (n_turns * 2 * np.pi)
        return head_dim * float(np.log(turns)) / (2 * float(np.log(rope.theta)))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.is_truncated:
        low, high = float(np.floor(low)), float(np.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / span, 0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def index_scores(q: Array, k: Array, weights: Array) -> Array:
    """Index scores [B, S, T] of q [B, S, n, h], k [B, T, h] and head weights [B, S, n]."""
    scores = jnp.einsum("bsnh,bth->bsnt", q, k, preferred_element_type=jnp.float32)
    scores = jax.nn.relu(scores * k.shape[-1] ** -0.5)
    weights = weights.astype(jnp.float32) * weights.shape[-1] ** -0.5
    return jnp.einsum("bsn,bsnt->bst", weights, scores)
