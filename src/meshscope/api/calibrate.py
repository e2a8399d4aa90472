"""Calibrates a chip: measures live devices, or fits published points, and saves a profile."""

from dataclasses import dataclass
from pathlib import Path

from meshscope.api.progress import ReportedProgress
from meshscope.backends.calibrate.calibrate import measured_profile, published_profile
from meshscope.backends.calibrate.request import (
    USUAL_MAX_BYTES,
    USUAL_MAX_BYTES_CPU,
    CalibrationRequest,
)
from meshscope.errors import public, read_only
from meshscope.files import path_of
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.interconnect.profile import (
    ChipProfile,
    check_place,
    profile_folder,
    save_profile,
)
from meshscope.interconnect.samples import read_points
from meshscope.plans.plan import Plan, parse_plan
from meshscope.units import counted
from meshscope.workers import Progress


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A saved chip profile, with notes about rows of the points file that were left out."""

    path: Path
    profile: ChipProfile
    notes: tuple[str, ...] = ()


@public
def calibrate(  # noqa: PLR0913  the options of the command
    *,
    topology: str,
    plan: str = "tp=-1",
    points: str | Path | None = None,
    max_bytes: int | None = None,
    budget: float = 600,
    repeats: int = 5,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Measures collectives, matrices and memory on live devices, or reads `points`, and saves a profile.

    Args:
        topology: The devices, such as `v6e-8` or `cpu:8`.
        plan: The mesh whose axes are measured; -1 fills.
        points: A CSV file of timed collectives to fit instead of measuring.
        max_bytes: The largest payload; by default 1 GiB, on a CPU 16 MiB.
        budget: Seconds after which no further size is measured; collectives come first.
        repeats: Timings of each size.
        out: The profile; by default `profiles/CHIP.json` in the user's data folder.
        force: Replace the profile there.
        progress: Called with a part of the work, its step, and the seconds left or None.

    Raises:
        MeshscopeError: The devices are missing, the file cannot be read, or no line can be fitted.
    """
    slice_ = parse_topology(topology)
    path = path_of(out) if out else profile_folder() / f"{slice_.chip.name}.json"
    check_place(path, force=force)
    filled = parse_plan(plan).filled(slice_.n_devices)
    if points is not None:
        profile, notes = _published(path_of(points), slice_, filled)
    else:
        is_cpu = slice_.chip.kind is ChipKind.CPU
        usual_bytes = USUAL_MAX_BYTES_CPU if is_cpu else USUAL_MAX_BYTES
        request = CalibrationRequest(
            topology=slice_,
            plan=filled,
            max_bytes=usual_bytes if max_bytes is None else max_bytes,
            budget_s=budget,
            repeats=repeats,
        )
        file = path.with_suffix(".points.csv")
        report = ReportedProgress(progress)
        profile, notes = measured_profile(request, points_file=file, progress=report), ()
    save_profile(profile, path, force=force)
    return Calibration(path=path, profile=profile, notes=notes)


def _published(points: Path, topology: Topology, plan: Plan) -> tuple[ChipProfile, tuple[str, ...]]:
    read = read_points(points, topology, plan.mesh)
    summary = (
        f"{points}: {counted(len(read.points), 'point')} of {topology.chip.name}; left out: {counted(len(read.skipped), 'row')}"
        f", of other chips: {read.n_of_other_chips}"
    )
    profile = published_profile(read, topology, source=f"points of {points.name}")
    notes = (*read.skipped, summary)
    if len(read.points) == 1:
        notes += ("one point fixes one constant; the error of the fit is unknown",)
    return profile, notes
