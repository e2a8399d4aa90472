"""Grouped-query attention.

Shapes: B batch, S positions of this step, T positions attended to, D residual width, N query heads,
K key and value heads, H head width.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshscope.events.enums import Phase
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.kernels import PrefillKernel
from meshscope.programs.jax.numerics import (
    Array,
    apply_rope,
    causal_mask,
    dot_product_attention,
    rms_norm,
    rope_angles,
    unscaled_rms_norm,
)
from meshscope.programs.jax.partial_attention import AttentionInputs, PartialAttention
from meshscope.programs.jax.state import LayerCache, LayerWeights
from meshscope.spec.model.flops import window_of
from meshscope.spec.model.model import AttentionKind, GroupedAttention, Layer, Model


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
    assert isinstance(model.attention, GroupedAttention)
    attention = model.attention.of(layer.attention)
    q, k, v = _projected(x, w, attention, model)
    q, k = _positioned(q, k, positions, attention, layer.attention, eps=model.norm_eps)
    is_chunked = layer.attention is AttentionKind.CHUNKED
    window = window_of(attention, layer.attention)
    sinks = w("sinks") if attention.has_sinks else None
    scores: dict[str, Any] = {
        "scale": attention.score_scale,
        "softcap": attention.softcap,
        "sinks": sinks,
    }
    new = _cached(k, v, cache)
    if isinstance(kernel, DecodeKernel):
        seen = {"window": window, "is_chunked": is_chunked}
        if context.is_split:
            out, cache = _decode_share(
                q, new, cache, positions[0], kernel=kernel, context=context, **seen, **scores
            )
        else:
            out, cache = _decode(q, new, cache, positions[0], kernel, **seen, **scores)
        return _output(out, x, w), cache
    for name, array in new.items():
        cache = cache.written(name, array)
    k_positions = positions
    if context.phase is Phase.DECODE:
        k, v = (x.swapaxes(1, 2) for x in _read(cache, x.dtype))
        k_positions = context.cache_positions(k.shape[1])
    elif context.n_cached:
        slots = context.chunk_slots(x.shape[1], None if is_chunked else window)
        k, v = (x.swapaxes(1, 2) for x in _read(cache, x.dtype, n_rows=x.shape[0], slots=slots))
        k_positions = jnp.arange(slots.start, slots.stop)
        if context.is_split:
            k_positions = context.cache_positions(slots.stop)
    if context.is_split:
        of_queries = context.query_positions(positions)
        inputs = AttentionInputs(
            q=q,
            keys=lambda k, v: (k, v),
            mask_of=lambda of_keys: causal_mask(of_queries, of_keys, window, is_chunked=is_chunked),
            kernel=kernel,
            window=None if is_chunked else window,
            **scores,
        )
        out = context.attend(inputs, (k, v), k_positions)
    elif kernel is not None:
        out = kernel(q, k, v, window=None if is_chunked else window, **scores)
    else:
        mask = causal_mask(positions, k_positions, window, is_chunked=is_chunked)
        out = dot_product_attention(q, k, v, mask, **scores)
    return _output(out, x, w), cache


def _output(out: Array, x: Array, w: LayerWeights) -> Array:
    """[B, S, N, H] -> [B, S, D], scaled by the gates of the heads if the layer has them."""
    if "wq_gate" in w:
        out = out * jax.nn.sigmoid(heads(x, w, "q_gate"))
    return w.einsum("bsnh,nhd->bsd", out, "wo")


def _projected(
    x: Array, w: LayerWeights, attention: GroupedAttention, model: Model
) -> tuple[Array, Array, Array]:
    """Queries, keys and values [B, S, heads, H], normed where the model does so."""
    q, k = heads(x, w, "q"), heads(x, w, "k")
    v = k if attention.has_shared_values else heads(x, w, "v")
    if attention.has_value_norm:
        v = unscaled_rms_norm(v, model.norm_eps)
    if attention.has_qk_norm:
        eps, offset = model.norm_eps, model.norm_offset
        q, k = (rms_norm(x, w(f"{n}_norm"), eps, offset=offset) for n, x in (("q", q), ("k", k)))
    return q, k, v


def _positioned(  # noqa: PLR0913  queries, keys and where they are
    q: Array,
    k: Array,
    positions: Array,
    attention: GroupedAttention,
    kind: AttentionKind,
    *,
    eps: float,
) -> tuple[Array, Array]:
    """Queries and keys [B, S, heads, H] turned by their positions, or queries scaled by them."""
    rope, temperature = attention.rope_of(kind), attention.temperature
    if rope is not None:
        angles = rope_angles(rope, attention.head_dim, positions)
        q, k = apply_rope(q, angles, rope), apply_rope(k, angles, rope)
    if rope is not None and attention.has_l2_norm:
        q, k = unscaled_rms_norm(q, eps), unscaled_rms_norm(k, eps)
    if temperature is not None and kind is AttentionKind.FULL:
        numbers = positions.astype(jnp.float32) + temperature.offset
        steps = jnp.floor(numbers / temperature.floor)
        scale = jnp.log1p(steps) * temperature.strength + 1
        q = (q * scale[None, :, None, None]).astype(q.dtype)
    return q, k


def heads(x: Array, w: LayerWeights, letter: str) -> Array:
    """[B, S, D] -> [B, S, heads, H]."""
    out = w.einsum("bsd,dnh->bsnh", w.at_least(x), f"w{letter}")
    return w.biased(out[:, : x.shape[1]], f"b{letter}")


def _cached(k: Array, v: Array, cache: LayerCache) -> dict[str, Array]:
    """Keys and values [B, S, K, H] as the cache has them: [B, K, S, H], or [B, K, S, 2H] of both."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return {"kv": jnp.concatenate([k, v], axis=-1)} if "kv" in cache.arrays else {"k": k, "v": v}


def _read(cache: LayerCache, dtype: Any, **part: Any) -> Sequence[Array]:
    """Keys and values [B, K, T, H] of all slots, or of a part of the cache."""

    def read(name: str) -> Array:
        return cache.part(name, dtype, **part) if part else cache.read(name, dtype)

    return jnp.split(read("kv"), 2, axis=-1) if "kv" in cache.arrays else [read("k"), read("v")]


def _decode(
    q: Array,
    new: dict[str, Array],
    cache: LayerCache,
    position: Array,
    kernel: DecodeKernel,
    **settings: Any,
) -> tuple[Array, LayerCache]:
    """Attention [B, 1, N, H] of one position to the cache, and the cache with it.

    If one array has keys and values, it serves as both: zeros after the query hide the values, and the
    first half of the output, which sums keys, is dropped.
    """
    width = q.shape[-1]
    if "kv" not in new:
        return kernel(q, new, cache, position, value_width=width, **settings)
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, width)])
    out, cache = kernel(q, new, cache, position, value_width=2 * width, **settings)
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
    width, n_arrays = q.shape[-1], len(new)
    wide = q if n_arrays > 1 else jnp.pad(q, [(0, 0)] * 3 + [(0, width)])
    share = context.share(position, window, is_chunked=is_chunked)
    out, logs, cache = kernel.part(
        wide, new, cache, share, value_width=wide.shape[-1], window=window, **settings
    )
    part = PartialAttention.of_normalized(out[..., -width:], logs)
    return context.merged(part).with_sinks(sinks).normalized(q.dtype), cache
