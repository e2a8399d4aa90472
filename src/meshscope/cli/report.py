"""`meshscope report`: one HTML file of one run, or of several side by side."""

import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.report import report_path, write_report
from meshscope.cli.options import JsonOption
from meshscope.cli.output import note, print_json
from meshscope.store.read import read_run
from meshscope.units import format_bytes


class Open(StrEnum):
    """Whether to open the report in the browser."""

    NO = "no"
    YES = "yes"


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="The file.", show_default="report.html in the only run"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier report.")] = False,
    open_: Annotated[Open, typer.Option("--open", help="Open it in the browser.")] = Open.NO,
    as_json: JsonOption = False,
) -> None:
    """Write a report for the browser, one HTML file.

    The file needs no network. It shows conditions and cost, and draws traffic, links, timeline, sizes,
    roofline and memory. Several runs are shown side by side, named A, B, ... in the given order.
    """
    path = report_path(runs, out)
    write_report([read_run(run) for run in runs], path, force=force)
    size = path.stat().st_size
    if as_json:
        print_json({"runs": list(map(str, runs)), "path": str(path), "file_bytes": size})
    else:
        note(f"wrote {path} ({format_bytes(size)})")
    if open_ is Open.YES:
        webbrowser.open(path.resolve().as_uri())
