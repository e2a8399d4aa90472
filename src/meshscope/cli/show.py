"""`meshscope show`: a run as text or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.report.document import run_document
from meshscope.report.metrics import metrics_document, metrics_text
from meshscope.report.text import run_text
from meshscope.rundir.read import read_run

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


def command(
    run: RunArgument,
    *,
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Every metric of docs/metrics.md, in place of the rows."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a run: its collectives, or its metrics.

    With --json, --metrics adds the key `metrics` to the document.
    """
    found = read_run(run)
    if as_json:
        extra = {"metrics": metrics_document(found)} if metrics else {}
        print_json({**run_document(found), **extra})
        return
    console = new_console()
    text = metrics_text if metrics else run_text
    print_all(console, text(found, console))
