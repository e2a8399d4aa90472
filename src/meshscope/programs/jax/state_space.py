"""State spaces by the selective recurrence of Mamba-2: a state of fixed size instead of a cache that grows.

A head decays its state and adds the product of the key and its input, which the size of its step scales, and reads the
state by the query; keys and queries are those of its group. Decode does so for its token. A prompt is computed in
chunks (Dao and Gu, arXiv 2405.21060, section 6): products within a chunk, and a loop over chunks that passes the state
on. Caches, convolution and steps of several tokens are those of linear attention (`linear.py`).

Under cp, each device has a block of the prompt. An all-gather brings what each block adds to a state of zeros, and
the sum of its logarithms of decays in one more row; each device applies them in turn, for its outputs, and for the
state from which decode continues.

Source: the Nemotron-H of transformers.

Shapes: B batch, S positions of this step, D residual width, V heads, G groups of R heads, K channels of a state, H
channels of a head, C positions of a chunk; n devices of cp.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshscope.model.mechanisms.state_space import PARTS, STATE_CHUNK, state_space_of
from meshscope.programs.jax.context_parallel import Context, LayerStep
from meshscope.programs.jax.grouped import heads
from meshscope.programs.jax.linear import Recurrence, convolved, in_chunks, inputs_before, wide
from meshscope.programs.jax.numerics import Array, by_row, by_sequence, unscaled_rms_norm
from meshscope.programs.jax.state import Attended, LayerCache, LayerWeights


def state_space(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """A state space [B, S, D] -> [B, S, D] before the reduction over tp, and the new state."""
    space = state_space_of(step.model.attention_of(step.layer))
    inputs = {name: by_sequence(heads(x, w, name), step.positions) for name in PARTS}
    before, cache = inputs_before(inputs, cache, step, n_before=space.conv_width - 1)
    values, keys, queries = (
        convolved(
            *(y, before[name], w(f"conv_{name}")),
            w(f"conv_bias_{name}") if space.has_conv_bias else None,
        )
        for name, y in inputs.items()
    )
    rates = by_sequence(wide(w.dot(x, "wdt")), step.positions)
    rates = jax.nn.softplus(rates + wide(w("decay_bias")))  # [B, S, V]
    values = wide(values)
    log_decay = -jnp.exp(wide(w("decay_log"))) * rates
    rule = (wide(queries), wide(keys), values * rates[..., None], log_decay)
    out, cache = STATES(rule, (space.state_dim, space.head_dim), cache, step)
    out = by_row(out + values * wide(w("skip"))[:, None], x)
    out = out * jax.nn.silu(wide(heads(x, w, "z")))
    grouped = (*out.shape[:2], -1, space.width // space.n_groups)
    normed = unscaled_rms_norm(out.reshape(grouped), step.model.norm_eps).astype(x.dtype)
    out = normed.reshape(out.shape) * w("state_norm").reshape(out.shape[2:])
    return w.einsum("bsnh,nhd->bsd", out, "wo"), cache


def state_step(*arrays: Array) -> tuple[Array, Array]:
    """One position: queries and keys [B, 1, G, K], inputs [B, 1, V, H] and logarithms of decays [B, 1, V].

    The last array is the state [B, V, K, H]; all are float32. Returns the output and the new state.
    """
    *inputs, state = arrays
    q, k, v, log_decay = (y[:, 0] for y in inputs)
    q, k = (jnp.repeat(y, v.shape[1] // y.shape[1], axis=1) for y in (q, k))
    state = state * jnp.exp(log_decay)[..., None, None] + k[..., None] * v[..., None, :]
    return (state * q[..., None]).sum(axis=-2)[:, None], state


def split_states(*arrays: Array, context: Context) -> tuple[Array, Array]:
    """As `chunked_states` for this device's block of a prompt that cp splits; the new state is the one after all blocks."""
    *inputs, state = arrays
    q, _, v, log_decay = inputs
    out, added = chunked_states(*inputs, jnp.zeros_like(state))
    since = jnp.cumsum(log_decay, axis=1)  # [B, S, V]
    total = jnp.broadcast_to(since[:, -1, :, None, None], (*added.shape[:2], 1, added.shape[3]))
    blocks = context.gathered(jnp.concatenate([added, total], axis=2))  # [B, n*V, K+1, H]
    blocks = blocks.reshape(added.shape[0], context.size, *added.shape[1:2], *blocks.shape[2:])
    before, rank = state, context.rank
    for number in range(context.size):
        before = jnp.where(rank == number, state, before)
        block = blocks[:, number]
        state = state * jnp.exp(block[:, :, -1:]) + block[:, :, :-1]
    q = jnp.repeat(q, v.shape[2] // q.shape[2], axis=2) * jnp.exp(since)[..., None]
    return out + jnp.einsum("bsvk,bvkh->bsvh", q, before), state


def _chunk(state: Array, inputs: Any) -> tuple[Array, Array]:
    """The new state and the outputs [B, V, C, H] of one chunk."""
    q, k, v, log_decay = inputs
    n_groups, size = q.shape[1:3]

    def by_group(y: Array) -> Array:  # [B, V, ...] -> [B, G, R, ...]
        return y.reshape(y.shape[0], n_groups, -1, *y.shape[2:])

    total = jnp.cumsum(log_decay, axis=-1)
    between = total[..., :, None] - total[..., None, :]
    is_before = jnp.tril(jnp.ones((size, size), bool))
    decay = by_group(jnp.exp(jnp.where(is_before, between, -jnp.inf)))
    scores = jnp.einsum("bgck,bgek->bgce", q, k)[:, :, None] * decay
    groups = by_group(state)
    read = jnp.einsum("bgck,bgrkh->bgrch", q, groups) * by_group(jnp.exp(total))[..., None]
    out = jnp.einsum("bgrce,bgreh->bgrch", scores, by_group(v)) + read
    last = total[..., -1:]
    kept = by_group(v * jnp.exp(last - total)[..., None])
    added = jnp.einsum("bgck,bgrch->bgrkh", k, kept)
    state = state * jnp.exp(last)[..., None] + added.reshape(state.shape)
    return state, out.reshape(v.shape)


chunked_states = partial(in_chunks, _chunk, chunk=STATE_CHUNK)
STATES = Recurrence(state_step, chunked_states, split_states)
