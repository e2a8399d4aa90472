"""`meshscope contribute`: what a measured run would change, and the files of a pull request."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.contribute import contribution_of, write_contribution
from meshscope.api.contribution_text import contribution_text
from meshscope.cli.options import JsonOption
from meshscope.cli.output import note, print_json


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run measured on a TPU.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Clone of meshscope, or any folder; without it, nothing is written."
        ),
    ] = None,
    accept_findings: Annotated[
        bool, typer.Option("--accept-findings", help="Contribute despite faults of the capture.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run measured on a TPU, and write its accuracy entry.

    Refuses captures with faults. Prints the measured collectives and steps beside the modeled ones, and the
    constants of the chip before and after a fit. Files hold times, versions and conditions, not the command.
    """
    contribution = contribution_of(run, accept_findings=accept_findings)
    text = contribution_text(contribution)
    if out is not None:
        for path in write_contribution(contribution, text, out, force=force):
            note(f"wrote {path}")
    if as_json:
        print_json(contribution.as_dict())
        return
    typer.echo(text, nl=False)
