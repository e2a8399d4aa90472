"""The blocks of keys that grouped-query attention sees, by an indexer's scores.

Sources: MiniMaxM3VLIndexer and Qwen4ExpTextQSAIndexer of transformers.

Shapes: B batch, S query positions, T key positions, D residual width, K key and value heads, or heads of the indexer, G
blocks of keys.
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.key_blocks import KeyBlockAttention, PooledKeyAttention
from meshscope.programs.jax import numerics
from meshscope.programs.jax.context_parallel import AXIS, Context, LayerStep, best_mask
from meshscope.programs.jax.numerics import MASKED, Array
from meshscope.programs.jax.state import LayerCache, LayerWeights


def chosen_keys(
    x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep
) -> tuple[Array | None, LayerCache]:
    """The mask [B, K, S, T] of the keys in the chosen blocks, up to the query, and the cache with the indexer's keys; None in other layers.

    T are the positions of the step or the whole prompt, or in decode this device's slots.
    """
    context, positions, model = step.context, step.positions, step.model
    of = model.attention_of(step.layer)
    if not isinstance(of, KeyBlockAttention) or step.layer.attention is AttentionKind.FULL:
        return None, cache
    is_pooled, rows = isinstance(of, PooledKeyAttention), numerics.row_positions(x, positions)

    def turned(heads: Array, name: str, at: Array) -> Array:
        normed = numerics.rms_norm(
            heads, w(f"index_{name}_norm"), model.norm_eps, offset=model.norm_offset
        )
        return numerics.apply_rope(normed, numerics.rope_angles(of.rope, of.head_dim, at), of.rope)

    q = turned(w.einsum("bsd,dkh->bskh", x, "index_wq"), "q", rows)
    head = w.dot(x, "index_wk")[:, :, None]
    head = head if is_pooled else turned(head, "k", rows)
    q, head = (numerics.by_sequence(y, positions) for y in (q, head))
    cache = context.written(cache, {"index_k": head[:, :, 0]}, positions)
    k = context.attended(cache, "index_k", x)
    if k is None:
        k = (context.gathered(head) if context.splits_step else head)[:, :, 0]
    n_keys, of_queries = k.shape[1], context.query_positions(positions)
    at = context.cache_positions(n_keys) if context.is_decode else jnp.arange(n_keys)
    seen = numerics.causal_mask(of_queries, at)
    if isinstance(of, PooledKeyAttention):
        starts = jnp.arange(-(-n_keys * (context.size if context.is_decode else 1) // of.block))
        means = _means(k, at // of.block, of.block, len(starts), context)
        means = turned(means[:, :, None], "k", starts * of.block)[:, :, 0]
        scores = jnp.einsum("bskh,bgh->bskg", q, means, preferred_element_type=jnp.float32)
        first_open = (of_queries + 1) // of.block  # the block that is not whole
        scores = jnp.where(starts < first_open[:, None], jax.nn.relu(scores).sum(axis=2), MASKED)
        is_chosen = best_mask(scores, of.indexer.top_k) | (starts == first_open[:, None])
        mask = (is_chosen[..., at // of.block] & seen)[:, None]
        n_heads = cache.arrays["kv" if "kv" in cache.arrays else "k"].shape[-3]
        return jnp.broadcast_to(mask, (len(mask), n_heads, *mask.shape[2:])), cache
    scores = jnp.einsum("bskh,bth->bkst", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, MASKED)
    if context.is_split and context.is_decode:  # blocks have slots on several devices
        n_blocks = -(-n_keys * context.size // of.block)
        none = jnp.full((*scores.shape[:-1], n_blocks), MASKED)
        largest = lax.pmax(none.at[..., at // of.block].max(scores), AXIS)
    else:
        missing = [(0, 0)] * 3 + [(0, -n_keys % of.block)]
        padded = jnp.pad(scores, missing, constant_values=MASKED)
        largest = padded.reshape(*scores.shape[:-1], -1, of.block).max(axis=-1)
    distance = (of_queries // of.block)[:, None] - jnp.arange(largest.shape[-1])
    is_local = (distance >= 0) & (distance < of.n_local_blocks)
    is_chosen = best_mask(jnp.where(is_local, jnp.inf, largest), of.indexer.top_k)
    return is_chosen[..., at // of.block] & seen, cache


def _means(k: Array, number: Array, block: int, n_blocks: int, context: Context) -> Array:
    """The means [B, G, H] of keys [B, T, H] whose blocks have these numbers [T]; in decode, cp has slots on several devices."""
    wide = k.astype(jnp.float32)
    if context.is_split and context.is_decode:
        none = jnp.zeros((len(k), n_blocks, k.shape[-1]), jnp.float32)
        sums = lax.psum(none.at[:, number].add(wide), AXIS)
    else:
        padded = jnp.pad(wide, ((0, 0), (0, -k.shape[1] % block), (0, 0)))
        sums = padded.reshape(len(k), n_blocks, block, -1).sum(axis=2)
    return (sums / block).astype(k.dtype)
