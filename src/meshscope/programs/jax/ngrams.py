"""Rows of tables of n-grams, which add to the residual streams.

Hashes of the last tokens are rows of tables split over devices. Where a checkpoint does not have its constants
(DeepSeek-V4.1: its classes of tokens, multipliers and primes), the hashes have its sizes and its cost, and a table has
one part of equal size for each hash.

Shapes: B batch, S positions of this step, D residual width, N streams; L tables, R rows that a token reads of a table, W
width of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np

from meshscope.model.mechanisms.attention import narrowed
from meshscope.model.mechanisms.linear import NGramLinearAttention
from meshscope.model.mechanisms.ngrams import ENGRAM, Engram, Hashes
from meshscope.programs.jax.context_parallel import LayerStep
from meshscope.programs.jax.linear import convolved, inputs_before
from meshscope.programs.jax.numerics import Array, by_row, by_sequence, rms_norm, unscaled_rms_norm
from meshscope.programs.jax.state import LayerCache, LayerWeights

MIN_PRODUCT = 1e-6  # of transformers


def hashes(engram: Engram, tokens: Array, layers: tuple[int, ...]) -> Array:
    """The rows [B, S, L, R] of the tables before `layers` that each position reads, as int32.

    `tokens` [B, n + S] are ids plus one, 0 before the start of a sequence; n is one less than the longest n-gram.
    """
    if engram.hashes is not None:
        numbers = [engram.layers.index(layer) for layer in layers]
        tables = [_exact_hashes(engram.hashes, tokens, n, engram.n_heads) for n in numbers]
        return jnp.stack(tables, axis=2)
    n_before, n_each = engram.n_orders, [n // engram.n_read for n in engram.n_rows]
    n_positions, ids = tokens.shape[1] - n_before, tokens.astype(jnp.uint32)
    tables: list[Array] = []
    for layer in layers:
        factors, rows = multipliers(engram, layer), list[Array]()
        size = np.uint32(n_each[engram.layers.index(layer)])
        for order in range(engram.n_orders):
            for head in range(engram.n_heads):
                mixed = jnp.zeros_like(ids[:, :n_positions])
                for back in range(order + 2):
                    start = n_before - back
                    gram = ids[:, start : start + n_positions]
                    mixed ^= gram * factors[order, head, back]
                rows.append(mixed % size + np.uint32(len(rows)) * size)
        tables.append(jnp.stack(rows, axis=-1))
    return jnp.stack(tables, axis=2).astype(jnp.int32)


def multipliers(engram: Engram, layer: int) -> np.ndarray:
    """Odd multipliers of tokens, [lengths of n-grams, heads, tokens]."""
    shape = (engram.n_orders, engram.n_heads, engram.n_orders + 1)
    return np.random.default_rng(layer).integers(2**31, size=shape, dtype=np.uint32) * 2 + 1


def with_rows(streams: Array, rows: Array, w: LayerWeights, layer: int, eps: float) -> Array:
    """Adds a gated value to each stream [B, S, N, D], made of the rows [B, S, R*W] of a table."""
    name, width = f"{ENGRAM}{layer}", streams.shape[-1]
    out = w.dot(rows, f"{name}_wkv")
    out = out.reshape(*rows.shape[:2], -1, width)
    keys, value = out[:, :, :-1], out[:, :, -1:]
    normed = unscaled_rms_norm(streams, eps) * w(f"{name}_q_norm")
    keys = unscaled_rms_norm(keys, eps) * w(f"{name}_k_norm")
    products = (normed.astype(jnp.float32) * keys.astype(jnp.float32)).sum(axis=-1) * width**-0.5
    gate = jax.nn.sigmoid(jnp.sign(products) * jnp.sqrt(jnp.abs(products)))
    return streams + gate[..., None].astype(streams.dtype) * value


# Bits of a part of a 63-bit number, so that products and remainders fit into 32 bits, and the number of parts.
LIMB, N_LIMBS = 7, 9


def _exact_hashes(of: Hashes, tokens: Array, table: int, n_heads: int) -> Array:
    """The rows [B, S, R] of a table by the hashes of the checkpoint; orders of n-grams one after the other."""
    factors, n_before = of.factors[table], len(of.factors[table]) - 1
    ids = jnp.where(tokens == 0, of.end, tokens - 1)
    n_positions, has_ended = tokens.shape[1] - n_before, False
    mixed, rows, start = [jnp.uint32(0)] * N_LIMBS, list[Array](), 0
    for back, factor in enumerate(factors):
        gram = ids[:, n_before - back :][:, :n_positions]
        if back > 1:
            has_ended |= ids[:, n_before - back + 1 :][:, :n_positions] == of.end
        product = _product(jnp.where(has_ended, of.end, gram).astype(jnp.uint32), factor)
        mixed = [a ^ b for a, b in zip(mixed, product, strict=True)]
        if not back:
            continue
        primes = of.primes[table][(back - 1) * n_heads : back * n_heads]
        of_heads, rest = np.array(primes, np.uint32), jnp.uint32(0)
        for limb in reversed(mixed):
            rest = ((rest << LIMB) | limb[..., None]) % of_heads
        starts = start + np.cumsum((0, *primes[:-1]))
        rows.append(rest.astype(jnp.int32) + starts.astype(np.int32))
        start += sum(primes)
    return jnp.concatenate(rows, axis=-1)


def _product(ids: Array, factor: int) -> list[Array]:
    """The limbs of ids times a factor, the lowest first."""
    limbs, carry = list[Array](), jnp.uint32(0)
    for at in range(N_LIMBS):
        carry = carry + ids * np.uint32(factor >> (LIMB * at) & (1 << LIMB) - 1)
        limbs.append(carry & (1 << LIMB) - 1)
        carry = carry >> LIMB
    return limbs


def with_convolved_rows(
    streams: Array, rows: Array, w: LayerWeights, cache: LayerCache, step: LayerStep
) -> tuple[Array, LayerCache]:
    """Adds gated values and their convolution to each stream [B, S, N, D], and the cache with its last inputs.

    The gates and values of all positions meet over tp if it splits the residual stream: the convolution reads neighbors.
    """
    of, model = narrowed(step.model.attention_of(step.layer), NGramLinearAttention), step.model
    n, shape = of.n_streams, streams.shape

    def normed(x: Array, name: str) -> Array:
        scale = w(f"ngram_{name}_norm").reshape(n, -1)
        return rms_norm(x, scale, model.norm_eps, offset=model.norm_offset)

    keys, value = w.dot(rows, "ngram_wk").reshape(shape), w.dot(rows, "ngram_wv")
    products = (normed(keys, "k") * normed(streams, "q")).sum(axis=-1) * shape[-1] ** -0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(products), MIN_PRODUCT))
    gates = jax.nn.sigmoid(jnp.sign(products) * root)
    both = w.collectives.gather_activations(jnp.concatenate([gates, value], axis=-1))
    values = both[..., :n, None] * both[:, :, None, n:]
    inputs = {"ngram": by_sequence(normed(values, "conv"), step.positions)}
    before, cache = inputs_before(inputs, cache, step, n_before=of.n_before)
    kernel = w("ngram_conv")
    out = convolved(inputs["ngram"], before["ngram"], kernel, dilation=of.dilation)
    out = values + by_row(out, values).astype(values.dtype)
    return streams + w.collectives.split_activations(out), cache
