"""`meshscope report`: one HTML file of one run, or of several side by side."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.report import report_path, runs_at, write_report
from meshscope.cli.options import JsonOption
from meshscope.cli.output import note, print_json
from meshscope.store.read import read_run
from meshscope.units import format_bytes


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, folders of sweeps, or patterns such as 'runs/*'.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The HTML file.",
            show_default="report.html in the run, or in the folder of the runs",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier report.")] = False,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a report for the browser, one HTML file.

    The file needs no network. It opens with the time of a request, what binds it, whether it fits, and
    what to try next. Several runs are ranked by the time of the request and compared with a baseline.
    """
    reported = runs_at(runs)
    for path in reported.skipped:
        note(f"skipped {path}: not a run")
    path = report_path(reported.folders, out)
    write_report([read_run(run) for run in reported.folders], path, force=force)
    size = path.stat().st_size
    if as_json:
        document = {"runs": list(map(str, reported.folders)), "path": str(path), "file_bytes": size}
        print_json(document)
    else:
        note(f"wrote {path} ({format_bytes(size)})")
    if is_opened:
        webbrowser.open(path.resolve().as_uri())
