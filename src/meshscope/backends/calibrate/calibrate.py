"""Calibrates a chip: measures in a worker process, or reads points from a file, and fits a profile."""

import csv
import json
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshscope import __version__
from meshscope.backends.calibrate.fit import fit_constants, unfitted
from meshscope.backends.calibrate.request import REPORT, CalibrationRequest
from meshscope.errors import MeshscopeError, RunFailedError, SpecError
from meshscope.events.enums import Kind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.profile import ChipProfile, MatrixRate, MemoryRate, ProductTime
from meshscope.interconnect.samples import ReadPoints, TimedCollective, ring_pairs
from meshscope.plans.plan import Plan
from meshscope.programs.environments import check_can_run
from meshscope.serialize import picked
from meshscope.store.folder import scratch_folder
from meshscope.workers import (
    Progress,
    WorkerTask,
    run_worker,
)

CHILD = ("-m", "meshscope.backends.calibrate.worker")
LIVE = "devices"


def measured_profile(
    request: CalibrationRequest, *, points_file: Path, progress: Progress
) -> ChipProfile:
    """Measures on live devices and fits; `points_file` keeps the measurements even if the fit fails."""
    check_can_run()
    report = _report(request, progress)
    progress(LIVE, "done", None)
    points = [_timed(request.plan, record) for record in report["points"]]
    write_points(points, request.topology.chip.name, points_file)
    source = f"measured on {request.topology.name}, plan '{request.plan}'"
    try:
        fitted = (
            fit_constants(points, request.topology, source=source)
            if points or request.topology.n_devices > 1
            else unfitted(request.topology, source=source)
        )
    except MeshscopeError as error:
        raise SpecError(f"{error} The measured points are in {points_file}.") from None
    conditions = {
        "devices": report["devices"],
        "n_cpus": report["n_cpus"],
        "machine": platform.machine(),
        "seconds": report["seconds"],
        "n_left_out": report["n_left_out"],
        "max_bytes": request.max_bytes,
        "repeats": request.repeats,
        "versions": report["versions"],
        **_now(),
    }
    return ChipProfile(
        chip=request.topology.chip.name,
        topology=request.topology.name,
        plan=str(request.plan),
        constants=fitted.constants,
        fits=fitted.fits,
        points=tuple(map(_row, points)),
        matrices=tuple(MatrixRate(**rate) for rate in report["matrices"]),
        memory=tuple(MemoryRate(**rate) for rate in report["memory"]),
        conditions=conditions,
        products=tuple(ProductTime(**product) for product in report["products"]),
        launch_s=report["launch_s"],
    )


def published_profile(read: ReadPoints, topology: Topology, *, source: str) -> ChipProfile:
    """Fits a profile to the points of a file; matrices and memory stay unknown."""
    fitted = fit_constants(read.points, topology, source=source)
    return ChipProfile(
        chip=topology.chip.name,
        topology=topology.name,
        plan="",
        constants=fitted.constants,
        fits=fitted.fits,
        points=tuple(map(_row, read.points)),
        matrices=(),
        memory=(),
        conditions={"points": source, "n_skipped": len(read.skipped), **_now()},
    )


def _now() -> dict[str, str]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "meshscope": __version__,
        "python": platform.python_version(),
    }


def _timed(plan: Plan, record: Mapping[str, Any]) -> TimedCollective:
    kind = Kind(record["kind"])
    groups = plan.mesh.groups(record["axis"])
    return TimedCollective(
        axis=record["axis"],
        groups=ring_pairs(groups) if kind is Kind.PERMUTE else groups,
        kind=kind,
        payload_bytes=record["payload_bytes"],
        seconds=record["seconds"],
        repeats_s=tuple(record["repeats_s"]),
    )


def _row(point: TimedCollective) -> dict[str, Any]:
    figures = ("payload_bytes", "seconds", "algbw_bytes_per_s", "busbw_bytes_per_s")
    return picked(point, "axis", "kind", "group_size", *figures)


def write_points(points: Iterable[TimedCollective], chip: str, path: Path) -> None:
    """Writes the points as a CSV file for `--points`."""
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


def _report(request: CalibrationRequest, progress: Progress) -> dict[str, Any]:
    """Runs the worker; returns its report or raises its failure."""
    with scratch_folder() as folder:
        request_file = folder / "request.json"
        request_file.write_text(json.dumps(request.as_dict()), encoding="utf-8")
        arguments = (*CHILD, str(request_file), str(folder))
        run_worker(arguments, request_file, _task(request), part=LIVE, progress=progress)
        return json.loads((folder / REPORT).read_text(encoding="utf-8"))


def _task(request: CalibrationRequest) -> WorkerTask:
    topology = request.topology.name
    return WorkerTask(
        process="the worker process",
        activity=f"measuring {topology}",
        rejection=f"JAX could not measure {topology}",
        memory_remedy="Use a smaller --max-bytes.",
        crash_remedy="Try a smaller --max-bytes or another version of JAX.",
        error=RunFailedError,
    )
