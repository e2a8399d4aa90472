"""Worker process that measures the devices that JAX sees.

`python -m meshscope.backends.calibrate.worker REQUEST.json OUT_DIR` writes a report or an error report.
It is a separate process because JAX reads its platform from the environment and because a crash
must not end the parent. It ends with its parent.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshscope.backends.calibrate.fit import SMALL_BYTES
from meshscope.backends.calibrate.request import REPORT, CalibrationRequest, request_from_dict
from meshscope.backends.live.worker import versions
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.interconnect.samples import KINDS
from meshscope.units import format_bytes
from meshscope.workers import end_with_parent, error_report, report_progress, reported

MATRIX_SIZES = (256, 512, 1024)  # of all chips; LARGE_MATRIX_SIZES on TPUs and GPUs only
LARGE_MATRIX_SIZES = (2048, 4096, 8192)
MEMORY_BYTES = (1 << 20, 1 << 24, 1 << 28)
CPU_MEMORY_BYTES = (1 << 20, 1 << 24)
GPU_MEMORY_BYTES = (*MEMORY_BYTES, 1 << 31)  # long compared with the host time of a loop iteration
_MEMORY_BYTES = {
    ChipKind.CPU: CPU_MEMORY_BYTES,
    ChipKind.GPU: GPU_MEMORY_BYTES,
    ChipKind.TPU: MEMORY_BYTES,
}

OTHER_WORK_S = 60.0  # reserved for matrices and memory in a long budget

T = TypeVar("T")

Work = tuple[Kind, str, int]  # kind, axis, target payload in bytes


@dataclass(slots=True, kw_only=True)
class Pace:
    """Iterates over the work until the budget is spent, and estimates the remaining time.

    The estimate applies the mean time of the latest size to all remaining pieces; larger sizes
    take longer.
    """

    work: list[Work]
    budget_s: float
    begins_s: list[float] = field(default_factory=list[float])
    began_s: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[Work]:
        """Pieces of work until the budget is spent."""
        for piece in self.work:
            if self.passed_s >= self.budget_s:
                return
            self.begins_s.append(time.monotonic())
            yield piece

    @property
    def n_begun(self) -> int:
        """Pieces that are done or in progress."""
        return len(self.begins_s)

    @property
    def passed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, at most the rest of the budget; None before the first piece is done."""
        latest = self.begins_s[-1 - self._n_per_size :]
        if len(latest) < 2:
            return None
        each_s = (latest[-1] - latest[0]) / (len(latest) - 1)
        return min(each_s * (len(self.work) - self.n_begun + 1), self.budget_s - self.passed_s)

    @property
    def _n_per_size(self) -> int:
        return len({(kind, axis) for kind, axis, _ in self.work})


@dataclass(slots=True, kw_only=True)
class Remainder:
    """The time until `end_s` on the monotonic clock, which several lists of work share in turn."""

    end_s: float
    n_left_out: int = 0

    def of(self, work: Iterable[T]) -> Iterator[T]:
        """The first piece of the work in any case, and those that begin in time; counts the others."""
        for index, piece in enumerate(work):
            if index and time.monotonic() >= self.end_s:
                self.n_left_out += 1
            else:
                yield piece


def collectives_budget_s(budget_s: float) -> float:
    """Seconds for collectives, which come first: the budget without its second half, or without a minute."""
    return budget_s - min(budget_s / 2, OTHER_WORK_S)


def set_environment(request: CalibrationRequest) -> None:
    """Sets the variables that JAX reads on import; call it before the import."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if request.topology.chip.kind is ChipKind.CPU:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={request.topology.n_devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def measure(request: CalibrationRequest) -> dict[str, Any]:
    """Measures as much as the budget allows; returns the report."""
    import jax  # after set_environment
    import numpy as np

    from meshscope.backends.live.devices import device_record, live_devices  # imports JAX

    pace = Pace(work=list(_plan_of_work(request)), budget_s=collectives_budget_s(request.budget_s))
    devices = live_devices(request.topology)
    mesh_axes = request.plan.mesh
    mesh = jax.sharding.Mesh(np.array(devices).reshape(mesh_axes.sizes), mesh_axes.names)
    points = [_point(request, mesh, piece, pace) for piece in pace]
    rest = Remainder(end_s=pace.began_s + request.budget_s)
    figures = {**_of_one_device(request, mesh, rest), **_kernels(request, devices[0], rest)}
    return {
        "points": points,
        "n_left_out": len(pace.work) - len(points) + rest.n_left_out,
        **figures,
        "seconds": pace.passed_s,
        "versions": versions(),
        "n_cpus": os.cpu_count(),
        "devices": [device_record(device) for device in devices],
    }


def _plan_of_work(request: CalibrationRequest) -> Iterator[Work]:
    """All kinds and axes of one size after another.

    A latency and a bandwidth come first, so that a short budget suffices for both: the smallest size,
    and the first whose time its bytes determine. The others follow from small to large.
    """
    large = [size for size in request.sizes if size >= SMALL_BYTES]
    for size in dict.fromkeys((request.sizes[0], *large[:1], *request.sizes)):
        for axis, n in zip(request.plan.mesh.names, request.plan.mesh.sizes, strict=True):
            for kind in KINDS if n > 1 else ():
                yield kind, axis, size


def _point(request: CalibrationRequest, mesh: Any, piece: Work, pace: Pace) -> dict[str, Any]:
    from meshscope.backends.calibrate.measure import payload_of, timed_collective

    kind, axis, target_bytes = piece
    payload_bytes = payload_of(kind, target_bytes, mesh.shape[axis])
    progress = (
        f"{kind} over {axis}, {format_bytes(payload_bytes)}, {pace.n_begun} of {len(pace.work)}"
    )
    report_progress(progress, pace.left_s)
    repeats_s = timed_collective(mesh, kind, axis, payload_bytes, repeats=request.repeats)
    return {
        "kind": kind,
        "axis": axis,
        "payload_bytes": payload_bytes,
        "seconds": min(repeats_s),  # noise only adds time
        "repeats_s": repeats_s,
    }


def _of_one_device(
    request: CalibrationRequest, mesh: Any, rest: Remainder
) -> dict[str, list[dict[str, Any]]]:
    from meshscope.backends.calibrate.measure import timed_matrices, timed_memory

    is_cpu = request.topology.chip.kind is ChipKind.CPU
    dtype = "float32" if is_cpu else "bfloat16"
    matrices: list[dict[str, Any]] = []
    for n in rest.of(MATRIX_SIZES if is_cpu else (*MATRIX_SIZES, *LARGE_MATRIX_SIZES)):
        report_progress(f"matrices of {n} x {n}")
        seconds = timed_matrices(mesh, n, dtype, repeats=request.repeats)
        matrices.append({"n": n, "dtype": dtype, "flops_per_s": 2 * n**3 / seconds})
    memory: list[dict[str, Any]] = []
    for array_bytes in rest.of(_MEMORY_BYTES[request.topology.chip.kind]):
        report_progress(f"memory, arrays of {format_bytes(array_bytes)}")
        seconds = timed_memory(mesh, array_bytes, repeats=request.repeats)
        memory.append({"array_bytes": array_bytes, "bytes_per_s": 2 * array_bytes / seconds})
    return {"matrices": matrices, "memory": memory}


def _kernels(request: CalibrationRequest, device: Any, rest: Remainder) -> dict[str, Any]:
    """Products by shape and the launch of a kernel on one device; small shapes come first."""
    from meshscope.backends.calibrate.measure import timed_launch, timed_product

    if request.topology.chip.kind is ChipKind.TPU:
        return {"products": [], "launch_s": None}
    report_progress("the launch of a kernel")
    launch_s = timed_launch(device, repeats=request.repeats)
    products: list[dict[str, Any]] = []
    for shape in rest.of(request.product_shapes):
        report_progress(f"products of {shape.rows} x {shape.depth} x {shape.columns}")
        seconds = timed_product(device, shape, repeats=request.repeats)
        figures = {"flops": shape.flops, "n_bytes": shape.n_bytes, "seconds": seconds}
        products.append({**asdict(shape), **figures})
    return {"products": products, "launch_s": launch_s}


def main(arguments: list[str]) -> int:
    """Measures; a Python exception becomes an error report."""
    request_file, out_dir = arguments
    directory = Path(out_dir)
    end_with_parent()
    request = request_from_dict(json.loads(Path(request_file).read_text(encoding="utf-8")))
    set_environment(request)
    errors = error_report(Path(request_file))
    return reported(lambda: measure(request), directory / REPORT, errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
