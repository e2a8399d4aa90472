"""Multi-head latent attention: prefill expands latents to heads, decode attends to the latents.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; DeepSeek-V3.2-Exp and GLM-5 for the lightning
indexer; all as `transformers` defines them.

Shapes: B batch, S query positions, T key positions, D residual width, N heads, R latent rank,
P rotary width, H width of a head without its rotary part, V width of a value.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.latent import LatentAttention, latent_of
from meshscope.model.reader import RopeType
from meshscope.programs.jax import numerics
from meshscope.programs.jax.attention import (
    AttentionInputs,
    AttentionScores,
    dot_product_attention,
)
from meshscope.programs.jax.compressed import EntryStep
from meshscope.programs.jax.context_parallel import Context, LayerStep
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.grouped import gated_output
from meshscope.programs.jax.matrix import MAX_BLOCK_ROWS, Matrix
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import Attended, LayerCache, LayerWeights

LATENT_NORM_EPS = 1e-6  # for norms inside attention, instead of rms_norm_eps (transformers)


def latent_attention(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """Attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new cache.

    Decode attends to the latent as one KV head, with up-projections absorbed by queries and outputs.
    """
    attention, context, positions = latent_of(step.model.attention), step.context, step.positions
    eps = LATENT_NORM_EPS if attention.pool is None else step.model.norm_eps
    angles = _angles(attention, numerics.row_positions(x, positions))
    q, q_latent = _queries(x, w, attention, angles, eps)
    q = numerics.scaled_queries(q, attention.temperature, positions)
    both = w.biased(w.dot(x, "wkv_a"), "bkv_a")
    latent, rope = both[..., : attention.kv_rank], both[..., attention.kv_rank :]
    latent = numerics.rms_norm(latent, w("kv_a_norm"), eps)
    rope = _turned(rope[:, :, None, :], angles, attention)[:, :, 0]  # of all heads
    latent = numerics.by_sequence(jnp.concatenate([latent, rope], axis=-1), positions)
    q = numerics.by_sequence(q, positions)
    k_positions, mask = seen_positions(positions, cache.arrays["latent"], context)
    if attention.indexer is not None:
        keys = jnp.arange(context.n_prompt) if context.splits_step else k_positions
        mask, cache = _index_mask(x, q_latent, w, cache, keys, mask, angles, step)
    scores, rank = AttentionScores(scale=softmax_scale(attention)), attention.kv_rank
    n_nope = attention.nope_dim

    def absorbed(q: Array) -> Array:  # [B, S, N, R+P], for latents
        nope = w.einsum("bsnh,rnh->bsnr", q[..., :n_nope], "w_uk")
        return jnp.concatenate([nope, q[..., n_nope:]], axis=-1)

    def project(out: Array) -> Array:  # sums [B, S, N, R] over latents to [B, S, N, V] in float32
        out = out.astype(q.dtype)
        return jnp.einsum("bsnr,rnv->bsnv", out, w("w_uv"), preferred_element_type=jnp.float32)

    def as_heads(latent: Array) -> tuple[Array, Array]:
        return latent[:, :, None, :], latent[:, :, None, :rank]

    if isinstance(kernel := step.kernel, DecodeKernel):
        out, cache = context.decode(
            *(kernel, absorbed(q), {"latent": latent[:, None]}, cache, positions),
            project=project,
            scale=scores.scale,
            value_width=rank,
            mask=None if attention.indexer is None else mask,
        )
        if not context.is_split:
            out = w.einsum("bsnr,rnv->bsnv", out, "w_uv")
        return gated_output(numerics.by_row(out, x), x, w), cache
    cache = context.written(cache, {"latent": latent}, positions)
    cached = context.attended(cache, "latent", x)
    latent = latent if cached is None else cached
    if context.is_split:
        # Prefill sends latents, which are narrower than heads, and expands them after receiving.
        if context.is_decode:
            of: dict[str, Any] = {
                "q": absorbed(q),
                "keys": as_heads,
                "scores": scores,
                "project": project,
            }
            inputs = AttentionInputs(**of, mask_of=lambda _: mask)
        else:
            inputs = _split_prefill(q, mask, w, scores, step)
        out = context.attend(inputs, (latent,), k_positions)  # [B, S, N, V]
    elif context.is_decode:
        out = dot_product_attention(absorbed(q), *as_heads(latent), mask, scores)
        out = w.einsum("bsnr,rnv->bsnv", out, "w_uv")
    else:
        kv = _expanded_heads(latent, w.matrix("w_uk"), w.matrix("w_uv"))
        kernel = step.prefill_kernel
        out = kernel(q, *kv, scores) if kernel else dot_product_attention(q, *kv, mask, scores)
        # Else TPUs multiply head by head, and 128 values of a head do not fill a matrix unit.
        out = lax.optimization_barrier(out.reshape(*out.shape[:2], -1)).reshape(out.shape)
    return gated_output(numerics.by_row(out, x), x, w), cache


def _split_prefill(
    q: Array, mask: Array, w: LayerWeights, scores: AttentionScores, step: LayerStep
) -> AttentionInputs:
    """Attention to latents that cp splits, expanded where they are received; the mask covers the whole prompt."""
    w_uk, w_uv = w.matrix("w_uk"), w.matrix("w_uv")

    return AttentionInputs(
        q=q,
        keys=lambda latent: _expanded_heads(latent, w_uk, w_uv),
        mask_of=partial(step.context.of_keys, mask),
        scores=scores,
        kernel=step.prefill_kernel,
    )


def seen_positions(positions: Array, latents: Array, context: Context) -> tuple[Array, Array]:
    """The positions of the keys of a step, and the causal mask [S, T]."""
    k_positions = positions
    if context.is_decode:
        k_positions = context.cache_positions(latents.shape[-2])
    elif context.n_cached:
        k_positions = context.cache_positions(context.chunk_slots(positions.shape[0]).stop)
    every = jnp.arange(context.n_prompt) if context.splits_step else k_positions
    return k_positions, numerics.causal_mask(context.query_positions(positions), every)


def softmax_scale(attention: LatentAttention) -> float:
    """The scale of attention scores (transformers, `yarn_apply_mscale`)."""
    scale, rope = attention.qk_dim**-0.5, attention.rope
    if rope.rope_type is not RopeType.DEFAULT and rope.mscale_all_dim:
        scale *= numerics.yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _angles(attention: LatentAttention, positions: Array) -> Array | None:
    """The rotary angles of queries and keys; None without."""
    if not attention.has_rope:
        return None
    return numerics.rope_angles(attention.rope, attention.rope_dim, positions)


def _turned(x: Array, angles: Array | None, attention: LatentAttention) -> Array:
    return x if angles is None else numerics.apply_rope(x, angles, attention.rope)


def _queries(
    x: Array, w: LayerWeights, attention: LatentAttention, angles: Array | None, eps: float
) -> tuple[Array, Array | None]:
    q_latent, name = None, "wq"
    if attention.q_rank is not None:
        q_latent = w.biased(w.dot(x, "wq_a"), "bq_a")
        q_latent, name = numerics.rms_norm(q_latent, w("q_a_norm"), eps), "wq_b"
    inputs, matrix = x if q_latent is None else q_latent, w.matrix(name)
    if _is_long(inputs, matrix):  # arrays of one part are narrow, and slow to cut out of many rows
        of_nope, of_rope = jnp.split(matrix.whole(), [attention.nope_dim], axis=-1)
        nope = jnp.einsum("bsr,rnh->bsnh", inputs, of_nope)
        # Else TPUs multiply head by head, and a rotary part fills a quarter of a matrix unit.
        rope = lax.optimization_barrier(inputs @ of_rope.reshape(of_rope.shape[0], -1))
        rope = rope.reshape(*rope.shape[:2], *of_rope.shape[1:])
    else:
        q = matrix.einsum("bsr,rnh->bsnh", inputs)
        nope, rope = q[..., : attention.nope_dim], q[..., attention.nope_dim :]
    rope = _turned(rope, angles, attention)
    return jnp.concatenate([nope, rope], axis=-1), q_latent


def _is_long(x: Array, matrix: Matrix) -> bool:
    """Whether `x` has so many rows that a pass over the matrix, whose scales are in it, costs little."""
    has_whole = matrix.scale is None or matrix.block is not None or matrix.has_groups
    return has_whole and x.shape[0] * x.shape[1] > MAX_BLOCK_ROWS


def _expanded_heads(latent: Array, w_uk: Matrix, w_uv: Matrix) -> tuple[Array, Array]:
    """Keys [B, T, N, H+P] and values [B, T, N, V]."""
    rank = w_uk.values.shape[0]
    nope, rope = latent[..., :rank], latent[..., rank:]
    n_rotary = rope.shape[-1]
    if _is_long(latent, w_uk):
        # An identity in the matrix hands the rotary part to every head: one product instead of three passes.
        whole = w_uk.whole()  # [R, N, H]
        identity = jnp.eye(n_rotary, dtype=whole.dtype)[:, None]
        identity = jnp.broadcast_to(identity, (n_rotary, whole.shape[1], n_rotary))
        wide = jnp.pad(whole, ((0, 0), (0, 0), (0, n_rotary)))
        below = jnp.pad(identity, ((0, 0), (0, 0), (whole.shape[2], 0)))
        k = jnp.einsum("btr,rnh->btnh", latent, jnp.concatenate([wide, below]))
        return k, w_uv.einsum("btr,rnv->btnv", nope)
    k = w_uk.einsum("btr,rnh->btnh", nope)
    rope = jnp.broadcast_to(rope[:, :, None, :], (*k.shape[:3], n_rotary))
    v = w_uv.einsum("btr,rnv->btnv", nope)
    return jnp.concatenate([k, rope], axis=-1), v


def _index_mask(  # noqa: PLR0913, PLR0917  the inputs of the indexer
    x: Array,
    q_latent: Array | None,
    w: LayerWeights,
    cache: LayerCache,
    k_positions: Array,
    mask: Array,
    angles: Array | None,
    step: LayerStep,
) -> Attended:
    attention, context, positions = latent_of(step.model.attention), step.context, step.positions
    indexer, width = attention.indexer, attention.rope_dim
    if step.layer.attention is AttentionKind.SHARED:
        return cache.chosen, cache
    assert indexer is not None

    def rotate(heads: Array) -> Array:  # DeepSeek pairs halves here, unlike in the attention
        if angles is None:
            return heads
        pairs = indexer.is_interleaved
        rope = numerics.apply_rope(heads[..., :width], angles, attention.rope, is_interleaved=pairs)
        return jnp.concatenate([rope, heads[..., width:]], axis=-1)

    q = numerics.by_sequence(rotate(w.einsum("bsr,rnh->bsnh", q_latent, "index_wq")), positions)
    k = numerics.layer_norm(
        w.dot(x, "index_wk"), w("index_k_norm"), w("index_k_norm_bias"), LATENT_NORM_EPS
    )
    weights = numerics.by_sequence(x @ w("index_weights"), positions)
    if attention.pool is not None:
        pools = _Pools(
            attention=attention, kind=step.layer.attention, positions=positions, context=context
        )
        latest = [numerics.by_sequence(one, positions) for one in (k, w.dot(x, "index_wgate"))]
        keys, cache = pools.compressed("index", latest, w, cache)
        return pools.chosen(q, keys, weights, k_positions) & mask, cache
    head = rotate(k[:, :, None, :])
    new = {"index_k": numerics.by_sequence(head[:, :, 0], positions)}
    cache = context.written(cache, new, positions)
    k = context.attended(cache, "index_k", x)
    if k is None:
        k = (context.gathered(head) if context.splits_step else head)[:, :, 0]
    scores = numerics.index_scores(q, k, weights)
    scores = jnp.where(mask, scores, numerics.MASKED)
    chosen = context.top_k_mask(scores, indexer.top_k) & mask
    return chosen, cache if cache.chosen is None else replace(cache, chosen=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pools(EntryStep):
    """The indexer of a layer whose keys are of pools of positions (GLM-5.3)."""

    attention: LatentAttention

    @property
    def rate(self) -> int:
        """Positions of a pool."""
        assert self.attention.pool is not None
        return self.attention.pool

    def chosen(self, q: Array, keys: Array, weights: Array, k_positions: Array) -> Array:
        """The mask [B, S, T] of positions in the chosen pools, and of those after the last whole pool of each query."""
        indexer, whole = self.attention.indexer, self.whole_entries(keys)
        assert indexer is not None
        in_tail = k_positions >= (self.positions + 1)[:, None] // self.rate * self.rate  # [S, T]
        if not keys.shape[1]:
            return in_tail
        scores = jnp.where(whole, numerics.index_scores(q, keys, weights), numerics.MASKED)
        chosen = self.context.top_k_mask(scores, indexer.top_k, is_whole=True)
        if self.context.is_split and self.context.is_decode:
            return jnp.take(chosen, k_positions // self.rate, axis=-1, mode="clip") | in_tail
        missing = max(0, k_positions.shape[0] - chosen.shape[-1] * self.rate)
        spread = jnp.repeat(chosen, self.rate, axis=-1)[..., : k_positions.shape[0]]
        return jnp.pad(spread, ((0, 0), (0, 0), (0, missing))) | in_tail
