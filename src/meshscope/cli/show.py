"""`meshscope show`: a run as text or JSON."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from meshscope.cli.options import PROFILE, JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.store.read import read_run
from meshscope.views.document import run_document
from meshscope.views.metrics import metrics_document, metrics_text
from meshscope.views.roofs import roofline_lines
from meshscope.views.text import run_text

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]

MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Every metric of docs/metrics.md instead of the tables.")
]
RooflineOption = Annotated[
    bool,
    typer.Option("--roofline", help="Limiting resource of each part: compute, HBM or links."),
]


def command(
    run: RunArgument,
    *,
    metrics: MetricsOption = False,
    roofline: RooflineOption = False,
    profile: Annotated[Path | None, PROFILE] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run.

    Prints its collectives, totals, times and memory, or its metrics, or its roofline. With --json,
    --metrics adds the key `metrics` to the document.
    """
    if metrics and roofline:
        raise typer.BadParameter("give one of --metrics and --roofline")
    record = read_run(run)
    if profile is not None:
        record = import_module("meshscope.api.reprice").repriced(record, profile)
    if as_json:
        extra = {"metrics": metrics_document(record)} if metrics else {}
        print_json({**run_document(record), **extra})
        return
    console = new_console()
    if roofline:
        print_all(console, roofline_lines(record, record.manifest.experiment.chip))
        return
    text = metrics_text if metrics else run_text
    print_all(console, text(record, console))
