"""Multi-head latent attention: prefill expands the latents to heads, decode attends to them as they are.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; DeepSeek-V3.2-Exp for the lightning indexer;
both as `transformers` defines them.

Shapes: B batch, S positions of this step, T positions attended to, D residual width, N heads,
R latent rank, P rotated width, H width of a head without its rotated part, V width of a value.
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.programs.jax.context_parallel import Attending, Context
from meshscope.programs.jax.kernels import PrefillKernel
from meshscope.programs.jax.numerics import (
    MASKED,
    Array,
    attended,
    layer_norm,
    rms_norm,
    rope_angles,
    rotated,
    seen,
    yarn_mscale,
)
from meshscope.programs.jax.state import LayerCache, LayerWeights
from meshscope.spec.model.model import Indexer, LatentAttention, Layer, Model, RopeType

LATENT_NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says (transformers)


def latent_attention(  # noqa: PLR0913  the inputs of a layer's attention
    x: Array,
    w: LayerWeights,
    cache: LayerCache,
    positions: Array,
    *,
    model: Model,
    layer: Layer,  # noqa: ARG001  all layers see alike
    context: Context,
    kernel: PrefillKernel | None = None,
) -> tuple[Array, LayerCache]:
    """[B, S, D] -> [B, S, D] before the sum over heads of other devices, and the new cache.

    `kernel` attends in its way, where it is given: in prefill alone, without an indexer.
    """
    attention = model.attention
    assert isinstance(attention, LatentAttention)
    angles = rope_angles(attention.rope, attention.rope_dim, positions)
    q, q_latent = _queries(x, w, attention, angles)
    latent = _latent(x, w, attention, angles)
    cache = cache.written("latent", latent)
    k_positions = positions
    if context.phase is Phase.DECODE:
        latent = cache.read("latent", x.dtype)
        k_positions = context.cached_positions(latent.shape[1])
    is_seen = seen(positions, context.prompt_positions if context.splits_step else k_positions)
    if attention.indexer is not None:
        assert q_latent is not None
        is_seen, cache = _selected(
            x, q_latent, w, cache, is_seen, attention=attention, angles=angles, context=context
        )
    if context.is_split:
        attending = _attending(q, is_seen, w, attention, context)
        out = context.attended(attending, (latent,), k_positions)  # [B, S, N, V]
    elif context.phase is Phase.DECODE:
        out = _absorbed(q, latent, is_seen, w, attention)
    else:
        out = _expanded(q, latent, is_seen, w, attention, kernel=kernel)
    return jnp.einsum("bsnv,nvd->bsd", out, w("wo")), cache


def softmax_scale(attention: LatentAttention) -> float:
    """What scores are multiplied by (transformers, `yarn_apply_mscale`)."""
    scale, rope = attention.qk_dim**-0.5, attention.rope
    if rope.rope_type is not RopeType.DEFAULT and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _queries(
    x: Array, w: LayerWeights, attention: LatentAttention, angles: Array
) -> tuple[Array, Array | None]:
    """Queries [B, S, N, H+P], rotated in their last part, and their latent if there is one."""
    if attention.q_rank is None:
        q_latent, q = None, jnp.einsum("bsd,dnh->bsnh", x, w("wq"))
    else:
        q_latent = w.biased(x @ w("wq_a"), "bq_a")
        q_latent = rms_norm(q_latent, w("q_a_norm"), LATENT_NORM_EPS)
        q = jnp.einsum("bsr,rnh->bsnh", q_latent, w("wq_b"))
    plain, turned = q[..., : attention.nope_dim], q[..., attention.nope_dim :]
    turned = rotated(turned, angles, attention.rope)
    return jnp.concatenate([plain, turned], axis=-1), q_latent


def _latent(x: Array, w: LayerWeights, attention: LatentAttention, angles: Array) -> Array:
    """[B, S, R+P]: the normed latent and the rotated key that all heads share."""
    both = w.biased(x @ w("wkv_a"), "bkv_a")
    plain, turned = both[..., : attention.kv_rank], both[..., attention.kv_rank :]
    plain = rms_norm(plain, w("kv_a_norm"), LATENT_NORM_EPS)
    turned = rotated(turned[:, :, None, :], angles, attention.rope)[:, :, 0]
    return jnp.concatenate([plain, turned], axis=-1)


def _expanded(  # noqa: PLR0913  the inputs of attention
    q: Array,
    latent: Array,
    is_seen: Array,
    w: LayerWeights,
    attention: LatentAttention,
    *,
    kernel: PrefillKernel | None,
) -> Array:
    """Keys and values of every head made of the latents, then attention as usual."""
    k, v = _expanded_heads(latent, w("w_uk"), w("w_uv"), attention)
    scale = softmax_scale(attention)
    if kernel is not None:
        return kernel(q, k, v, scale=scale)
    return attended(q, k, v, is_seen, scale=scale)


def _expanded_heads(
    latent: Array, w_uk: Array, w_uv: Array, attention: LatentAttention
) -> tuple[Array, Array]:
    """Keys [B, T, N, H+P] and values [B, T, N, V]."""
    plain, turned = latent[..., : attention.kv_rank], latent[..., attention.kv_rank :]
    k = jnp.einsum("btr,rnh->btnh", plain, w_uk)
    turned = jnp.broadcast_to(turned[:, :, None, :], (*k.shape[:3], turned.shape[-1]))
    v = jnp.einsum("btr,rnv->btnv", plain, w_uv)
    return jnp.concatenate([k, turned], axis=-1), v


def _absorbed(
    q: Array, latent: Array, is_seen: Array, w: LayerWeights, attention: LatentAttention
) -> Array:
    """The up-projections absorbed into queries and outputs: one key and value head, the latent."""
    out = attended(
        _absorbed_queries(q, w, attention),
        latent[:, :, None, :],
        latent[:, :, None, : attention.kv_rank],
        is_seen,
        scale=softmax_scale(attention),
    )
    return jnp.einsum("bsnr,rnv->bsnv", out, w("w_uv"))


def _absorbed_queries(q: Array, w: LayerWeights, attention: LatentAttention) -> Array:
    """[B, S, N, R+P]: queries that meet latents."""
    plain, turned = q[..., : attention.nope_dim], q[..., attention.nope_dim :]
    plain = jnp.einsum("bsnh,rnh->bsnr", plain, w("w_uk"))
    return jnp.concatenate([plain, turned], axis=-1)


def _attending(
    q: Array, is_seen: Array, w: LayerWeights, attention: LatentAttention, context: Context
) -> Attending:
    """The same two ways, for latents that lie on several devices.

    Prefill sends latents, narrower than heads, and expands them where they arrive. `is_seen` is of
    all positions of the prompt in prefill, and of this device's cache in decode.
    """

    def narrowed(out: Array) -> Array:
        out = out.astype(q.dtype)
        return jnp.einsum("bsnr,rnv->bsnv", out, w("w_uv"), preferred_element_type=jnp.float32)

    scale = softmax_scale(attention)
    if context.phase is Phase.DECODE:
        return Attending(
            q=_absorbed_queries(q, w, attention),
            keys=lambda held: (held[:, :, None, :], held[:, :, None, : attention.kv_rank]),
            sight=lambda _: is_seen,
            scale=scale,
            outcome=narrowed,
        )
    w_uk, w_uv = w("w_uk"), w("w_uv")
    return Attending(
        q=q,
        keys=lambda held: _expanded_heads(held, w_uk, w_uv, attention),
        sight=lambda of: lax.dynamic_slice_in_dim(is_seen, of[0], of.shape[0], axis=-1),
        scale=scale,
    )


def _selected(  # noqa: PLR0913  the inputs of the indexer
    x: Array,
    q_latent: Array,
    w: LayerWeights,
    cache: LayerCache,
    is_seen: Array,
    *,
    attention: LatentAttention,
    angles: Array,
    context: Context,
) -> tuple[Array, LayerCache]:
    """[B, S, T]: the `top_k` of the positions in sight that the indexer scores highest."""
    indexer = attention.indexer
    assert indexer is not None

    def turn(heads: Array) -> Array:  # half-split pairs, unlike the attention itself
        width = attention.rope_dim
        turned = rotated(heads[..., :width], angles, attention.rope, is_interleaved=False)
        return jnp.concatenate([turned, heads[..., width:]], axis=-1)

    q = turn(jnp.einsum("bsr,rnh->bsnh", q_latent, w("index_wq")))
    k = layer_norm(x @ w("index_wk"), w("index_k_norm"), w("index_k_norm_bias"), LATENT_NORM_EPS)
    head = turn(k[:, :, None, :])
    cache = cache.written("index_k", head[:, :, 0])
    if context.phase is Phase.DECODE:
        k = cache.read("index_k", x.dtype)
    else:
        k = (context.gathered(head) if context.splits_step else head)[:, :, 0]
    scores = index_scores(q, k, x @ w("index_weights"), indexer)
    scores = jnp.where(is_seen, scores, MASKED)
    return context.best(scores, indexer.top_k) & is_seen, cache


def index_scores(q: Array, k: Array, weights: Array, indexer: Indexer) -> Array:
    """[B, S, T] of q [B, S, n, h], k [B, T, h], weights [B, S, n]: sum of weighted, rectified products."""
    scores = jnp.einsum("bsnh,bth->bsnt", q, k, preferred_element_type=jnp.float32)
    scores = jax.nn.relu(scores * indexer.head_dim**-0.5)
    weights = weights.astype(jnp.float32) * indexer.n_heads**-0.5
    return jnp.einsum("bsn,bsnt->bst", weights, scores)
