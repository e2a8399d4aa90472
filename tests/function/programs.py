"""Functions whose communication the tests check: each beside the edit that spoils it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

SLICE = "v6e:2x2"


def array(*dims: int, spec: P | None = None, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=spec or P())


def data_parallel(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each device has rows of x and all of w: nothing is sent."""
    return jax.nn.relu(x @ w)


REPLICATED = (array(64, 256, spec=P("dp")), array(256, 512))
# The same function with weights split to save memory: it gathers them in every step.
SPLIT = (array(64, 256, spec=P("dp")), array(256, 512, spec=P("dp")))


def mixture(x: jax.Array, route: jax.Array, w: jax.Array) -> jax.Array:
    """Rows of each group go to the devices of their experts and back: two all-to-alls.

    x [groups, tokens, D] and route [groups, tokens, experts, slots] are split by group, w [experts, D, F]
    by expert.
    """
    sent = jnp.einsum("gtd,gtec->gecd", x, route)
    sent = jax.lax.with_sharding_constraint(sent, P(None, "ep"))
    out = jax.nn.relu(jnp.einsum("gecd,edf->gecf", sent, w))
    return jax.lax.with_sharding_constraint(out, P("ep"))


def mixture_without_constraint(x: jax.Array, route: jax.Array, w: jax.Array) -> jax.Array:
    """The same without one line: the compiler gathers instead."""
    sent = jnp.einsum("gtd,gtec->gecd", x, route)
    out = jax.nn.relu(jnp.einsum("gecd,edf->gecf", sent, w))
    return jax.lax.with_sharding_constraint(out, P("ep"))


MIXTURE = (
    array(4, 64, 128, spec=P("ep")),
    array(4, 64, 8, 16, spec=P("ep")),
    array(8, 128, 256, spec=P("ep")),
)


def decode(x: jax.Array, w: jax.Array) -> jax.Array:
    """The next token of each sequence."""
    return jnp.argmax(x @ w, axis=-1)


def decode_until_all_end(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, and whether every sequence ended: one boolean, over all devices, in every step."""
    tokens = jnp.argmax(x @ w, axis=-1)
    return tokens, jnp.all(tokens == 0)


DECODE = (array(16, 256, spec=P("dp")), array(256, 512))


def logits(x: jax.Array, w: jax.Array) -> jax.Array:
    """The logits of a split vocabulary, whole on every device, in the dtype of the weights."""
    local = jax.lax.with_sharding_constraint(x @ w, P(None, "tp"))
    return jax.lax.with_sharding_constraint(local, P())


def logits_in_f32(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same, converted before they are gathered: twice the bytes."""
    product = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    local = jax.lax.with_sharding_constraint(product, P(None, "tp"))
    return jax.lax.with_sharding_constraint(local, P())


LOGITS = (array(16, 256), array(256, 4096, spec=P(None, "tp")))


def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    """Every expert multiplies its rows: 2 x experts x rows x D x F FLOPs."""
    return jnp.einsum("erd,edf->erf", x, w)


def experts_of_first_device(x: jax.Array, w: jax.Array) -> jax.Array:
    """A router that sends nothing to most experts: an eighth of the work, and shapes that look right."""
    return jnp.pad(jnp.einsum("erd,edf->erf", x[:1], w[:1]), ((0, 7), (0, 0), (0, 0)))


EXPERTS = (array(8, 64, 256), array(8, 256, 512))


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    """A contraction over a split dimension whose result is used in shards: a reduce-scatter."""
    return jax.lax.with_sharding_constraint(x @ w, P(None, "tp"))


SUMMED = (array(256, 1024, spec=P(None, "tp")), array(1024, 512, spec=P("tp")))
