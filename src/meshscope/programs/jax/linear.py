"""Linear attention by the gated delta rule: a state of fixed size instead of a cache that grows.

A head decays its state, adds the correction of the value that the state predicts for the key, and reads it
by the query. Decode does so for its token. A prompt is computed in chunks (Yang et al., arXiv 2412.06464):
products within a chunk, and a loop over chunks that passes the state on.

Source: the Qwen3-Next and the Qwen3.5 of transformers.

Shapes: B batch, S positions of this step, D residual width, N key heads, V value heads, K width of a key,
H width of a value, C positions of a chunk, W positions of the convolution.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.grouped import heads
from meshscope.programs.jax.numerics import Array, unscaled_rms_norm
from meshscope.programs.jax.state import LayerCache, LayerWeights
from meshscope.spec.model.flops import LINEAR_CHUNK, linear_of
from meshscope.spec.model.model import Layer, Model

L2_EPS = 1e-6  # of transformers' l2norm


def linear_attention(  # noqa: PLR0913  the inputs of a layer's attention
    x: Array,
    w: LayerWeights,
    cache: LayerCache,
    positions: Array,  # noqa: ARG001  the state has none
    *,
    model: Model,
    layer: Layer,  # noqa: ARG001
    context: Context,
    kernel: object = None,  # noqa: ARG001
) -> tuple[Array, LayerCache]:
    """Linear attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new state."""
    linear = linear_of(model.attention)
    has_past = context.phase is Phase.DECODE or context.n_cached > 0
    q, cache = _convolved(heads(x, w, "q"), "q", w, cache, has_past=has_past)
    k, cache = _convolved(heads(x, w, "k"), "k", w, cache, has_past=has_past)
    values = (*x.shape[:2], -1, linear.value_dim)
    v, cache = _convolved(heads(x, w, "v").reshape(values), "v", w, cache, has_past=has_past)
    q, k = (jnp.repeat(_l2_normed(y), linear.group, axis=2) for y in (q, k))
    q = q * linear.key_dim**-0.5
    per_head = (*x.shape[:2], -1)
    rate = jax.nn.sigmoid(_wide(heads(x, w, "b")).reshape(per_head))
    steps = jax.nn.softplus(_wide(heads(x, w, "a")).reshape(per_head) + _wide(w("decay_bias")))
    log_decay = -jnp.exp(_wide(w("decay_log"))) * steps
    shape = (x.shape[0], v.shape[2], linear.key_dim, linear.value_dim)
    state = jnp.zeros(shape, jnp.float32)
    if has_past:
        slots = range(linear.key_dim)
        state = cache.part("state", jnp.float32, n_rows=x.shape[0], slots=slots)
    rule = delta_step if x.shape[1] == 1 else chunked_delta_rule
    out, state = rule(q, k, _wide(v), log_decay, rate, state)
    cache = _replaced(cache, "state", state)
    out = unscaled_rms_norm(out.astype(x.dtype), model.norm_eps) * w("state_norm").astype(x.dtype)
    gate = jax.nn.silu(_wide(heads(x, w, "z")).reshape(values))
    out = (out * gate).astype(x.dtype)
    return w.einsum("bsnh,nhd->bsd", out, "wo"), cache


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _replaced(cache: LayerCache, name: str, new: Array) -> LayerCache:
    """The cache with this array [B, heads, slots, width] of fixed size replaced."""
    return cache.written(name, new, at=0)


def _convolved(
    x: Array, letter: str, w: LayerWeights, cache: LayerCache, *, has_past: bool
) -> tuple[Array, LayerCache]:
    """SiLU of the causal convolution of x [B, S, heads, width], and the cache with its last inputs."""
    weight, name = w(f"conv_{letter}"), f"conv_{letter}"
    weight = weight.reshape(*x.shape[2:], -1)  # [heads, width, W]
    n_before = weight.shape[-1] - 1
    before = jnp.zeros((x.shape[0], n_before, *x.shape[2:]), x.dtype)
    if has_past:
        slots = range(n_before)
        before = cache.part(name, x.dtype, n_rows=x.shape[0], slots=slots).swapaxes(1, 2)
    inputs = jnp.concatenate([before, x], axis=1)
    n_new = x.shape[1]
    out = sum(inputs[:, at : at + n_new] * weight[..., at] for at in range(n_before + 1))
    cache = _replaced(cache, name, inputs[:, n_new:].swapaxes(1, 2))
    return jax.nn.silu(out), cache


def _l2_normed(x: Array) -> Array:
    wide = _wide(x)
    return wide * lax.rsqrt((wide * wide).sum(axis=-1, keepdims=True) + L2_EPS)


def delta_step(  # noqa: PLR0913, PLR0917  as the rule over a prompt
    q: Array, k: Array, v: Array, log_decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """One position, [B, 1, V, K], [B, 1, V, H], [B, 1, V] and the state [B, V, K, H], all float32.

    Returns the output [B, 1, V, H] and the new state.
    """
    q, k, v, log_decay, rate = (y[:, 0] for y in (q, k, v, log_decay, rate))
    state = state * jnp.exp(log_decay)[..., None, None]
    predicted = (state * k[..., None]).sum(axis=-2)
    correction = (v - predicted) * rate[..., None]
    state = state + k[..., None] * correction[..., None, :]
    return (state * q[..., None]).sum(axis=-2)[:, None], state


def chunked_delta_rule(  # noqa: PLR0913, PLR0917  three projections, two gates and the state
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    rate: Array,
    state: Array,
    *,
    chunk: int = LINEAR_CHUNK,
) -> tuple[Array, Array]:
    """As `delta_step` for S positions; `chunk` is a power of two."""
    n_positions = q.shape[1]
    missing = -n_positions % chunk
    arrays = [_chunks(y, chunk, missing) for y in (q, k, v, log_decay, rate)]

    def body(state: Array, part: Any) -> tuple[Array, Array]:
        q, k, v, log_decay, rate = part
        return _chunk(q, k, v, log_decay, rate, state)

    if n_positions <= chunk:
        state, out = body(state, [y[0] for y in arrays])
        out = out[None]
    else:
        state, out = lax.scan(body, state, arrays)
    out = jnp.moveaxis(out, 0, 1).swapaxes(2, 3)  # [B, chunks, C, V, H]
    out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out[:, :n_positions], state


def _chunks(x: Array, chunk: int, missing: int) -> Array:
    """[B, S, V, ...] -> [chunks, B, V, C, ...], zero-padded: zeros neither decay nor change the state."""
    x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0).swapaxes(2, 3)


def _chunk(  # noqa: PLR0913, PLR0917  as the rule
    q: Array, k: Array, v: Array, log_decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """The new state and the outputs [B, V, C, H] of one chunk."""
    size = q.shape[2]
    total = jnp.cumsum(log_decay, axis=-1)
    is_before = jnp.tril(jnp.ones((size, size), bool))
    between = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(is_before, between, -jnp.inf))
    learned = k * rate[..., None]
    overlap = jnp.einsum("bvck,bvek->bvce", learned, k) * decay
    inverse = unit_lower_inverse(jnp.where(is_before & ~jnp.eye(size, dtype=bool), overlap, 0.0))
    new_values = inverse @ (v * rate[..., None])
    read_keys = inverse @ (learned * jnp.exp(total)[..., None])
    corrections = new_values - read_keys @ state
    scores = jnp.einsum("bvck,bvek->bvce", q, k) * decay
    out = (q * jnp.exp(total)[..., None]) @ state + scores @ corrections
    last = total[..., -1:]
    kept = k * jnp.exp(last - total)[..., None]
    state = state * jnp.exp(last)[..., None] + jnp.einsum("bvck,bvch->bvkh", kept, corrections)
    return state, out


def unit_lower_inverse(lower: Array) -> Array:
    """The inverse of the identity plus strictly lower triangles [..., C, C]; C is a power of two.

    Inverts diagonal blocks that double in size, by products alone: compilers partition and tile those.
    """
    *lead, size, _ = lower.shape
    inverse = jnp.ones((*lead, size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        n_pairs = size // (2 * width)
        blocks = lower.reshape(*lead, n_pairs, 2 * width, n_pairs, 2 * width)
        blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ blocks[..., width:, :width] @ first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]
