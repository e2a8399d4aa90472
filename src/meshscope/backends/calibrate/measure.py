"""Times operations on live devices, repeated inside one program to exclude its launch."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Kind

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
