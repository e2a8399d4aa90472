"""`meshscope show`: a run, or several ranked, as text or JSON."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from meshscope.cli.options import PROFILE, FullOption, JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.reports.collectives import insertion_lines
from meshscope.reports.document import run_document
from meshscope.reports.metrics import metrics_document, metrics_text
from meshscope.reports.ranking import ranking_document, ranking_lines
from meshscope.reports.roofs import roofline_lines
from meshscope.reports.text import full_text, run_text
from meshscope.store.folder import is_run
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord

RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or a pattern 'runs/*'.")
]

MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Every metric of docs/metrics.md instead of the tables.")
]
RooflineOption = Annotated[
    bool,
    typer.Option("--roofline", help="Limiting resource of each part: compute, HBM or links."),
]


def command(  # noqa: PLR0913  the options of the command
    runs: RunsArgument,
    *,
    metrics: MetricsOption = False,
    roofline: RooflineOption = False,
    inserted: Annotated[
        bool,
        typer.Option("--inserted", help="Why the partitioner inserted each collective."),
    ] = False,
    profile: Annotated[Path | None, PROFILE] = None,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a run, or rank several.

    Prints the answer of a run and its collectives, or its metrics, or its roofline. Several runs are
    ranked, one line each, the best first. With --json, --metrics adds the key `metrics` to the document.
    """
    if metrics + roofline + inserted + full > 1:
        raise typer.BadParameter("give one of --full, --metrics, --roofline and --inserted")
    folders = _folders(runs)
    if len(folders) > 1:
        if metrics or roofline or inserted or full or profile is not None:
            raise typer.BadParameter(
                "--full, --metrics, --roofline, --inserted and --profile take one run"
            )
        _show_several(folders, as_json=as_json)
        return
    record = read_run(folders[0])
    if profile is not None:
        record = import_module("meshscope.api.reprice").repriced(record, profile)
    if as_json:
        extra = {"metrics": metrics_document(record)} if metrics else {}
        print_json({**run_document(record), **extra})
        return
    if inserted:
        explained = import_module("meshscope.api.explain").explained(record)
        for line in insertion_lines(explained):
            typer.echo(line)
        return
    console = new_console()
    if roofline:
        print_all(console, roofline_lines(record, record.manifest.experiment.chip))
        return
    text = metrics_text if metrics else full_text if full else run_text
    print_all(console, text(record, console))


def _folders(paths: list[Path]) -> list[Path]:
    """The runs at these paths, each once; a folder of runs and a pattern stand for their runs."""
    return list(dict.fromkeys(folder for path in paths for folder in _expanded(path)))


def _expanded(path: Path) -> list[Path]:
    """The path itself unless it is a folder of runs or a pattern."""
    if is_run(path) or not (path.is_dir() or any(mark in str(path) for mark in "*?[")):
        return [path]
    return import_module("meshscope.api.database").run_folders(path)  # duckdb is slow to import


def _show_several(folders: list[Path], *, as_json: bool) -> None:
    runs: dict[str, RunRecord] = {str(folder): read_run(folder) for folder in folders}
    if as_json:
        print_json(ranking_document(runs))
    else:
        print_all(new_console(), ranking_lines(runs))
