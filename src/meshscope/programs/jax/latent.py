"""Multi-head latent attention: prefill expands latents to heads, decode attends to the latents.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; DeepSeek-V3.2-Exp and GLM-5 for the lightning
indexer; all as `transformers` defines them.

Shapes: B batch, S query positions, T key positions, D residual width, N heads, R latent rank,
P rotary width, H width of a head without its rotary part, V width of a value.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.attention import Indexer
from meshscope.model.mechanisms.latent import LatentAttention, latent_of
from meshscope.model.model import Model
from meshscope.model.reader import RopeType
from meshscope.programs.jax.attention import (
    AttentionInputs,
    AttentionScores,
    PartialAttention,
    PrefillKernel,
    dot_product_attention,
)
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.matrix import MAX_BLOCK_ROWS, Matrix
from meshscope.programs.jax.numerics import (
    MASKED,
    Array,
    apply_rope,
    by_row,
    by_sequence,
    causal_mask,
    layer_norm,
    rms_norm,
    rope_angles,
    row_positions,
    yarn_mscale,
)
from meshscope.programs.jax.state import LayerCache, LayerWeights

LATENT_NORM_EPS = 1e-6  # for norms inside attention, instead of rms_norm_eps (transformers)


def latent_attention(  # noqa: PLR0913  the inputs of a layer's attention
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

    `kernel` is that of the phase; that of prefill has no indexer.
    """
    attention = latent_of(model.attention)
    angles = rope_angles(attention.rope, attention.rope_dim, row_positions(x, positions))
    q, q_latent = _queries(x, w, attention, angles)
    latent = by_sequence(_latent(x, w, attention, angles), positions)
    q = by_sequence(q, positions)
    k_positions, mask = seen_positions(positions, cache.arrays["latent"], context)
    if layer.attention is AttentionKind.SHARED:
        assert cache.chosen is not None
        mask = cache.chosen
    elif attention.indexer is not None:
        assert q_latent is not None
        mask, cache = _index_mask(
            x,
            q_latent,
            w,
            cache,
            mask,
            positions=positions,
            attention=attention,
            angles=angles,
            context=context,
        )
    if isinstance(kernel, DecodeKernel):
        chosen = None if attention.indexer is None else mask[:, 0]
        out, cache = _decode(
            q,
            latent,
            w,
            cache,
            positions,
            attention=attention,
            kernel=kernel,
            mask=chosen,
            context=context,
        )
        return w.einsum("bsnv,nvd->bsd", by_row(out, x), "wo"), cache
    cache = context.written(cache, {"latent": latent}, positions)
    if context.phase is Phase.DECODE:
        latent = cache.read("latent", x.dtype)
    elif context.n_cached:
        slots = context.chunk_slots(x.shape[1])
        latent = cache.part("latent", x.dtype, n_rows=x.shape[0], slots=slots)
    if context.is_split:
        inputs = replace(_split_attention(q, mask, w, attention, context), kernel=kernel)
        out = context.attend(inputs, (latent,), k_positions)  # [B, S, N, V]
    elif context.phase is Phase.DECODE:
        out = _absorbed(q, latent, mask, w, attention)
    else:
        out = _expanded(q, latent, mask, w, attention, kernel=kernel)
        # Else TPUs multiply head by head, and 128 values of a head do not fill a matrix unit.
        out = lax.optimization_barrier(out.reshape(*out.shape[:2], -1)).reshape(out.shape)
    return w.einsum("bsnv,nvd->bsd", by_row(out, x), "wo"), cache


def seen_positions(positions: Array, latents: Array, context: Context) -> tuple[Array, Array]:
    """The positions of the keys of a step, and the causal mask [S, T]."""
    k_positions = positions
    if context.phase is Phase.DECODE:
        k_positions = context.cache_positions(latents.shape[-2])
    elif context.n_cached:
        k_positions = context.cache_positions(context.chunk_slots(positions.shape[0]).stop)
    every = context.prompt_positions if context.splits_step else k_positions
    return k_positions, causal_mask(context.query_positions(positions), every)


def softmax_scale(attention: LatentAttention) -> float:
    """The scale of attention scores (transformers, `yarn_apply_mscale`)."""
    scale, rope = attention.qk_dim**-0.5, attention.rope
    if rope.rope_type is not RopeType.DEFAULT and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _queries(
    x: Array, w: LayerWeights, attention: LatentAttention, angles: Array
) -> tuple[Array, Array | None]:
    """Queries [B, S, N, H+P] with their rotary part last, and their latent, if any."""
    if attention.q_rank is None:
        q_latent, matrix = None, w.matrix("wq")
    else:
        q_latent = w.biased(w.dot(x, "wq_a"), "bq_a")
        q_latent = rms_norm(q_latent, w("q_a_norm"), LATENT_NORM_EPS)
        matrix = w.matrix("wq_b")
    inputs = x if q_latent is None else q_latent
    if _is_long(inputs, matrix):  # arrays of one part are narrow, and slow to cut out of many rows
        whole = matrix.whole()
        of_nope, of_rope = jnp.split(whole, [attention.nope_dim], axis=-1)
        nope = jnp.einsum("bsr,rnh->bsnh", inputs, of_nope)
        # Else TPUs multiply head by head, and a rotary part fills a quarter of a matrix unit.
        rope = lax.optimization_barrier(inputs @ of_rope.reshape(of_rope.shape[0], -1))
        rope = rope.reshape(*rope.shape[:2], *of_rope.shape[1:])
    else:
        q = matrix.einsum("bsr,rnh->bsnh", inputs)
        nope, rope = q[..., : attention.nope_dim], q[..., attention.nope_dim :]
    rope = apply_rope(rope, angles, attention.rope)
    return jnp.concatenate([nope, rope], axis=-1), q_latent


def _is_long(x: Array, matrix: Matrix) -> bool:
    """Whether `x` has so many rows that a pass over the matrix, whose scales are in it, costs little."""
    has_whole = matrix.scale is None or matrix.block is not None or matrix.has_groups
    return has_whole and x.shape[0] * x.shape[1] > MAX_BLOCK_ROWS


def _latent(x: Array, w: LayerWeights, attention: LatentAttention, angles: Array) -> Array:
    """The normed latent and the rotary key of all heads, [B, S, R+P]."""
    both = w.biased(w.dot(x, "wkv_a"), "bkv_a")
    latent, rope = both[..., : attention.kv_rank], both[..., attention.kv_rank :]
    latent = rms_norm(latent, w("kv_a_norm"), LATENT_NORM_EPS)
    rope = apply_rope(rope[:, :, None, :], angles, attention.rope)[:, :, 0]
    return jnp.concatenate([latent, rope], axis=-1)


def _expanded(  # noqa: PLR0913  the inputs of attention
    q: Array,
    latent: Array,
    mask: Array,
    w: LayerWeights,
    attention: LatentAttention,
    *,
    kernel: PrefillKernel | None,
) -> Array:
    k, v = _expanded_heads(latent, w.matrix("w_uk"), w.matrix("w_uv"), attention)
    scores = AttentionScores(scale=softmax_scale(attention))
    if kernel is not None:
        return kernel(q, k, v, scores)
    return dot_product_attention(q, k, v, mask, scores)


def _expanded_heads(
    latent: Array, w_uk: Matrix, w_uv: Matrix, attention: LatentAttention
) -> tuple[Array, Array]:
    """Keys [B, T, N, H+P] and values [B, T, N, V]."""
    nope, rope = latent[..., : attention.kv_rank], latent[..., attention.kv_rank :]
    if _is_long(latent, w_uk):
        # An identity in the matrix hands the rotary part to every head: one product instead of three passes.
        k = jnp.einsum("btr,rnh->btnh", latent, _with_identity(w_uk.whole(), rope.shape[-1]))
        return k, w_uv.einsum("btr,rnv->btnv", nope)
    k = w_uk.einsum("btr,rnh->btnh", nope)
    rope = jnp.broadcast_to(rope[:, :, None, :], (*k.shape[:3], rope.shape[-1]))
    v = w_uv.einsum("btr,rnv->btnv", nope)
    return jnp.concatenate([k, rope], axis=-1), v


def _with_identity(w_uk: Array, n_rotary: int) -> Array:
    """[R+P, N, H+P]: the key up-projection [R, N, H], and an identity for each head."""
    identity = jnp.eye(n_rotary, dtype=w_uk.dtype)[:, None]
    identity = jnp.broadcast_to(identity, (n_rotary, w_uk.shape[1], n_rotary))
    wide = jnp.pad(w_uk, ((0, 0), (0, 0), (0, n_rotary)))
    below = jnp.pad(identity, ((0, 0), (0, 0), (w_uk.shape[2], 0)))
    return jnp.concatenate([wide, below])


def _absorbed(
    q: Array, latent: Array, mask: Array, w: LayerWeights, attention: LatentAttention
) -> Array:
    """Attention to the latent as one KV head, with up-projections absorbed by queries and outputs."""
    out = dot_product_attention(
        _absorbed_queries(q, w, attention),
        latent[:, :, None, :],
        latent[:, :, None, : attention.kv_rank],
        mask,
        AttentionScores(scale=softmax_scale(attention)),
    )
    return w.einsum("bsnr,rnv->bsnv", out, "w_uv")


def _decode(  # noqa: PLR0913  the inputs of attention
    q: Array,
    latent: Array,
    w: LayerWeights,
    cache: LayerCache,
    positions: Array,
    *,
    attention: LatentAttention,
    kernel: DecodeKernel,
    mask: Array | None,
    context: Context,
) -> tuple[Array, LayerCache]:
    """Absorbed attention [B, S, N, V] of the positions to the cache, and the cache with them.

    `mask` [B, T] has the positions that the indexer chooses.
    """
    absorbed, new = _absorbed_queries(q, w, attention), {"latent": latent[:, None]}
    settings: dict[str, Any] = {
        "scale": softmax_scale(attention),
        "value_width": attention.kv_rank,
        "mask": mask,
    }
    if context.is_split:
        share = context.share(positions[0], None, is_chunked=False)
        out, logs, cache = kernel.part(absorbed, new, cache, share, **settings)
        part = PartialAttention.of_normalized(out, logs)
        return context.merged(part, _value_projection(q, w)).normalized(q.dtype), cache
    out, cache = kernel(absorbed, new, cache, positions, **settings)
    return w.einsum("bsnr,rnv->bsnv", out, "w_uv"), cache


def _absorbed_queries(q: Array, w: LayerWeights, attention: LatentAttention) -> Array:
    """Queries [B, S, N, R+P] for latents, with the key up-projection absorbed."""
    nope, rope = q[..., : attention.nope_dim], q[..., attention.nope_dim :]
    nope = w.einsum("bsnh,rnh->bsnr", nope, "w_uk")
    return jnp.concatenate([nope, rope], axis=-1)


def _value_projection(q: Array, w: LayerWeights) -> Callable[[Array], Array]:
    """Maps sums [B, S, N, R] over latents to [B, S, N, V] in float32."""

    def project(out: Array) -> Array:
        out = out.astype(q.dtype)
        return jnp.einsum("bsnr,rnv->bsnv", out, w("w_uv"), preferred_element_type=jnp.float32)

    return project


def _split_attention(
    q: Array, mask: Array, w: LayerWeights, attention: LatentAttention, context: Context
) -> AttentionInputs:
    """Expanded (prefill) or absorbed (decode) attention to latents that cp splits.

    Prefill sends latents, which are narrower than heads, and expands them after receiving. `mask`
    covers the whole prompt in prefill and the local cache in decode.
    """
    scores = AttentionScores(scale=softmax_scale(attention))
    if context.phase is Phase.DECODE:
        return AttentionInputs(
            q=_absorbed_queries(q, w, attention),
            keys=lambda latent: (latent[:, :, None, :], latent[:, :, None, : attention.kv_rank]),
            mask_of=lambda _: mask,
            scores=scores,
            project=_value_projection(q, w),
        )
    w_uk, w_uv = w.matrix("w_uk"), w.matrix("w_uv")
    return AttentionInputs(
        q=q,
        keys=lambda latent: _expanded_heads(latent, w_uk, w_uv, attention),
        mask_of=lambda of: (
            mask[..., of]
            if context.n_chunk is not None
            else lax.dynamic_slice_in_dim(mask, of[0], of.shape[0], axis=-1)
        ),
        scores=scores,
    )


def _index_mask(  # noqa: PLR0913  the inputs of the indexer
    x: Array,
    q_latent: Array,
    w: LayerWeights,
    cache: LayerCache,
    mask: Array,
    *,
    positions: Array,
    attention: LatentAttention,
    angles: Array,
    context: Context,
) -> tuple[Array, LayerCache]:
    """The mask [B, S, T] of the `top_k` unmasked positions by the indexer's scores."""
    indexer = attention.indexer
    assert indexer is not None

    def rotate(heads: Array) -> Array:  # DeepSeek pairs halves here, unlike in the attention
        width, pairs = attention.rope_dim, indexer.is_interleaved
        rope = apply_rope(heads[..., :width], angles, attention.rope, is_interleaved=pairs)
        return jnp.concatenate([rope, heads[..., width:]], axis=-1)

    q = rotate(w.einsum("bsr,rnh->bsnh", q_latent, "index_wq"))
    k = layer_norm(w.dot(x, "index_wk"), w("index_k_norm"), w("index_k_norm_bias"), LATENT_NORM_EPS)
    head = rotate(k[:, :, None, :])
    new = {"index_k": by_sequence(head[:, :, 0], positions)}
    cache = context.written(cache, new, positions)
    if context.phase is Phase.DECODE:
        k = cache.read("index_k", x.dtype)
    elif context.n_cached:
        slots = context.chunk_slots(x.shape[1])
        k = cache.part("index_k", x.dtype, n_rows=x.shape[0], slots=slots)
    else:
        k = (context.gathered(head) if context.splits_step else head)[:, :, 0]
    weights = by_sequence(x @ w("index_weights"), positions)
    scores = index_scores(by_sequence(q, positions), k, weights, indexer)
    scores = jnp.where(mask, scores, MASKED)
    chosen = context.top_k_mask(scores, indexer.top_k) & mask
    return chosen, cache if cache.chosen is None else replace(cache, chosen=chosen)


def index_scores(q: Array, k: Array, weights: Array, indexer: Indexer) -> Array:
    """Index scores [B, S, T] of q [B, S, n, h], k [B, T, h] and head weights [B, S, n]."""
    scores = jnp.einsum("bsnh,bth->bsnt", q, k, preferred_element_type=jnp.float32)
    scores = jax.nn.relu(scores * indexer.head_dim**-0.5)
    weights = weights.astype(jnp.float32) * indexer.n_heads**-0.5
    return jnp.einsum("bsn,bsnt->bst", weights, scores)
