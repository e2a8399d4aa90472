"""`meshscope calibrate`: a chip's constants, measured on live devices, as a profile."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from meshscope.api.console import Shown, WorkProgress, note
from meshscope.api.options import option
from meshscope.api.request import ExperimentRequest
from meshscope.backends.calibrate.calibrate import (
    USUAL_MAX_BYTES,
    USUAL_MAX_BYTES_CPU,
    CalibrationRequest,
    measured_profile,
)
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.profile import (
    ChipProfile,
    FittedKind,
    check_place,
    profile_folder,
    save_profile,
)
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan
from meshscope.reports.model import CellValue, table
from meshscope.reports.tables import rich_table
from meshscope.serialize import to_plain
from meshscope.units import counted, format_bytes, format_dtype


def command(
    *,
    topology: str = option(ExperimentRequest),
    plan: str = option("PLAN: Mesh whose axes are measured; -1 fills.", default="tp=-1"),
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
    slice_ = parse_topology(topology)
    chip = slice_.chip
    path = out or profile_folder() / f"{chip.name}.json"
    check_place(path, force=force)
    usual_bytes = USUAL_MAX_BYTES_CPU if chip.kind is ChipKind.CPU else USUAL_MAX_BYTES
    request = CalibrationRequest(
        topology=slice_.name,
        plan=str(parse_plan(plan).filled(slice_.n_devices)),
        max_bytes=usual_bytes if max_bytes is None else max_bytes,
        budget_s=budget,
        repeats=repeats,
    )
    with WorkProgress() as progress:
        file = path.with_suffix(".points.csv")
        profile = measured_profile(request, points_file=file, progress=progress)
    save_profile(profile, path, force=force)
    note(f"wrote {path}")
    return Shown(
        lambda: {"profile": str(path), **to_plain(profile)}, lambda _: profile_text(profile)
    )


def profile_text(profile: ChipProfile) -> Iterator[RenderableType]:
    """The conditions, points, fits and rates of a profile."""
    yield Text(_conditions(profile))
    if profile.points:
        points = sorted(profile.points, key=lambda p: (p["kind"], p["axis"], p["payload_bytes"]))
        rates = ("algbw_bytes_per_s", "busbw_bytes_per_s")
        names = ("collective", "axis", "devices#", "payload_bytes", "time_s", *rates)
        keys = ("kind", "axis", "group_size", "payload_bytes", "seconds", *rates)
        timed = table(names, ([point[key] for key in keys] for point in points))
        is_memory = profile.constants.memory_bytes_per_s is not None
        rate = "bytes moved_bytes_per_s" if is_memory else "of the peak_frac"
        errors = ("median error_frac", "largest error_frac")
        names = ("fit", "devices#", "latency_s", rate, "points#", *errors)
        for one in (timed, table(names, map(_fit_cells, profile.fits))):
            yield from (Text(), rich_table(one))
    if profile.matrices or profile.memory:
        yield from (Text(), Text(_rates(profile)))


def _conditions(profile: ChipProfile) -> str:
    conditions = profile.conditions
    plan = f", plan {profile.plan}" if profile.plan else ""
    lines = [f"{profile.topology}{plan}; {profile.constants.source}"]
    if "n_cpus" in conditions:
        devices = counted(len(conditions["devices"]), "device")
        versions = ", ".join(f"{name} {text}" for name, text in conditions["versions"].items())
        cpus, seconds = counted(conditions["n_cpus"], "CPU"), f"{conditions['seconds']:.0f} s"
        lines.append(f"{devices}, {cpus}, {seconds}; {versions}")
    if conditions.get("n_left_out"):
        lines.append(f"{counted(conditions['n_left_out'], 'size')} skipped: time budget exhausted")
    return "\n".join(lines)


def _fit_cells(fit: FittedKind) -> tuple[CellValue, ...]:
    return (
        fit.kind,
        fit.group_size,
        fit.latency_s,
        1 / fit.inverse_bandwidth,
        f"{fit.n_fitted}+{fit.n_holdout}",
        fit.median_error_frac,
        fit.largest_error_frac,
    )


def _rates(profile: ChipProfile) -> str:
    lines = [
        f"matmul {rate.n} x {rate.n}, {format_dtype(rate.dtype)}: {rate.flops_per_s / 1e9:,.1f} GFLOP/s per device"
        for rate in profile.matrices
    ]
    lines += [
        f"memory, {format_bytes(rate.array_bytes)}: {format_bytes(rate.bytes_per_s)}/s per device"
        for rate in profile.memory
    ]
    lines.append("all devices at the same time")
    return "\n".join(lines)
