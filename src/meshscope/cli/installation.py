"""What commands that install an environment share: its size and time, and the question before it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshscope.errors import SpecError
from meshscope.units import format_bytes

PythonOption = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Interpreter that makes the environment."),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before the download.")]


def confirm_installation(  # noqa: PLR0913  what is asked
    label: str, folder: Path, *, n_bytes: int, seconds: int, command: str, is_confirmed: bool
) -> None:
    """States what an installation takes, and asks; SpecError without a terminal to answer at."""
    typer.echo(
        f"{label}: {format_bytes(n_bytes)} on the disk, about {seconds} s, into {folder}", err=True
    )
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        raise SpecError(f"{command} asks before it downloads. Confirm with --yes.")
    typer.confirm("Install it?", abort=True, err=True)


def report_step(step: str) -> None:
    """Prints a step of the installation."""
    typer.echo(step, err=True)
