"""Times matrix products by shape, and the launch of a kernel, on one live device.

Kernels run back to back inside one program, as in a model step, so the time of a product includes
the gap before it.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.backends.calibrate.request import ProductShape
from meshscope.programs.jax.build import JAX_DTYPES

# The weights of one program together, several times the 50 to 60 MB of an H200's L2 cache, so that
# each product reads its weight from memory, as a model's layers do.
WEIGHT_BYTES = 1 << 28
MAX_PRODUCTS = 32
MIN_S = 0.02  # of programs timed together
N_LAUNCHES = 256
LAUNCH_ELEMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedProgram:
    """A compiled program, its arguments, and the number of timed operations in one run."""

    step: Any
    arguments: tuple[Any, ...]
    n_operations: int


def timed_product(device: Any, shape: ProductShape, *, repeats: int) -> float:
    """Seconds of one product: the least of `repeats` measurements."""
    return _least_s(_products(device, shape), repeats=repeats)


def timed_launch(device: Any, *, repeats: int) -> float:
    """Seconds from one small kernel to the next inside a program."""
    return _least_s(_launches(device), repeats=repeats)


def _products(device: Any, shape: ProductShape) -> _TimedProgram:
    activation, weight = JAX_DTYPES[shape.dtype], JAX_DTYPES[shape.weight_dtype]
    n_bytes = shape.depth * shape.columns * weight.dtype.itemsize
    n_products = max(1, min(MAX_PRODUCTS, WEIGHT_BYTES // n_bytes))
    key = jax.random.key(0)
    with jax.default_device(device):
        make = jax.jit(
            lambda index: jax.random.normal(
                jax.random.fold_in(key, index), (shape.depth, shape.columns), jnp.bfloat16
            ).astype(weight)
        )
        weights = [make(index) for index in range(n_products)]
        x = jax.random.normal(key, (shape.rows, shape.depth), jnp.bfloat16).astype(activation)

    def step(x: Any, weights: list[Any]) -> list[Any]:
        outs: list[Any] = []
        for matrix in weights:
            out = x @ matrix.astype(x.dtype)
            # The next product waits for this one and is not merged with it.
            x, out = lax.optimization_barrier((x, out))
            outs.append(out)
        return outs

    return _compiled(step, (x, weights), n_products)


def _launches(device: Any) -> _TimedProgram:
    start = jax.device_put(jnp.arange(LAUNCH_ELEMENTS, dtype=jnp.float32), device)

    def step(x: Any) -> Any:
        for _ in range(N_LAUNCHES):
            x = lax.optimization_barrier(jnp.roll(x, 1) + 1)
        return x

    return _compiled(step, (start,), N_LAUNCHES)


def _compiled(step: Any, arguments: tuple[Any, ...], n_operations: int) -> _TimedProgram:
    compiled = jax.jit(step).lower(*arguments).compile()
    return _TimedProgram(step=compiled, arguments=arguments, n_operations=n_operations)


def _least_s(program: _TimedProgram, *, repeats: int) -> float:
    """The least time of one operation; programs are queued, so none waits for the host."""

    def wall_s(n_runs: int) -> float:
        before = time.perf_counter()
        out = [program.step(*program.arguments) for _ in range(n_runs)]
        jax.block_until_ready(out[-1])
        return time.perf_counter() - before

    wall_s(1)
    n_runs = max(1, round(MIN_S / max(wall_s(2) / 2, 1e-7)))
    walls_s = [wall_s(n_runs) for _ in range(repeats)]
    return min(walls_s) / n_runs / program.n_operations
