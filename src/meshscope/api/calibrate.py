"""Calibrates a chip: measures live devices, or fits published points, and saves a profile."""

from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.analysis.samples import read_points
from meshscope.api.console import (
    ReportedProgress,
    WorkProgress,
    new_console,
    note,
    print_all,
    print_json,
)
from meshscope.api.options import JsonOutput, option, optional_path, request, takes
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
from meshscope.hardware.interconnect.profile import (
    ChipProfile,
    check_place,
    profile_folder,
    save_profile,
)
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan
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
    plan: str = option("PLAN: Mesh whose axes are measured; -1 fills.", default="tp=-1")
    points: Path | None = option(
        "CSV: Timed collectives to fit instead of measuring.", default=None, converter=optional_path
    )
    max_bytes: int | None = option(
        "N: Largest payload.", default=None, shown="1 GiB, on CPU 16 MiB"
    )
    budget: float = option("S: Seconds after which no further size starts.", default=600, least=1)
    repeats: int = option("N: Timings of each size.", default=5, least=1)
    out: Path | None = option(
        "FILE: File of the profile.",
        default=None,
        shown="~/.local/share/meshscope/profiles/CHIP.json",
        converter=optional_path,
    )
    force: bool = option("Replace an earlier profile.", default=False)
    progress: Progress | None = option(PROGRESS, default=None)


def calibrate_request(asked: CalibrateRequest) -> Calibration:
    """Measures collectives, matrices and memory on live devices, or reads points, and saves a profile.

    Returns:
        The profile, where it is saved, and notes.

    Raises:
        MeshscopeError: The devices are missing, the file cannot be read, or no line can be fitted.
    """
    topology = parse_topology(asked.topology)
    chip, notes = topology.chip, ()
    path = asked.out or profile_folder() / f"{chip.name}.json"
    check_place(path, force=asked.force)
    plan = parse_plan(asked.plan).filled(topology.n_devices)
    if asked.points is not None:
        read = read_points(asked.points, topology, plan.mesh)
        profile = published_profile(read, topology, source=f"points of {asked.points.name}")
        summary = (
            f"{asked.points}: {counted(len(read.points), 'point')} of {chip.name}; left out: "
            f"{counted(len(read.skipped), 'row')}, of other chips: {read.n_of_other_chips}"
        )
        notes = (*read.skipped, summary)
        if len(read.points) == 1:
            notes += ("one point fixes one constant; the error of the fit is unknown",)
    else:
        usual_bytes = USUAL_MAX_BYTES_CPU if chip.kind is ChipKind.CPU else USUAL_MAX_BYTES
        request = CalibrationRequest(
            topology=topology,
            plan=plan,
            max_bytes=usual_bytes if asked.max_bytes is None else asked.max_bytes,
            budget_s=asked.budget,
            repeats=asked.repeats,
        )
        file, report = path.with_suffix(".points.csv"), ReportedProgress(asked.progress)
        profile = measured_profile(request, points_file=file, progress=report)
    save_profile(profile, path, force=asked.force)
    return Calibration(path=path, profile=profile, notes=notes)


calibrate = takes("calibrate", CalibrateRequest, calibrate_request)


def command(asked: CalibrateRequest, output: JsonOutput) -> None:
    """Measure this machine's chip and write a profile.

    Measures collectives, matrix products and memory on the devices that JAX lists; cpu:8 makes virtual
    devices of this machine's CPU. Other commands take the profile with --profile. Bandwidths
    follow the formulas of nccl-tests.
    """
    with WorkProgress() as progress:
        calibration = calibrate_request(replace(asked, progress=progress))
    for line in (*calibration.notes, f"wrote {calibration.path}"):
        note(line)
    if output.as_json:
        print_json({"profile": str(calibration.path), **to_plain(calibration.profile)})
    else:
        print_all(new_console(), profile_text(calibration.profile))
