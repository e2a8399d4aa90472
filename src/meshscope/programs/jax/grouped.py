"""Grouped-query attention.

Shapes: B batch, S positions of this step, T positions attended to, D residual width, N query heads,
K key and value heads, H head width. A decode step of several tokens has them as rows of the batch outside
the attention itself (`numerics.by_sequence`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.programs.jax import numerics
from meshscope.programs.jax.attention import AttentionInputs, AttentionScores, dot_product_attention
from meshscope.programs.jax.context_parallel import LayerStep
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.key_blocks import chosen_keys
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import Attended, LayerCache, LayerWeights


def grouped_attention(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """Attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new cache."""
    attention = grouped_of(step.model.attention_of(step.layer))
    context, positions, kind = step.context, step.positions, step.layer.attention
    q = heads(x, w, "q")
    k = None if step.layer.shares_cache else heads(x, w, "k")
    if attention.has_whole_norms:
        assert k is not None
        q, k = _normed(q, k, w, step.model.norm_eps)
    q = numerics.by_sequence(_scaled(_turned(q, "q", w, step), step), positions)
    fresh, new = None, {}
    if k is not None:
        v = k if attention.has_shared_values else heads(x, w, "v")
        if attention.value_scale != 1.0:
            v = v * jnp.asarray(attention.value_scale, v.dtype)
        if attention.has_value_norm:
            v = numerics.unscaled_rms_norm(v, step.model.norm_eps)
        fresh = tuple(numerics.by_sequence(y, positions) for y in (_turned(k, "k", w, step), v))
        k, v = (y.swapaxes(1, 2) for y in fresh)  # [B, K, S, H], perhaps joined in the cache
        new = {"k": k, "v": v}
        if "kv" in cache.arrays:
            new = {"kv": jnp.concatenate([k, v], axis=-1)}
    chosen, cache = chosen_keys(x, w, cache, step)
    is_chunked = kind is AttentionKind.CHUNKED
    seen: dict[str, Any] = {"window": attention.window_of(kind), "is_chunked": is_chunked}
    scores = AttentionScores(
        scale=attention.score_scale,
        softcap=attention.softcap,
        sinks=w("sinks") if attention.has_sinks else None,
        window=None if is_chunked else seen["window"],
    )
    if isinstance(kernel := step.kernel, DecodeKernel):
        # If one array has keys and values, it serves as both: zeros after the query hide the values, and the
        # first half of the output, which sums keys, is dropped.
        width = q.shape[-1]
        wide = jnp.pad(q, [(0, 0)] * 3 + [(0, width)]) if "kv" in cache.arrays else q
        seen |= {"scale": scores.scale, "softcap": scores.softcap, "sinks": scores.sinks}
        out, cache = context.decode(
            *(kernel, wide, new, cache, positions),
            columns=slice(-width, None),
            value_width=wide.shape[-1] if "kv" in cache.arrays else attention.head_widths[1],
            mask=None if chosen is None else jnp.squeeze(chosen, 2),
            **seen,
        )
        return _output(out, x, w), cache
    cache = context.written(cache, new, positions)
    k, v, k_positions = _attended(fresh, cache, x, step, scores.window)
    if step.layer.shares_cache and context.is_split:
        # Else XLA merges collectives of several layers.
        q, k, v = lax.optimization_barrier((q, k, v))
    if context.is_split:
        inputs = AttentionInputs(
            q=q,
            keys=lambda k, v: (k, v),
            mask_of=partial(_mask, step, chosen, seen),
            scores=scores,
            kernel=step.prefill_kernel,
        )
        out = context.attend(inputs, (k, v), k_positions)
    elif (kernel := step.prefill_kernel) is not None:
        out = kernel(q, k, v, scores)
    else:
        out = dot_product_attention(q, k, v, _mask(step, chosen, seen, k_positions), scores)
    return _output(out, x, w), cache


def _mask(step: LayerStep, chosen: Array | None, seen: Any, of_keys: Array) -> Array:
    """The mask of the keys at these positions: the chosen keys, else the causal mask."""
    context, positions = step.context, step.positions
    if chosen is not None:
        return context.of_keys(chosen, of_keys) if context.is_split else chosen
    of_queries = context.query_positions(positions) if context.is_split else positions
    return numerics.causal_mask(of_queries, of_keys, **seen)


def _output(out: Array, x: Array, w: LayerWeights) -> Array:
    out = numerics.by_row(out, x)
    if "wq_gate" in w:
        out = out * jax.nn.sigmoid(heads(x, w, "q_gate"))
    return gated_output(out, x, w)


def gated_output(out: Array, x: Array, w: LayerWeights) -> Array:
    """The output [B, S, D] of heads [B, S, N, H], which a gate of x [B, S, D] may scale."""
    if "w_head_gate" in w:
        gate = jax.nn.sigmoid(w.dot(w.at_least(x), "w_head_gate"))
        out = out * gate[:, : x.shape[1], :, None]
    return w.einsum("bsnh,nhd->bsd", out, "wo")


def _turned(x: Array, letter: str, w: LayerWeights, step: LayerStep) -> Array:
    attention = grouped_of(step.model.attention_of(step.layer))
    eps, rope = step.model.norm_eps, attention.rope_of(step.layer.attention)
    if attention.has_qk_norm and not attention.has_whole_norms:
        x = numerics.rms_norm(x, w(f"{letter}_norm"), eps, offset=step.model.norm_offset)
    if rope is None:
        return x
    positions = numerics.row_positions(x, step.positions)
    x = numerics.apply_rope(x, numerics.rope_angles(rope, attention.head_dim, positions), rope)
    return numerics.unscaled_rms_norm(x, eps) if attention.has_l2_norm else x


def _normed(q: Array, k: Array, w: LayerWeights, eps: float) -> tuple[Array, Array]:
    """Queries and keys [B, S, heads, H], each normed over all heads, whose squares meet in one sum over tp.

    Source: MiniMaxText01RMSNormTP of vLLM. Repeated key heads do not change their mean.
    """
    wide = [x.astype(jnp.float32) for x in (q, k)]
    squares = jnp.stack([jnp.square(x).mean(axis=(2, 3)) for x in wide], axis=-1)
    factors = lax.rsqrt(w.collectives.mean(squares) + eps)
    normed = (x * factors[..., n, None, None] for n, x in enumerate(wide))
    q, k = (x.astype(q.dtype) * w(f"{name}_norm") for name, x in zip("qk", normed, strict=True))
    return q, k


def _scaled(q: Array, step: LayerStep) -> Array:
    temperature = grouped_of(step.model.attention_of(step.layer)).temperature
    if step.layer.attention is not AttentionKind.FULL:
        return q
    return numerics.scaled_queries(q, temperature, step.positions)


def heads(x: Array, w: LayerWeights, letter: str) -> Array:
    """[B, S, D] -> [B, S, heads, H]."""
    out = w.einsum("bsd,dnh->bsnh", w.at_least(x), f"w{letter}")
    return w.biased(out[:, : x.shape[1]], f"b{letter}")


def _attended(
    fresh: tuple[Array, ...] | None,
    cache: LayerCache,
    x: Array,
    step: LayerStep,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """Keys and values [B, T, K, H] that the step attends to, `fresh` or from an earlier layer, and their positions [T]."""
    context, n_positions = step.context, x.shape[1]
    is_joined = "kv" in cache.arrays
    names = ("kv",) if is_joined else ("k", "v")
    arrays: list[Any] = [context.attended(cache, name, x, window) for name in names]
    if context.is_decode:
        k_positions = context.cache_positions(arrays[0].shape[-2])
    elif context.n_cached:
        slots = context.chunk_slots(n_positions, window)
        every = jnp.arange(slots.start, slots.stop)
        k_positions = context.cache_positions(slots.stop) if context.is_split else every
    elif fresh is not None:
        return *fresh, step.positions
    else:
        k_positions, slots = step.positions, range(n_positions)
        arrays = [cache.part(n, x.dtype, n_rows=x.shape[0], slots=slots) for n in names]
    k, v = jnp.split(arrays[0], 2, axis=-1) if is_joined else arrays
    return k.swapaxes(1, 2), v.swapaxes(1, 2), k_positions
