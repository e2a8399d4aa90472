"""Linear attention by the gated delta rule: a state of fixed size instead of a cache that grows.

A head decays its state, adds the correction of the value that the state predicts for the key, and reads it
by the query. Decode does so for its token. A prompt is computed in chunks (Yang et al., arXiv 2412.06464):
products within a chunk, and a loop over chunks that passes the state on.

Under cp, each device has a block of the prompt. Over a block, the state is mapped by state -> kept @ state +
added, with a matrix [K, K] for each head. The loop computes both parts at once: its state is [added, kept]
and starts as [0, 1]. An all-gather of them lets each device apply the maps of earlier blocks, for its
outputs, and of all blocks, for the state from which decode continues. An all-gather of the last
inputs of each block serves the convolution and its cache. Both payloads do not grow with the prompt: a device
receives 4 V K (K+H) (n-1) bytes for a sequence. Passing the state on would take n transfers one after the other;
an all-to-all from blocks to heads would grow with the prompt.

A decode step of T tokens, only the first of which is certain, applies the rule to each in turn and keeps
the state after position p in place p % T, and likewise W-1+T-1 inputs of the convolution.
The next step takes what belongs to the position before its first token, wherever the last one was accepted.

Sources: the Qwen3-Next and the Qwen3.5 of transformers; for cp, flash-linear-attention, fla/ops/cp/KCP.md
(fla-org/flash-linear-attention, pull request 691), which runs its kernel again with the state that the maps
give, where this program adds the part of the outputs that is linear in it.

Shapes: B batch, S positions of this step, D residual width, N key heads, V value heads, K width of a key,
H width of a value, C positions of a chunk, W positions of the convolution; n devices of cp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshscope.model.mechanisms.kimi_delta import CHANNEL_CHUNK, kimi_delta_of
from meshscope.model.mechanisms.linear import LINEAR_CHUNK, LinearAttention, linear_of
from meshscope.programs.jax.context_parallel import Context, LayerStep
from meshscope.programs.jax.grouped import heads
from meshscope.programs.jax.numerics import Array, by_row, by_sequence, unscaled_rms_norm
from meshscope.programs.jax.state import Attended, LayerCache, LayerWeights

LOG_DECAY = 3  # its place in a rule
L2_EPS = 1e-6  # of transformers' l2norm


# What each position does to the state, with the logarithms of decays in place LOG_DECAY.
Rule = tuple[Array, ...]
Form = Callable[..., tuple[Array, Array]]  # outputs and the new state, from a rule and the state


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The forms of a recurrence of a state [B, V, K, H]: one position, a prompt, and a block of it that cp splits."""

    one: Form
    chunked: Form
    split: Form

    def __call__(
        self, rule: Rule, widths: tuple[int, int], cache: LayerCache, step: LayerStep
    ) -> tuple[Array, LayerCache]:
        """Outputs [B, S, V, H], and the cache with the new states of `widths` [K, H]."""
        context, (first, last) = step.context, span_of(step)
        n_rows, n_positions, n_heads = rule[LOG_DECAY].shape[:3]
        state = jnp.zeros((n_rows, n_heads, *widths), jnp.float32)
        # The state after position p is in place p % number of the cache.
        slots, n_states = range(widths[0]), cache.n_slots("state") // widths[0]

        def at(position: Array | int) -> Array | int:
            return 0 if n_states == 1 else position % n_states * widths[0]

        if context.is_decode or context.n_cached:
            state = cache.part("state", jnp.float32, n_rows=n_rows, slots=slots, at=at(first - 1))
        if context.is_decode:
            outputs: list[Array] = []
            for token in range(n_positions):
                out, state = self.one(*(y[:, token : token + 1] for y in rule), state)
                cache = cache.written("state", state, at=at(first + token))
                outputs.append(out)
            return jnp.concatenate(outputs, axis=1), cache
        if context.splits_step:
            out, state = self.split(*rule, state, context=context)
        else:
            out, state = (self.one if n_positions == 1 else self.chunked)(*rule, state)
        return out, cache.written("state", state, at=at(last))


def span_of(step: LayerStep) -> tuple[Array | int, Array | int]:
    """The first and the last position of a step on all devices."""
    context, positions = step.context, step.positions
    if context.is_decode:
        return positions[0], positions[-1]
    n_step = positions.shape[0] * (context.size if context.splits_step else 1)
    return context.n_cached, context.n_cached + n_step - 1


def linear_attention(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """Linear attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new state."""
    linear, positions = linear_of(step.model.attention_of(step.layer)), step.positions
    (q, k, v), cache = projected(x, w, cache, step, linear)
    b, a = (by_sequence(wide(heads(x, w, name)), positions) for name in "ba")
    rate = jax.nn.sigmoid(b.reshape(*v.shape[:2], -1))
    steps = jax.nn.softplus(a.reshape(*v.shape[:2], -1) + wide(w("decay_bias")))
    log_decay = -jnp.exp(wide(w("decay_log"))) * steps
    rule = (q, k, v, log_decay, rate)
    out, cache = DELTA_RULE(rule, (linear.key_dim, linear.value_dim), cache, step)
    out = unscaled_rms_norm(by_row(out, x).astype(x.dtype), step.model.norm_eps)
    out = out * w("state_norm").astype(x.dtype)
    activation = jax.nn.sigmoid if linear.has_sigmoid_gate else jax.nn.silu
    gate = activation(wide(heads(x, w, "z")).reshape(out.shape))
    return w.einsum("bsnh,nhd->bsd", (out * gate).astype(x.dtype), "wo"), cache


def kimi_delta_attention(x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep) -> Attended:
    """Kimi delta attention [B, S, D] -> [B, S, D] before the reduction over tp, and the new state.

    Source: the Kimi Linear and the GLM-5.3-Flash of transformers.
    """
    delta, positions = kimi_delta_of(step.model.attention_of(step.layer)), step.positions
    (q, k, v), cache = projected(x, w, cache, step, delta)
    if delta.is_wide:
        decays, gate = (heads(x, w, name) for name in "fg")
    else:
        decays, gate = (w.einsum("bsr,rnh->bsnh", w.dot(x, f"w{n}_a"), f"w{n}_b") for n in "fg")
    steps = by_sequence(wide(decays), positions) + wide(w("decay_bias"))
    rates, bound = jnp.exp(wide(w("decay_log")))[:, None], delta.lower_bound
    if bound is None:
        log_decay = -rates * jax.nn.softplus(steps)  # [B, S, V, K]
    else:
        log_decay = bound * jax.nn.sigmoid(rates * steps)
    rate = jax.nn.sigmoid(by_sequence(wide(w.dot(x, "wb")), positions))
    widths = (delta.key_dim, delta.value_dim)
    out, cache = DELTA_RULE((q, k, v, log_decay, rate), widths, cache, step)
    out = unscaled_rms_norm(by_row(out, x), step.model.norm_eps) * wide(w("state_norm"))
    out = (out * jax.nn.sigmoid(wide(gate))).astype(x.dtype)
    return w.einsum("bsnh,nhd->bsd", out, "wo"), cache


def projected(
    x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep, linear: LinearAttention
) -> tuple[tuple[Array, Array, Array], LayerCache]:
    """Queries, keys [B, S, V, K] and values [B, S, V, H] after the convolution, and the cache with its last inputs."""
    inputs = {name: by_sequence(heads(x, w, name), step.positions) for name in "qkv"}
    n_rows, n_positions = inputs["q"].shape[:2]
    inputs["v"] = inputs["v"].reshape(n_rows, n_positions, -1, linear.value_dim)
    before, cache = inputs_before(inputs, cache, step, n_before=linear.conv_width - 1)
    q, k, v = (convolved(y, before[name], w(f"conv_{name}")) for name, y in inputs.items())
    normed = (
        y * lax.rsqrt((y * y).sum(axis=-1, keepdims=True) + L2_EPS) for y in map(wide, (q, k))
    )
    q, k = (jnp.repeat(y, linear.group, axis=2) for y in normed)
    return (q * linear.key_dim**-0.5, k, wide(v)), cache


def wide(x: Array) -> Array:
    """`x` in float32."""
    return x.astype(jnp.float32)


def inputs_before(
    inputs: Mapping[str, Array], cache: LayerCache, step: LayerStep, *, n_before: int
) -> tuple[dict[str, Array], LayerCache]:
    """The `n_before` (W-1) inputs of each convolution before this device's, and the cache with the last ones.

    `inputs` are [B, S, heads, width] of the step. If the cache has more than `n_before`,
    position p is in slot p % number.
    """
    context, (first, last), before = step.context, span_of(step), dict[str, Array]()
    tails = _tails(inputs, n_before, context) if context.splits_step else inputs
    for part, tail in tails.items():
        name, n_rows = f"conv_{part}", tail.shape[0]
        n_slots = cache.n_slots(name)
        old = jnp.zeros((n_rows, n_before, *tail.shape[2:]), tail.dtype)
        if context.is_decode or context.n_cached:
            old = cache.part(name, tail.dtype, n_rows=n_rows, slots=range(n_slots))
            if n_slots > n_before:
                old = jnp.roll(old, (n_before - first) % n_slots, axis=2)[:, :, :n_before]
            old = old.swapaxes(1, 2)
        every = jnp.concatenate([old, tail], axis=1)
        before[part] = old
        if context.splits_step:
            start = context.rank * (tail.shape[1] // context.size)
            before[part] = lax.dynamic_slice_in_dim(every, start, n_before, axis=1)
        missing = max(0, n_slots - every.shape[1])
        kept = jnp.pad(every, ((0, 0), (missing, 0), (0, 0), (0, 0)))[:, -n_slots:].swapaxes(1, 2)
        if n_slots > n_before:
            kept = jnp.roll(kept, (last + 1) % n_slots, axis=2)
        cache = cache.written(name, kept, at=0)
    return before, cache


def _tails(inputs: Mapping[str, Array], n_last: int, context: Context) -> dict[str, Array]:
    """The last inputs [B, n * n_last, heads, width] of all blocks, or whole blocks if shorter, by one all-gather."""
    tails = {name: x[:, -n_last:] for name, x in inputs.items()}
    flat = [tail.reshape(*tail.shape[:2], -1) for tail in tails.values()]
    ends = np.cumsum([x.shape[-1] for x in flat])[:-1]
    parts = jnp.split(context.gathered(jnp.concatenate(flat, axis=-1)), ends, axis=-1)
    return {
        name: part.reshape(*part.shape[:2], *tail.shape[2:])
        for (name, tail), part in zip(tails.items(), parts, strict=True)
    }


def convolved(
    x: Array, before: Array, weight: Array, bias: Array | None = None, *, dilation: int = 1
) -> Array:
    """SiLU of the causal convolution of x [B, S, heads, width] after (W-1) * dilation earlier inputs."""
    weight = weight.reshape(*x.shape[2:], -1)  # [heads, width, W]
    inputs = jnp.concatenate([before, x], axis=1)
    n_new = x.shape[1]
    starts = [at * dilation for at in range(weight.shape[-1])]
    out = sum(inputs[:, at : at + n_new] * weight[..., n] for n, at in enumerate(starts))
    return jax.nn.silu(out if bias is None else out + bias.reshape(x.shape[2:]))


def delta_step(*arrays: Array) -> tuple[Array, Array]:
    """One position: queries and keys [B, 1, V, K], values [B, 1, V, H], logarithms of decays and rates [B, 1, V].

    The last array is the state [B, V, K, H]; all are float32. Returns the output and the new state.
    """
    *inputs, state = arrays
    q, k, v, log_decay, rate = (y[:, 0] for y in inputs)
    decay = jnp.exp(log_decay)[..., None]  # for each head, or for each channel of its keys
    state = state * (decay if decay.ndim == state.ndim else decay[..., None])
    predicted = (state * k[..., None]).sum(axis=-2)
    correction = (v - predicted) * rate[..., None]
    state = state + k[..., None] * correction[..., None, :]
    return (state * q[..., None]).sum(axis=-2)[:, None], state


def chunked_delta_rule(*arrays: Array, chunk: int = LINEAR_CHUNK) -> tuple[Array, Array]:
    """As `delta_step` for S positions; `chunk` is a power of two, and at most CHANNEL_CHUNK if channels have decays."""
    if arrays[LOG_DECAY].ndim == arrays[0].ndim:
        return in_chunks(_channel_chunk, *arrays, chunk=min(chunk, CHANNEL_CHUNK))
    return in_chunks(_chunk, *arrays, chunk=chunk)


def in_chunks(
    one: Callable[[Array, Any], tuple[Array, Array]], *arrays: Array, chunk: int
) -> tuple[Array, Array]:
    """Outputs [B, S, V, H] and the new state; `one` takes the state and the inputs of a chunk [B, V, C, ...]."""
    *inputs, state = arrays
    n_positions = inputs[0].shape[1]
    parts = [chunks(y, chunk) for y in inputs]
    if n_positions <= chunk:
        state, out = one(state, [y[0] for y in parts])
        out = out[None]
    else:
        state, out = lax.scan(one, state, parts)
    out = jnp.moveaxis(out, 0, 1).swapaxes(2, 3)  # [B, chunks, C, V, H]
    out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out[:, :n_positions], state


def split_delta_rule(
    *arrays: Array, context: Context, chunk: int = LINEAR_CHUNK
) -> tuple[Array, Array]:
    """As `chunked_delta_rule` for this device's block of a prompt that cp splits; the new state is the one after all blocks."""
    *inputs, state = arrays
    k, n_values = inputs[1], inputs[2].shape[-1]
    identity = jnp.broadcast_to(jnp.eye(k.shape[-1]), (*state.shape[:-1], k.shape[-1]))
    start = jnp.concatenate([jnp.zeros_like(state), identity], axis=-1)
    out, block = chunked_delta_rule(*inputs, start, chunk=chunk)
    blocks = context.gathered(block)  # [B, n*V, K, H+K]
    blocks = blocks.reshape(block.shape[0], context.size, *block.shape[1:])
    before, rank = state, context.rank
    for number in range(context.size):
        before = jnp.where(rank == number, state, before)
        added, kept = blocks[:, number, ..., :n_values], blocks[:, number, ..., n_values:]
        state = added + jnp.matmul(kept, state, precision=lax.Precision.HIGHEST)
    read = jnp.einsum("bsvk,bvkh->bsvh", out[..., n_values:], before)
    return out[..., :n_values] + read, state


DELTA_RULE = Recurrence(delta_step, chunked_delta_rule, split_delta_rule)


def chunks(x: Array, chunk: int) -> Array:
    """[B, S, V, ...] -> [chunks, B, V, C, ...], zero-padded: zeros neither decay nor change the state."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0).swapaxes(2, 3)


def _chunk(state: Array, inputs: Any) -> tuple[Array, Array]:
    """The new state and the outputs [B, V, C, H] of one chunk."""
    q, k, v, log_decay, rate = inputs
    size = q.shape[2]
    total = jnp.cumsum(log_decay, axis=-1)
    is_before = jnp.tril(jnp.ones((size, size), bool))
    between = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(is_before, between, -jnp.inf))
    learned = k * rate[..., None]
    overlap = jnp.einsum("bvck,bvek->bvce", learned, k) * decay
    scores = jnp.einsum("bvck,bvek->bvce", q, k) * decay
    return _corrected(state, (q, k, v, learned, rate), overlap, scores, total[..., None])


def _channel_chunk(state: Array, inputs: Any) -> tuple[Array, Array]:
    """As `_chunk` if each channel of a key has a decay, which products of whole chunks cannot hold apart."""
    q, k, v, log_decay, rate = inputs
    size = q.shape[2]
    total = jnp.cumsum(log_decay, axis=-2)
    is_before = jnp.tril(jnp.ones((size, size), bool))[..., None]
    between = total[..., :, None, :] - total[..., None, :, :]  # [B, V, C, C, K]
    decayed = jnp.exp(jnp.where(is_before, between, -jnp.inf)) * k[..., None, :, :]
    learned = k * rate[..., None]
    overlap, scores = ((y[..., None, :] * decayed).sum(axis=-1) for y in (learned, q))
    return _corrected(state, (q, k, v, learned, rate), overlap, scores, total)


def _corrected(
    state: Array, inputs: tuple[Array, ...], overlap: Array, scores: Array, total: Array
) -> tuple[Array, Array]:
    """The new state and the outputs of a chunk; columns of a state beyond the values learn nothing.

    `overlap` and `scores` [B, V, C, C] are what keys and queries have in common with the keys before them, and `total`
    [B, V, C, K or 1] the logarithms of decays from the start of the chunk.
    """
    q, k, v, learned, rate = inputs
    is_earlier = jnp.tril(jnp.ones(overlap.shape[-2:], bool), -1)
    inverse = unit_lower_inverse(jnp.where(is_earlier, overlap, 0.0))
    new_values = inverse @ (v * rate[..., None])
    if n_kept := state.shape[-1] - v.shape[-1]:
        new_values = jnp.pad(new_values, ((0, 0),) * 3 + ((0, n_kept),))
    read_keys = inverse @ (learned * jnp.exp(total))
    corrections = new_values - read_keys @ state
    out = (q * jnp.exp(total)) @ state + scores @ corrections
    last = total[..., -1:, :]
    kept = k * jnp.exp(last - total)
    added = jnp.einsum("bvck,bvch->bvkh", kept, corrections)
    return state * jnp.exp(last).swapaxes(-1, -2) + added, out


def unit_lower_inverse(lower: Array) -> Array:
    """The inverse of the identity plus strictly lower triangles [..., C, C]; C is a power of two.

    Inverts diagonal blocks that double in size. Products of whole matrices with a mask fill a matrix unit;
    blocks that are cut out of the diagonal would be gathered one by one.
    """
    size = lower.shape[-1]
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for width in (2**n for n in range(size.bit_length() - 1)):
        is_pair = row // (2 * width) == column // (2 * width)
        corners = jnp.where(is_pair & (row // width > column // width), lower, 0.0)
        if width > 1:
            corners = inverse @ corners @ inverse
        inverse = inverse - corners
    return inverse
