"""What commands that install an environment share: its size and time, and the question before it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from meshscope.cli.output import new_console, print_all, print_json
from meshscope.errors import SpecError
from meshscope.units import format_bytes

PythonOption = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Interpreter that makes the environment."),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before the download.")]


def print_installable(
    entries: list[dict[str, Any]], names: Mapping[str, str], note: str, *, as_json: bool
) -> None:
    """What can be installed, with its size and folder; `names` are the keys of the first columns."""
    if as_json:
        print_json(entries)
        return
    table = Table(box=None, pad_edge=False)
    for column in (*names, "Python", "Disk", "Installed in"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        missing = "beside meshscope" if entry.get("is_own") else "-"
        table.add_row(
            *(entry[key] for key in names.values()),
            f">={entry['least_python']}",
            format_bytes(entry["n_bytes"]),
            entry["folder"] or missing,
        )
    print_all(new_console(), [table, "", note])


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
