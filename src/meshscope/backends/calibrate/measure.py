"""The work of a process that measures the devices that JAX sees.

It is separate because JAX reads its platform from the environment and because a crash must not end the
parent. Collectives and matrix products are repeated inside one program.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.analysis.samples import KINDS
from meshscope.backends.calibrate.calibrate import CalibrationRequest
from meshscope.backends.calibrate.fit import SMALL_BYTES
from meshscope.backends.live.session import live_devices
from meshscope.backends.live.worker import versions
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.plans.caches import ring_pairs
from meshscope.units import format_bytes
from meshscope.workers import report_progress

CPU_SIZES, LARGE_SIZES = (256, 512, 1024), (2048, 4096, 8192)
MATRIX_SIZES = dict.fromkeys(ChipKind, (*CPU_SIZES, *LARGE_SIZES)) | {ChipKind.CPU: CPU_SIZES}
MEMORY_BYTES = {
    ChipKind.CPU: (1 << 20, 1 << 24),
    # The largest takes long compared with the host time of a loop iteration.
    ChipKind.GPU: (1 << 20, 1 << 24, 1 << 28, 1 << 31),
    ChipKind.TPU: (1 << 20, 1 << 24, 1 << 28),
}

OTHER_WORK_S = 60.0  # reserved for matrices and memory in a long budget

T = TypeVar("T")

Work = tuple[Kind, str, int]  # kind, axis, target payload in bytes


def in_time(work: Sequence[T], end_s: float) -> Iterator[T]:
    """The first piece of the work in any case, and the pieces that begin before `end_s` on the monotonic clock."""
    return (piece for i, piece in enumerate(work) if not i or time.monotonic() < end_s)


def collectives_budget_s(budget_s: float) -> float:
    """Seconds for collectives, which come first: the budget without its second half, or without a minute."""
    return budget_s - min(budget_s / 2, OTHER_WORK_S)


def measure(document: Mapping[str, Any]) -> dict[str, Any]:
    """Measures as much as the budget of a request allows; returns the report."""
    request, began_s = CalibrationRequest(**document), time.monotonic()
    devices, axes = live_devices(request.slice), request.mesh
    mesh = Mesh(np.array(devices).reshape(axes.sizes), axes.names)
    work = list(_plan_of_work(request))
    end_s = began_s + collectives_budget_s(request.budget_s)
    points: list[dict[str, Any]] = []
    for number, (kind, axis, target_bytes) in enumerate(in_time(work, end_s), start=1):
        n = mesh.shape[axis]
        payload_bytes = payload_of(kind, target_bytes, n)
        step = f"{kind} over {axis}, {format_bytes(payload_bytes)}, {number} of {len(work)}"
        mean_s = (time.monotonic() - began_s) / len(points) if points else None
        left_s = None if mean_s is None else mean_s * (len(work) - len(points))
        report_progress(step, left_s if left_s is None else min(left_s, end_s - time.monotonic()))
        local_bytes = payload_bytes // n if kind is Kind.ALL_GATHER else payload_bytes
        body, groups = collective_body(kind, axis, n), axes.groups(axis)
        repeats_s = _timed(mesh, body, local_bytes // ELEMENT_BYTES, repeats=request.repeats)
        points.append(
            {
                "kind": kind,
                "axis": axis,
                "groups": ring_pairs(groups) if kind is Kind.PERMUTE else groups,
                "payload_bytes": payload_bytes,
                "seconds": min(repeats_s),  # noise only adds time
                "repeats_s": repeats_s,
            }
        )
    end_s, kind = began_s + request.budget_s, request.slice.chip.kind
    rates = _of_one_device(request, mesh, end_s)
    done, wanted = (points, *rates.values()), (work, MATRIX_SIZES[kind], MEMORY_BYTES[kind])
    return {
        "points": points,
        "n_left_out": sum(map(len, wanted)) - sum(map(len, done)),
        **rates,
        "seconds": time.monotonic() - began_s,
        "versions": versions(),
        "n_cpus": os.cpu_count(),
        "devices": [_device_record(device) for device in devices],
    }


def _device_record(device: Any) -> dict[str, Any]:
    coords = getattr(device, "coords", None)
    names = ("id", "device_kind", "platform", "process_index")
    fields = {name.removeprefix("device_"): getattr(device, name) for name in names}
    return {**fields, "coords": None if coords is None else list(coords)}


def _plan_of_work(request: CalibrationRequest) -> Iterator[Work]:
    """All kinds and axes of one size after another, first of the two that fix a latency and a bandwidth."""
    large = [size for size in request.sizes if size >= SMALL_BYTES]
    for size in dict.fromkeys((request.sizes[0], *large[:1], *request.sizes)):
        for axis, n in request.mesh.axes:
            for kind in KINDS if n > 1 else ():
                yield kind, axis, size


def _of_one_device(
    request: CalibrationRequest, mesh: Any, end_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Rates of products of two n x n matrices, and of reading and writing an array, on all devices at once."""
    kind = request.slice.chip.kind
    dtype = "float32" if kind is ChipKind.CPU else "bfloat16"
    matrices: list[dict[str, Any]] = []
    for n in in_time(MATRIX_SIZES[kind], end_s):
        report_progress(f"matrices of {n} x {n}")

        def product(x: Any, n: int = n) -> Any:
            square = x.reshape(n, n).astype(dtype)
            return lax.optimization_barrier(square @ square).astype(jnp.float32).ravel()

        seconds = min(_timed(mesh, product, n * n, repeats=request.repeats))
        matrices.append({"n": n, "dtype": dtype, "flops_per_s": 2 * n**3 / seconds})

    def copy(x: Any) -> Any:
        return lax.optimization_barrier(x + jnp.float32(1))

    memory: list[dict[str, Any]] = []
    for array_bytes in in_time(MEMORY_BYTES[kind], end_s):
        report_progress(f"memory, arrays of {format_bytes(array_bytes)}")
        n_elements = array_bytes // ELEMENT_BYTES
        seconds = min(_timed(mesh, copy, n_elements, repeats=request.repeats))
        memory.append({"array_bytes": array_bytes, "bytes_per_s": 2 * array_bytes / seconds})
    return {"matrices": matrices, "memory": memory}


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

    (time of many - time of one) / (many - 1), which excludes the launch.
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
