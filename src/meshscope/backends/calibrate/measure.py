"""Times one operation on live devices: repeated inside one program, so that starting it is not timed."""

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
LEAST_S = (
    0.005  # that the repetitions take together; short enough to meet no other program now and then
)
TIMES_LONGER = 4  # than one alone
MOST_REPETITIONS = 1 << 14

Body = Callable[[Any], Any]


def payload_of(kind: Kind, asked_bytes: int, group_size: int) -> int:
    """The payload nearest to the asked one that the group can share, at least an element each."""
    step = ELEMENT_BYTES
    if kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL}:
        step *= group_size
    return max(step, asked_bytes // step * step)


def timed_collective(
    mesh: Mesh, kind: Kind, axis: str, payload_bytes: int, *, repeats: int
) -> tuple[float, ...]:
    """Seconds of one collective over an axis of the mesh, measured `repeats` times."""
    n = mesh.shape[axis]
    held_bytes = payload_bytes // n if kind is Kind.ALL_GATHER else payload_bytes
    return _timed(
        mesh, collective_body(kind, axis, n), held_bytes // ELEMENT_BYTES, repeats=repeats
    )


def collective_body(kind: Kind, axis: str, n: int) -> Body:
    """Once through the collective; gives back an array like the one it took, that depends on it."""

    def kept(taken: Any, made: Any) -> Any:
        made = lax.optimization_barrier(made)  # nobody may see that only a part is used
        return lax.dynamic_update_slice(taken, made[: taken.size], (0,))

    def body(taken: Any) -> Any:
        match kind:
            case Kind.ALL_REDUCE:
                return lax.optimization_barrier(lax.psum(taken, axis))
            case Kind.ALL_GATHER:
                return kept(taken, lax.all_gather(taken, axis, tiled=True))
            case Kind.REDUCE_SCATTER:
                return kept(taken, lax.psum_scatter(taken, axis, tiled=True))
            case Kind.ALL_TO_ALL:
                return lax.optimization_barrier(lax.all_to_all(taken, axis, 0, 0, tiled=True))
            case Kind.PERMUTE:
                pairs = [(i, (i + 1) % n) for i in range(n)]
                return lax.optimization_barrier(lax.ppermute(taken, axis, pairs))
            case _:
                raise AssertionError(kind)

    return body


def _timed(mesh: Mesh, body: Body, n_elements: int, *, repeats: int) -> tuple[float, ...]:
    """Seconds of the body: the difference of many and few repetitions, over their number."""
    every = P(mesh.axis_names)

    def repeated(start: Any, count: Any) -> Any:
        return lax.fori_loop(0, count, lambda _, taken: body(taken), start)

    program = jax.jit(
        jax.shard_map(repeated, mesh=mesh, in_specs=(every, P()), out_specs=every, check_vma=False)
    )
    start = jax.device_put(np.zeros(n_elements * mesh.size, np.float32), NamedSharding(mesh, every))

    return repeated_s(program, start, repeats=repeats)


def repeated_s(program: Any, start: Any, *, repeats: int) -> tuple[float, ...]:
    """Seconds of one repetition of `program(start, count)`, measured `repeats` times.

    What many take beyond one, over their number: the start of a program is in both.
    """

    def wall_s(count: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(start, jnp.int32(count)))
        return time.perf_counter() - begun

    wall_s(1)  # compiles
    many = 4
    while True:
        started_s = min(wall_s(1) for _ in range(repeats))
        walls_s = [wall_s(many) for _ in range(repeats)]
        # Long enough beside what starting a program takes, and what else the machine does.
        is_long = min(walls_s) >= max(LEAST_S, TIMES_LONGER * started_s)
        if is_long or many >= MOST_REPETITIONS:
            return tuple((wall - started_s) / (many - 1) for wall in walls_s)
        many *= 4


def timed_matrices(mesh: Mesh, n: int, dtype: str, *, repeats: int) -> float:
    """Seconds of one product of two n x n matrices on every device at once."""

    def body(taken: Any) -> Any:
        square = taken.reshape(n, n).astype(dtype)
        return lax.optimization_barrier(square @ square).astype(jnp.float32).ravel()

    return min(_timed(mesh, body, n * n, repeats=repeats))


def timed_memory(mesh: Mesh, array_bytes: int, *, repeats: int) -> float:
    """Seconds to read and write an array of this size on every device at once."""

    def body(taken: Any) -> Any:
        return lax.optimization_barrier(taken + jnp.float32(1))

    return min(_timed(mesh, body, array_bytes // ELEMENT_BYTES, repeats=repeats))
