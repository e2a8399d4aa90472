"""Calibrates a chip: measures live devices, or fits published points, and saves a profile."""

from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.api.console import WorkProgress, new_console, note, print_all, print_json
from meshscope.api.options import JsonOption, option, optional_path, request, takes
from meshscope.api.progress import ReportedProgress
from meshscope.api.request import PROGRESS, TOPOLOGY
from meshscope.backends.calibrate.calibrate import (
    USUAL_MAX_BYTES,
    USUAL_MAX_BYTES_CPU,
    CalibrationRequest,
    measured_profile,
    published_profile,
)
from meshscope.errors import read_only
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
from meshscope.reports.calibration import profile_text
from meshscope.serialize import to_plain
from meshscope.units import counted
from meshscope.workers import Progress


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A saved chip profile, with notes about rows of the points file that were left out."""

    path: Path
    profile: ChipProfile
    notes: tuple[str, ...] = ()


@request
class CalibrateRequest:
    """The options of `calibrate`."""

    topology: str = option(TOPOLOGY)
    plan: str = option("Mesh whose axes are measured; -1 fills.", default="tp=-1", metavar="PLAN")
    points: Path | None = option(
        "Timed collectives to fit instead of measuring.",
        default=None,
        metavar="CSV",
        converter=optional_path,
    )
    max_bytes: int | None = option(
        "Largest payload.", default=None, metavar="N", shown="1 GiB, on CPU 16 MiB"
    )
    budget: float = option(
        "Seconds after which no further size starts.", default=600, metavar="S", least=1
    )
    repeats: int = option("Timings of each size.", default=5, metavar="N", least=1)
    out: Path | None = option(
        "File of the profile.",
        default=None,
        metavar="FILE",
        shown="~/.local/share/meshscope/profiles/CHIP.json",
        converter=optional_path,
    )
    force: bool = option("Replace an earlier profile.", default=False)
    progress: Progress | None = option(PROGRESS, default=None)


@takes(CalibrateRequest)
def calibrate(asked: CalibrateRequest) -> Calibration:
    """Measures collectives, matrices and memory on live devices, or reads points, and saves a profile.

    Returns:
        The profile, where it is saved, and notes.

    Raises:
        MeshscopeError: The devices are missing, the file cannot be read, or no line can be fitted.
    """
    return calibrated(asked)


def calibrated(asked: CalibrateRequest) -> Calibration:
    """The saved profile that the request asks for."""
    slice_ = parse_topology(asked.topology)
    path = asked.out or profile_folder() / f"{slice_.chip.name}.json"
    check_place(path, force=asked.force)
    filled = parse_plan(asked.plan).filled(slice_.n_devices)
    if asked.points is not None:
        profile, notes = _published(asked.points, slice_, filled)
    else:
        is_cpu = slice_.chip.kind is ChipKind.CPU
        usual_bytes = USUAL_MAX_BYTES_CPU if is_cpu else USUAL_MAX_BYTES
        request = CalibrationRequest(
            topology=slice_,
            plan=filled,
            max_bytes=usual_bytes if asked.max_bytes is None else asked.max_bytes,
            budget_s=asked.budget,
            repeats=asked.repeats,
        )
        file = path.with_suffix(".points.csv")
        report = ReportedProgress(asked.progress)
        profile, notes = measured_profile(request, points_file=file, progress=report), ()
    save_profile(profile, path, force=asked.force)
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


def command(asked: CalibrateRequest, *, as_json: JsonOption = False) -> None:
    """Measure this machine's chip and write a profile.

    Measures collectives, matrix products and memory on the devices that JAX lists; cpu:8 makes virtual
    devices of this machine's CPU. Other commands take the profile with --profile. Bandwidths
    follow the formulas of nccl-tests.
    """
    with WorkProgress() as progress:
        calibration = calibrated(replace(asked, progress=progress))
    for line in calibration.notes:
        note(line)
    note(f"wrote {calibration.path}")
    if as_json:
        print_json({"profile": str(calibration.path), **to_plain(calibration.profile)})
        return
    print_all(new_console(), profile_text(calibration.profile))
