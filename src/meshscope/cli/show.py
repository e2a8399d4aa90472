"""`meshscope show`: a run as text or JSON."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.cli.profiles import ProfileOption
from meshscope.report.document import run_chip, run_document
from meshscope.report.roofs import roofline_lines
from meshscope.report.text import run_text
from meshscope.rundir.read import read_run

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


RooflineOption = Annotated[
    bool,
    typer.Option(
        "--roofline", help="What binds each part: compute, memory or the wires; and by how much."
    ),
]


def command(
    run: RunArgument,
    *,
    roofline: RooflineOption = False,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run."""
    found = read_run(run)
    if profile is not None:
        found = import_module("meshscope.cli.retiming").retimed(found, profile)
    if as_json:
        print_json(run_document(found))
        return
    console = new_console()
    if roofline:
        print_all(console, roofline_lines(found, run_chip(found)))
        return
    print_all(console, run_text(found, console))
