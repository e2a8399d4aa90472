"""`meshscope report`: one HTML file of one run, or of several side by side."""

import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import note, print_json
from meshscope.errors import RunError
from meshscope.exporters.files import new_file
from meshscope.store.read import read_run
from meshscope.units import format_bytes
from meshscope.views.html.page import page_html

REPORT = "report.html"
MAX_RUNS = 24  # side by side; more are a table for `sql`


class Open(StrEnum):
    """Whether to show the report."""

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
    open_: Annotated[Open, typer.Option("--open", help="Show it in the browser.")] = Open.NO,
    as_json: JsonOption = False,
) -> None:
    """Write a report for the browser, one HTML file.

    It needs no network.
    It tells what was asked and what it costs, and draws traffic, links, timeline, sizes, roofline and
    memory. Several runs stand side by side, named A, B, ... in the order given.
    """
    path = _place(runs, out)
    text = page_html([read_run(run) for run in runs])
    with new_file(path, force=force) as partial:
        partial.write_text(text, encoding="utf-8")
    size = len(text.encode("utf-8"))
    if as_json:
        print_json({"runs": list(map(str, runs)), "path": str(path), "file_bytes": size})
    else:
        note(f"wrote {path} ({format_bytes(size)})")
    if open_ is Open.YES:
        webbrowser.open(path.resolve().as_uri())


def _place(runs: list[Path], out: Path | None) -> Path:
    if len(runs) > MAX_RUNS:
        raise RunError(
            f"{len(runs)} runs are too many for one page; at most {MAX_RUNS} stand side by side. "
            "Give fewer, or ask them with `meshscope sql`."
        )
    if out is not None:
        return out
    if len(runs) > 1:
        raise RunError(
            f"a report of {len(runs)} runs belongs to none of them. Say where with --out FILE."
        )
    return runs[0] / REPORT
