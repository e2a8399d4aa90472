"""`meshscope show`: a run as text or JSON."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.cli.profiles import ProfileOption
from meshscope.store.read import read_run
from meshscope.views.document import run_document
from meshscope.views.metrics import metrics_document, metrics_text
from meshscope.views.roofs import roofline_lines
from meshscope.views.text import run_text

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]

MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Every metric of docs/metrics.md, in place of the rows.")
]
RooflineOption = Annotated[
    bool,
    typer.Option(
        "--roofline", help="What binds each part: compute, memory or the wires; and by how much."
    ),
]


def command(
    run: RunArgument,
    *,
    metrics: MetricsOption = False,
    roofline: RooflineOption = False,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run.

    Its collectives, totals, times and memory; its metrics; or its roofline. With --json, --metrics
    adds the key `metrics` to the document.
    """
    if metrics and roofline:
        raise typer.BadParameter("give one of --metrics and --roofline")
    found = read_run(run)
    if profile is not None:
        found = import_module("meshscope.cli.retiming").retimed(found, profile)
    if as_json:
        extra = {"metrics": metrics_document(found)} if metrics else {}
        print_json({**run_document(found), **extra})
        return
    console = new_console()
    if roofline:
        print_all(console, roofline_lines(found, found.manifest.experiment.chip))
        return
    text = metrics_text if metrics else run_text
    print_all(console, text(found, console))
