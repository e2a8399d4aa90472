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
