"""Grouped-query attention.

Shapes: B batch, S positions of this step, T positions attended to, D residual width, N query heads,
K key and value heads, H head width. A decode step of several tokens has them as rows of the batch outside
the attention itself (`numerics.by_sequence`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.grouped import GroupedAttention, grouped_of
from meshscope.model.model import Model
from meshscope.programs.jax.attention import (
    AttentionInputs,
    AttentionScores,
    PartialAttention,
    PrefillKernel,
    dot_product_attention,
)
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.numerics import (
    Array,
    apply_rope,
    by_row,
    by_sequence,
    causal_mask,
    rms_norm,
    rope_angles,
    row_positions,
    unscaled_rms_norm,
)
from meshscope.programs.jax.state import LayerCache, LayerWeights


def grouped_attention(  # noqa: PLR0913  the inputs of a layer's attention
    x: Array,
    w: LayerWeights,
    cache: LayerCache,
    positions: Array,
    *,
    model: Model,
    layer: Layer,
    context: Context,
    kernel: PrefillKernel | DecodeKernel | None = None,
) -> tuple[Array, LayerCache]:
    """Attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new cache.

    `kernel` is that of the phase.
    """
    attention = grouped_of(model.attention_of(layer))
    turned_by = row_positions(x, positions)
    rotary = _Positions(turned_by, attention, layer.attention, model.norm_eps)
    q = rotary.scaled(rotary.turned(_normed(heads(x, w, "q"), w, "q", attention, model)))
    q = by_sequence(q, positions)
    fresh, new = None, {}
    if not layer.shares_cache:
        k, v = _projected(x, w, attention, model)
        fresh = by_sequence(rotary.turned(k), positions), by_sequence(v, positions)
        new = _cached(*fresh, cache)
    is_chunked = layer.attention is AttentionKind.CHUNKED
    window = attention.window_of(layer.attention)
    scores = AttentionScores(
        scale=attention.score_scale,
        softcap=attention.softcap,
        sinks=w("sinks") if attention.has_sinks else None,
        window=None if is_chunked else window,
    )
    if isinstance(kernel, DecodeKernel):
        seen: dict[str, Any] = {"window": window, "is_chunked": is_chunked, "scale": scores.scale}
        seen |= {"softcap": scores.softcap, "sinks": scores.sinks}
        if context.is_split:
            out, cache = _decode_share(
                q, new, cache, positions[0], kernel=kernel, context=context, **seen
            )
        else:
            out, cache = _decode(q, new, cache, positions, kernel, **seen)
        return _output(out, x, w), cache
    cache = context.written(cache, new, positions)
    k, v, k_positions = _attended(
        fresh, cache, x, positions, context=context, window=None if is_chunked else window
    )
    if layer.shares_cache and context.is_split:  # else XLA merges the collectives of several layers
        q, k, v = lax.optimization_barrier((q, k, v))
    if context.is_split:
        of_queries = context.query_positions(positions)
        inputs = AttentionInputs(
            q=q,
            keys=lambda k, v: (k, v),
            mask_of=lambda of_keys: causal_mask(of_queries, of_keys, window, is_chunked=is_chunked),
            scores=scores,
            kernel=kernel,
        )
        out = context.attend(inputs, (k, v), k_positions)
    elif kernel is not None:
        out = kernel(q, k, v, scores)
    else:
        mask = causal_mask(positions, k_positions, window, is_chunked=is_chunked)
        out = dot_product_attention(q, k, v, mask, scores)
    return _output(out, x, w), cache


def _output(out: Array, x: Array, w: LayerWeights) -> Array:
    """[B, S, N, H] -> [B, S, D], scaled by the gates of the heads if the layer has them."""
    out = by_row(out, x)
    if "wq_gate" in w:
        out = out * jax.nn.sigmoid(heads(x, w, "q_gate"))
    return w.einsum("bsnh,nhd->bsd", out, "wo")


def _projected(
    x: Array, w: LayerWeights, attention: GroupedAttention, model: Model
) -> tuple[Array, Array]:
    """Keys and values [B, S, K, H], normed where the model does so."""
    k = heads(x, w, "k")
    v = k if attention.has_shared_values else heads(x, w, "v")
    if attention.has_value_norm:
        v = unscaled_rms_norm(v, model.norm_eps)
    return _normed(k, w, "k", attention, model), v


def _normed(
    x: Array, w: LayerWeights, letter: str, attention: GroupedAttention, model: Model
) -> Array:
    """Queries or keys [B, S, heads, H], normed if the model does so."""
    if not attention.has_qk_norm:
        return x
    return rms_norm(x, w(f"{letter}_norm"), model.norm_eps, offset=model.norm_offset)


@dataclass(frozen=True, slots=True)
class _Positions:
    """The positions [S], or [B, S], of a step, by which a kind of layer turns queries and keys."""

    positions: Array
    attention: GroupedAttention
    kind: AttentionKind
    eps: float

    def turned(self, x: Array) -> Array:
        """Queries or keys [B, S, heads, H] turned by their positions."""
        rope = self.attention.rope_of(self.kind)
        if rope is None:
            return x
        x = apply_rope(x, rope_angles(rope, self.attention.head_dim, self.positions), rope)
        return unscaled_rms_norm(x, self.eps) if self.attention.has_l2_norm else x

    def scaled(self, q: Array) -> Array:
        """Queries scaled by their positions, if layers of this kind do so."""
        temperature = self.attention.temperature
        if temperature is None or self.kind is not AttentionKind.FULL:
            return q
        numbers = self.positions.astype(jnp.float32) + temperature.offset
        steps = jnp.floor(numbers / temperature.floor)
        scale = jnp.log1p(steps) * temperature.strength + 1
        at = (slice(None), slice(None)) if scale.ndim == 2 else (None, slice(None))
        return (q * scale[(*at, None, None)]).astype(q.dtype)


def heads(x: Array, w: LayerWeights, letter: str) -> Array:
    """[B, S, D] -> [B, S, heads, H]."""
    out = w.einsum("bsd,dnh->bsnh", w.at_least(x), f"w{letter}")
    return w.biased(out[:, : x.shape[1]], f"b{letter}")


def _cached(k: Array, v: Array, cache: LayerCache) -> dict[str, Array]:
    """Keys and values [B, S, K, H] as the cache has them: [B, K, S, H], or [B, K, S, 2H] of both."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return {"kv": jnp.concatenate([k, v], axis=-1)} if "kv" in cache.arrays else {"k": k, "v": v}


def _attended(  # noqa: PLR0913  where keys and values may be
    fresh: tuple[Array, Array] | None,
    cache: LayerCache,
    x: Array,
    positions: Array,
    *,
    context: Context,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """Keys and values [B, T, K, H] that the step attends to, and their positions [T].

    `fresh` are those of the step, or None if an earlier layer wrote them to the cache.
    """
    if context.phase is Phase.DECODE:
        k, v = _read(cache, x.dtype)
        return k, v, context.cache_positions(k.shape[1])
    if context.n_cached:
        slots = context.chunk_slots(x.shape[1], window)
        k, v = _read(cache, x.dtype, n_rows=x.shape[0], slots=slots)
        every = jnp.arange(slots.start, slots.stop)
        return k, v, context.cache_positions(slots.stop) if context.is_split else every
    if fresh is None:
        fresh = _read(cache, x.dtype, n_rows=x.shape[0], slots=range(x.shape[1]))
    return *fresh, positions


def _read(cache: LayerCache, dtype: Any, **part: Any) -> tuple[Array, Array]:
    """Keys and values [B, T, K, H] of all slots, or of a part of the cache."""

    def read(name: str) -> Array:
        array = cache.part(name, dtype, **part) if part else cache.read(name, dtype)
        return array.swapaxes(1, 2)

    if "kv" not in cache.arrays:
        return read("k"), read("v")
    k, v = jnp.split(read("kv"), 2, axis=-1)
    return k, v


def _decode(
    q: Array,
    new: dict[str, Array],
    cache: LayerCache,
    positions: Array,
    kernel: DecodeKernel,
    **settings: Any,
) -> tuple[Array, LayerCache]:
    """Attention [B, S, N, H] of the positions to the cache, and the cache with them unless `new` is empty.

    If one array has keys and values, it serves as both: zeros after the query hide the values, and the
    first half of the output, which sums keys, is dropped.
    """
    width = q.shape[-1]
    if "kv" not in cache.arrays:
        return kernel(q, new, cache, positions, value_width=width, **settings)
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, width)])
    out, cache = kernel(q, new, cache, positions, value_width=2 * width, **settings)
    return out[..., width:], cache


def _decode_share(  # noqa: PLR0913  the inputs of attention
    q: Array,
    new: dict[str, Array],
    cache: LayerCache,
    position: Array,
    *,
    kernel: DecodeKernel,
    context: Context,
    window: int | None,
    is_chunked: bool,
    sinks: Array | None,
    **settings: Any,
) -> tuple[Array, LayerCache]:
    """As `_decode`, where cp splits the cache: the devices' attention to their slots, merged."""
    width, n_arrays = q.shape[-1], len(cache.arrays)
    wide = q if n_arrays > 1 else jnp.pad(q, [(0, 0)] * 3 + [(0, width)])
    share = context.share(position, window, is_chunked=is_chunked)
    out, logs, cache = kernel.part(
        wide, new, cache, share, value_width=wide.shape[-1], window=window, **settings
    )
    part = PartialAttention.of_normalized(out[..., -width:], logs)
    return context.merged(part).with_sinks(sinks).normalized(q.dtype), cache
