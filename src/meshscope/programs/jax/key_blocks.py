"""The blocks of keys that grouped-query attention sees, by an indexer's scores.

Source: MiniMaxM3VLIndexer of transformers.

Shapes: B batch, S query positions, T key positions, D residual width, K key and value heads, G blocks of keys.
"""

import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.key_blocks import KeyBlockAttention
from meshscope.programs.jax import numerics
from meshscope.programs.jax.context_parallel import AXIS, LayerStep, best_mask
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
    angles = numerics.rope_angles(of.rope, of.head_dim, numerics.row_positions(x, positions))

    def turned(heads: Array, name: str) -> Array:
        normed = numerics.rms_norm(
            heads, w(f"index_{name}_norm"), model.norm_eps, offset=model.norm_offset
        )
        return numerics.by_sequence(numerics.apply_rope(normed, angles, of.rope), positions)

    q = turned(w.einsum("bsd,dkh->bskh", x, "index_wq"), "q")
    head = turned(w.dot(x, "index_wk")[:, :, None], "k")
    cache = context.written(cache, {"index_k": head[:, :, 0]}, positions)
    k = context.attended(cache, "index_k", x)
    if k is None:
        k = (context.gathered(head) if context.splits_step else head)[:, :, 0]
    n_keys, of_queries = k.shape[1], context.query_positions(positions)
    at = context.cache_positions(n_keys) if context.is_decode else jnp.arange(n_keys)
    seen = numerics.causal_mask(of_queries, at)
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
