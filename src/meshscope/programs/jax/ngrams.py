"""Embeddings of n-grams: hashes of the last tokens, rows of tables split over devices, and what adds them to the streams.

The hashes have the sizes and the cost of DeepSeek-V4.1's, not its constants: its classes of tokens, multipliers and
primes are not in the checkpoint. So a table has one part of equal size for each hash.

Shapes: B batch, S positions of this step, L tables, R rows that a token reads of a table, W width of a row, N streams,
D residual width.
"""

import jax
import jax.numpy as jnp
import numpy as np

from meshscope.model.mechanisms.streams import ENGRAM, Engram
from meshscope.programs.jax.numerics import Array, unscaled_rms_norm
from meshscope.programs.jax.state import LayerWeights


def hashes(engram: Engram, tokens: Array, layers: tuple[int, ...]) -> Array:
    """The rows [B, S, L, R] of the tables before `layers` that each position reads, as int32.

    `tokens` [B, n + S] are ids plus one, 0 before the start of a sequence; n is one less than the longest n-gram.
    """
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
