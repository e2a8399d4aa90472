"""`meshscope calibrate`: a chip's constants, measured on live devices or fitted to published points, as a profile."""

from pathlib import Path

from meshscope.analysis.samples import read_points
from meshscope.api.console import Shown, WorkProgress, note
from meshscope.api.options import option
from meshscope.api.request import ExperimentRequest
from meshscope.backends.calibrate.calibrate import (
    USUAL_MAX_BYTES,
    USUAL_MAX_BYTES_CPU,
    CalibrationRequest,
    measured_profile,
    published_profile,
)
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.profile import check_place, profile_folder, save_profile
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan
from meshscope.reports.calibration import profile_text
from meshscope.serialize import to_plain
from meshscope.units import counted


def command(
    *,
    topology: str = option(ExperimentRequest),
    plan: str = option("PLAN: Mesh whose axes are measured; -1 fills.", default="tp=-1"),
    points: Path | None = option(
        "CSV: Timed collectives to fit instead of measuring.", default=None
    ),
    max_bytes: int | None = option(
        "N: Largest payload.", default=None, shown="1 GiB, on CPU 16 MiB"
    ),
    budget: float = option("S: Seconds after which no further size starts.", default=600, least=1),
    repeats: int = option("N: Timings of each size.", default=5, least=1),
    out: Path | None = option(
        "FILE: File of the profile.",
        default=None,
        shown="~/.local/share/meshscope/profiles/CHIP.json",
    ),
    force: bool = option("Replace an earlier profile.", default=False),
) -> Shown:
    """Measure this machine's chip and write a profile.

    Measures collectives, matrix products and memory on the devices that JAX lists; cpu:8 makes virtual
    devices of this machine's CPU. Other commands take the profile with --profile. Bandwidths
    follow the formulas of nccl-tests.
    """
    slice_, notes = parse_topology(topology), list[str]()
    chip = slice_.chip
    path = out or profile_folder() / f"{chip.name}.json"
    check_place(path, force=force)
    axes = parse_plan(plan).filled(slice_.n_devices)
    if points is not None:
        read = read_points(points, slice_, axes.mesh)
        profile = published_profile(read, slice_, source=f"points of {points.name}")
        summary = (
            f"{points}: {counted(len(read.points), 'point')} of {chip.name}; left out: "
            f"{counted(len(read.skipped), 'row')}, of other chips: {read.n_of_other_chips}"
        )
        notes = [*read.skipped, summary]
        if len(read.points) == 1:
            notes.append("one point fixes one constant; the error of the fit is unknown")
    else:
        usual_bytes = USUAL_MAX_BYTES_CPU if chip.kind is ChipKind.CPU else USUAL_MAX_BYTES
        request = CalibrationRequest(
            topology=slice_.name,
            plan=str(axes),
            max_bytes=usual_bytes if max_bytes is None else max_bytes,
            budget_s=budget,
            repeats=repeats,
        )
        with WorkProgress() as progress:
            file = path.with_suffix(".points.csv")
            profile = measured_profile(request, points_file=file, progress=progress)
    save_profile(profile, path, force=force)
    for line in (*notes, f"wrote {path}"):
        note(line)
    return Shown(
        lambda: {"profile": str(path), **to_plain(profile)}, lambda _: profile_text(profile)
    )
