"""`meshscope calibrate`: a profile of the chip that is here, or of published points."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshscope.backends.calibrate.calibrate import measured_profile, published_profile
from meshscope.backends.calibrate.request import (
    USUAL_MAX_BYTES,
    USUAL_MAX_BYTES_CPU,
    CalibrationRequest,
)
from meshscope.cli.options import JsonOption, TopologyOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.progress import CompileProgress
from meshscope.interconnect.profile import (
    ChipProfile,
    check_place,
    profile_folder,
    save_profile,
)
from meshscope.interconnect.samples import read_points
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology, parse_topology
from meshscope.spec.plan.plan import Plan, parse_plan
from meshscope.views.calibration import profile_text


def command(  # noqa: PLR0913  the options of the command
    *,
    topology: TopologyOption,
    plan: Annotated[
        str, typer.Option(metavar="PLAN", help="The mesh whose axes are measured; -1 fills.")
    ] = "tp=-1",
    points: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Take timed collectives from a file; measure nothing."),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(metavar="N", help="The largest payload.", show_default="1 GiB, on CPU 16 MiB"),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="S", min=1, help="Seconds after which no size is begun.")
    ] = 600,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Timings of each size.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The profile.",
            show_default="~/.local/share/meshscope/profiles/CHIP.json",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the profile of this name.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what the chip here does, into a profile.

    Collectives, matrices and memory, on live devices.
    The devices are those that JAX sees; cpu:8 are virtual ones on this machine's CPU. The profile
    is for --profile of other commands. Rates are those of nccl-tests, by its formulas.
    """
    where = parse_topology(topology)
    path = out or profile_folder() / f"{where.chip.name}.json"
    check_place(path, force=force)
    if points is not None:
        profile = _published(points, where, parse_plan(plan).filled(where.n_devices))
    else:
        is_cpu = where.chip.kind is ChipKind.CPU
        request = CalibrationRequest(
            topology=where,
            plan=parse_plan(plan).filled(where.n_devices),
            max_bytes=max_bytes or (USUAL_MAX_BYTES_CPU if is_cpu else USUAL_MAX_BYTES),
            budget_s=budget,
            repeats=repeats,
        )
        with CompileProgress() as progress:
            profile = measured_profile(
                request, points_file=path.with_suffix(".points.csv"), progress=progress
            )
    save_profile(profile, path, force=force)
    note(f"the profile is in {path}")
    if as_json:
        print_json({"profile": str(path), **asdict(profile)})
        return
    print_all(new_console(), profile_text(profile))


def _published(points: Path, topology: Topology, plan: Plan) -> ChipProfile:
    read = read_points(points, topology, plan.mesh)
    for reason in read.skipped:
        note(reason)
    note(
        f"{points}: {len(read.points)} points of {topology.chip.name}; {len(read.skipped)} rows of it are left "
        f"out, {read.n_of_other_chips} are of other chips"
    )
    return published_profile(read, topology, source=f"points of {points.name}")
