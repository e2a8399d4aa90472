"""The delta rule of several tokens in one pass over the states: a kernel for TPUs.

XLA writes the state after each token, reads it twice for the next one, and copies it to its slot. The kernel
reads the state before the first token once and writes the states after all tokens.

Shapes: L layers of a stack, B sequences, R rows (the value heads of all sequences), T tokens of a sequence,
V value heads, K width of a key, H width of a value.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshscope.programs.jax.numerics import Array

WRITTEN_BYTES = 1 << 20  # of the states that one step of the grid writes
# Operations for each number of a state and token: the decay, two sums of products, and the update.
N_OPERATIONS = 7


def delta_tokens(
    inputs: Sequence[Array],
    states: Array,
    *,
    layer: Array | int,
    first: Array | int,
    is_interpreted: bool = False,
) -> tuple[Array, Array]:
    """Outputs [B, T, V, H] of queries, keys, values, logarithms of decays, and rates [B, T, V, ...], and states.

    The states [L, B, V, T * K, H] have that after position p in slot p % T; `first` is the first position.
    """
    q, k, v, log_decay, rate = inputs
    n_tokens, n_keys, n_values = q.shape[1], q.shape[-1], v.shape[-1]
    wide = [jnp.broadcast_to(x[..., None], v.shape) for x in (jnp.exp(log_decay), rate)]
    rows = [x.swapaxes(1, 2).reshape(-1, n_tokens, x.shape[-1]) for x in (q, k, v, *wide)]
    slots = states.reshape(states.shape[0], -1, n_tokens, n_keys, n_values)
    n_rows = slots.shape[1]
    most = max(1, WRITTEN_BYTES // (slots.dtype.itemsize * prod(slots.shape[2:])))
    n_together = max(n for n in range(1, min(most, n_rows) + 1) if n_rows % n == 0)
    scalars = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, first)])

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((n_together, n_tokens, width), lambda i, _: (i, 0, 0))

    def before(i: Any, scalars: Any) -> tuple[Any, ...]:
        return (scalars[0], i, lax.rem(scalars[1] + n_tokens - 1, n_tokens), 0, 0)

    block = (None, n_together, n_tokens, n_keys, n_values)
    call = pl.pallas_call(
        _delta_block,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n_rows // n_together,),
            in_specs=[
                *(of_rows(x.shape[-1]) for x in rows),
                pl.BlockSpec((None, n_together, None, n_keys, n_values), before),
            ],
            out_specs=[
                of_rows(n_values),
                pl.BlockSpec(block, lambda i, scalars: (scalars[0], i, 0, 0, 0)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(rows[2].shape, jnp.float32),
            pltpu.HBM(slots.shape, slots.dtype),
        ],
        input_output_aliases={1 + len(rows): 1},  # operands count from the scalars
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=_cost(rows, n_rows * n_keys * n_values, n_tokens),
        name="delta_tokens",
        interpret=is_interpreted,
    )
    if not is_interpreted:
        slots = pltpu.with_memory_space_constraint(slots, pltpu.HBM)
    out, written = call(scalars, *rows, slots)
    out = out.reshape(v.shape[0], -1, n_tokens, n_values).swapaxes(1, 2)
    return out, written.reshape(states.shape)


def _delta_block(  # noqa: PLR0913, PLR0917  the operands of the kernel
    scalars: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    rate_ref: Any,
    state_ref: Any,
    out_ref: Any,
    written_ref: Any,
) -> None:
    """The tokens of some rows, one after the other."""
    n_tokens = q_ref.shape[1]
    state = state_ref[...]
    for token in range(n_tokens):
        at = pl.ds(token, 1)
        state *= decay_ref[:, at]
        key = k_ref[:, token][..., None]
        predicted = (state * key).sum(axis=1, keepdims=True)
        correction = (v_ref[:, at] - predicted) * rate_ref[:, at]
        state += key * correction
        out_ref[:, at] = (state * q_ref[:, token][..., None]).sum(axis=1, keepdims=True)
        written_ref[:, pl.ds(lax.rem(scalars[1] + token, n_tokens), 1)] = state[:, None]


def _cost(rows: Sequence[Array], n_numbers: int, n_tokens: int) -> pl.CostEstimate:
    """Operations and bytes of `n_numbers` of states: one read, and a write for each token."""
    small = sum(x.size for x in rows) + rows[2].size
    return pl.CostEstimate(
        flops=N_OPERATIONS * n_tokens * n_numbers,
        transcendentals=0,
        bytes_accessed=4 * (small + (1 + n_tokens) * n_numbers),
    )
