"""Times collectives, matrix products and launches on live devices, repeated inside one program."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.backends.calibrate.request import ProductShape
from meshscope.events.enums import Kind
from meshscope.programs.jax.build import JAX_DTYPES

ELEMENT_BYTES = 4  # float32, which every backend adds up as it is
MIN_S = 0.005  # of all repetitions; short, so that other programs seldom interfere
MIN_RATIO = 4  # of all repetitions over a single one
MAX_REPETITIONS = 1 << 14

Body = Callable[[Any], Any]


def payload_of(kind: Kind, target_bytes: int, group_size: int) -> int:
    """The largest payload up to the target that divides into the group; at least one element each."""
    step = ELEMENT_BYTES
    if kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL}:
        step *= group_size
    return max(step, target_bytes // step * step)


def timed_collective(
    mesh: Mesh, kind: Kind, axis: str, payload_bytes: int, *, repeats: int
) -> tuple[float, ...]:
    """Seconds of one collective over an axis of the mesh, measured `repeats` times."""
    n = mesh.shape[axis]
    local_bytes = payload_bytes // n if kind is Kind.ALL_GATHER else payload_bytes
    return _timed(
        mesh, collective_body(kind, axis, n), local_bytes // ELEMENT_BYTES, repeats=repeats
    )


def collective_body(kind: Kind, axis: str, n: int) -> Body:
    """The collective as a function that keeps the shape of its input, to be repeated in a loop."""

    def kept(x: Any, out: Any) -> Any:
        out = lax.optimization_barrier(out)  # the compiler must not drop the unused part
        return lax.dynamic_update_slice(x, out[: x.size], (0,))

    def body(x: Any) -> Any:
        match kind:
            case Kind.ALL_REDUCE:
                return lax.optimization_barrier(lax.psum(x, axis))
            case Kind.ALL_GATHER:
                return kept(x, lax.all_gather(x, axis, tiled=True))
            case Kind.REDUCE_SCATTER:
                return kept(x, lax.psum_scatter(x, axis, tiled=True))
            case Kind.ALL_TO_ALL:
                return lax.optimization_barrier(lax.all_to_all(x, axis, 0, 0, tiled=True))
            case Kind.PERMUTE:
                pairs = [(i, (i + 1) % n) for i in range(n)]
                return lax.optimization_barrier(lax.ppermute(x, axis, pairs))
            case _:
                raise AssertionError(kind)

    return body


def _timed(mesh: Mesh, body: Body, n_elements: int, *, repeats: int) -> tuple[float, ...]:
    """Seconds of the body, from programs with many and with one repetition."""
    every = P(mesh.axis_names)

    def repeated(start: Any, count: Any) -> Any:
        return lax.fori_loop(0, count, lambda _, x: body(x), start)

    program = jax.jit(
        jax.shard_map(repeated, mesh=mesh, in_specs=(every, P()), out_specs=every, check_vma=False)
    )
    start = jax.device_put(np.zeros(n_elements * mesh.size, np.float32), NamedSharding(mesh, every))

    return repeated_s(program, start, repeats=repeats)


def repeated_s(program: Any, start: Any, *, repeats: int) -> tuple[float, ...]:
    """Seconds of one repetition of `program(start, count)`, measured `repeats` times.

    The time of many repetitions less that of one, over their number, excludes the launch.
    """

    def wall_s(count: int) -> float:
        before = time.perf_counter()
        jax.block_until_ready(program(start, jnp.int32(count)))
        return time.perf_counter() - before

    wall_s(1)  # compiles
    many = 4
    while True:
        started_s = min(wall_s(1) for _ in range(repeats))
        walls_s = [wall_s(many) for _ in range(repeats)]
        # Long compared with the launch of a program and with noise.
        is_long = min(walls_s) >= max(MIN_S, MIN_RATIO * started_s)
        if is_long or many >= MAX_REPETITIONS:
            return tuple((wall - started_s) / (many - 1) for wall in walls_s)
        many *= 4


def timed_matrices(mesh: Mesh, n: int, dtype: str, *, repeats: int) -> float:
    """Seconds of one product of two n x n matrices on all devices at once."""

    def body(x: Any) -> Any:
        square = x.reshape(n, n).astype(dtype)
        return lax.optimization_barrier(square @ square).astype(jnp.float32).ravel()

    return min(_timed(mesh, body, n * n, repeats=repeats))


def timed_memory(mesh: Mesh, array_bytes: int, *, repeats: int) -> float:
    """Seconds to read and write an array of this size on all devices at once."""

    def body(x: Any) -> Any:
        return lax.optimization_barrier(x + jnp.float32(1))

    return min(_timed(mesh, body, array_bytes // ELEMENT_BYTES, repeats=repeats))


# The weights of one program together, several times the 50 to 60 MB of an H200's L2 cache, so that
# each product reads its weight from memory, as a model's layers do.
WEIGHT_BYTES = 1 << 28
MAX_PRODUCTS = 32
MIN_TOGETHER_S = 0.02  # of programs timed together
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
    n_runs = max(1, round(MIN_TOGETHER_S / max(wall_s(2) / 2, 1e-7)))
    walls_s = [wall_s(n_runs) for _ in range(repeats)]
    return min(walls_s) / n_runs / program.n_operations
