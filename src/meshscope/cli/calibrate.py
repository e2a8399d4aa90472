"""`meshscope calibrate`: a profile of the chip here, or of published points."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.calibrate import calibrate
from meshscope.cli.options import TOPOLOGY, JsonOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.progress import WorkProgress
from meshscope.reports.calibration import profile_text
from meshscope.serialize import to_plain


def command(  # noqa: PLR0913  the options of the command
    *,
    topology: Annotated[str, TOPOLOGY],
    plan: Annotated[
        str, typer.Option(metavar="PLAN", help="Mesh whose axes are measured; -1 fills.")
    ] = "tp=-1",
    points: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Timed collectives to fit instead of measuring."),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Largest payload.", show_default="1 GiB, on CPU 16 MiB"),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="S", min=1, help="Seconds after which no further size starts.")
    ] = 600,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Timings of each size.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the profile.",
            show_default="~/.local/share/meshscope/profiles/CHIP.json",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier profile.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine's chip and write a profile.

    Measures collectives, matrix products and memory on the devices that JAX lists; cpu:8 makes virtual
    devices of this machine's CPU. Other commands take the profile with --profile. Bandwidths
    follow the formulas of nccl-tests.
    """
    with WorkProgress() as progress:
        calibration = calibrate(
            topology=topology,
            plan=plan,
            points=points,
            max_bytes=max_bytes,
            budget=budget,
            repeats=repeats,
            out=out,
            force=force,
            progress=progress,
        )
    for line in calibration.notes:
        note(line)
    note(f"wrote {calibration.path}")
    if as_json:
        print_json({"profile": str(calibration.path), **to_plain(calibration.profile)})
        return
    print_all(new_console(), profile_text(calibration.profile))
