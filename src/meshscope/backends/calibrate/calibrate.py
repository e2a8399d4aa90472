"""Calibrates a chip: measures in a worker process, and fits a profile."""

import csv
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from meshscope import __version__
from meshscope.analysis.samples import TimedCollective
from meshscope.backends.calibrate.fit import Fitted, fit_constants
from meshscope.errors import MeshscopeError, RunFailedError, SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.profile import ChipProfile, MatrixRate, MemoryRate
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import parse_plan
from meshscope.programs.environments import check_can_run, cpu_variables
from meshscope.serialize import from_plain, picked
from meshscope.store.folder import scratch_folder
from meshscope.workers import Progress, WorkerTask, run_worker

WORK = "meshscope.backends.calibrate.measure:measure"
LIVE = "devices"

SMALLEST_BYTES = 4
STEP = 8  # ratio of consecutive sizes
USUAL_MAX_BYTES = 1 << 30
USUAL_MAX_BYTES_CPU = 1 << 24
_REPORTED = ("devices", "n_cpus", "seconds", "n_left_out", "versions")  # conditions of a profile


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Sizes from 4 B to `max_bytes` on each axis of the plan, each measured `repeats` times; plain values for the worker.

    No measurement starts after `budget_s` seconds.
    """

    topology: str
    plan: str
    max_bytes: int
    budget_s: float
    repeats: int

    def __post_init__(self) -> None:
        """Checks that the plan fits the topology and that --max-bytes allows a payload."""
        if self.mesh.n_devices != self.slice.n_devices:
            raise SpecError(
                f"plan '{self.plan}' is for {self.mesh.n_devices} devices, but '{self.topology}' has "
                f"{self.slice.n_devices}. Use -1 to fill, as in tp=-1."
            )
        if self.max_bytes < SMALLEST_BYTES:
            raise SpecError(
                f"--max-bytes {self.max_bytes} is less than one element. Use 4 or more."
            )

    @property
    def slice(self) -> Topology:
        """The slice that is measured."""
        return parse_topology(self.topology)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return parse_plan(self.plan).mesh

    @property
    def sizes(self) -> tuple[int, ...]:
        """Target payloads in bytes: powers of STEP, and the largest."""
        powers = (SMALLEST_BYTES * STEP**power for power in count())
        return (*takewhile(lambda size: size < self.max_bytes, powers), self.max_bytes)


def measured_profile(
    request: CalibrationRequest, *, points_file: Path, progress: Progress
) -> ChipProfile:
    """Measures on live devices and fits; `points_file` keeps the measurements even if the fit fails."""
    check_can_run("calibrate")
    topology = request.slice
    is_cpu = topology.chip.kind is ChipKind.CPU
    task = WorkerTask(
        process="the worker process",
        activity=f"measuring {topology.name}",
        rejection=f"JAX could not measure {topology.name}",
        memory_remedy="Use a smaller --max-bytes.",
        crash_remedy="Try a smaller --max-bytes or another version of JAX.",
        error=RunFailedError,
    )
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    with scratch_folder() as folder:
        report = run_worker(
            WORK,
            asdict(request),
            folder,
            task,
            environment=variables | (cpu_variables(topology.n_devices) if is_cpu else {}),
            part=LIVE,
            progress=progress,
        )
    progress(LIVE, "done", None)
    points = from_plain(tuple[TimedCollective, ...], report["points"])
    write_points(points, topology.chip.name, points_file)
    source = f"measured on {topology.name}, plan '{request.plan}'"
    try:
        fit = fit_constants(points, topology, source=source)
    except MeshscopeError as error:
        raise SpecError(f"{error} The measured points are in {points_file}.") from None
    conditions = {
        **{name: report[name] for name in _REPORTED},
        "machine": platform.machine(),
        **picked(request, "max_bytes", "repeats"),
    }
    return replace(
        _profile(topology, fit, points, conditions),
        plan=request.plan,
        matrices=from_plain(tuple[MatrixRate, ...], report["matrices"]),
        memory=from_plain(tuple[MemoryRate, ...], report["memory"]),
    )


def _profile(
    topology: Topology,
    fitted: Fitted,
    points: Iterable[TimedCollective],
    conditions: Mapping[str, Any],
) -> ChipProfile:
    figures = ("payload_bytes", "seconds", "algbw_bytes_per_s", "busbw_bytes_per_s")
    return ChipProfile(
        chip=topology.chip.name,
        topology=topology.name,
        plan="",
        constants=fitted.constants,
        fits=fitted.fits,
        points=tuple(picked(p, "axis", "kind", "group_size", *figures) for p in points),
        matrices=(),
        memory=(),
        conditions={
            **conditions,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "meshscope": __version__,
            "python": platform.python_version(),
        },
    )


def write_points(points: Iterable[TimedCollective], chip: str, path: Path) -> None:
    """Writes the points as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["chip", "kind", "axis", "group_size", "payload_bytes", "seconds", "groups"]
        )
        for point in points:
            groups = ",".join("{" + ",".join(map(str, group)) + "}" for group in point.groups)
            figures = [point.group_size, point.payload_bytes, point.seconds]
            writer.writerow([chip, point.kind, point.axis, *figures, groups])
