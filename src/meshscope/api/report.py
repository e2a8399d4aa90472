"""Writes the HTML report of one run, or of several side by side."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from meshscope.api.console import Written, note
from meshscope.api.database import run_folders
from meshscope.api.options import option
from meshscope.errors import RunError
from meshscope.files import new_file
from meshscope.reports.html.page import page_html
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes

REPORT = "report.html"
MAX_RUNS = 200  # on one page


def write_report(runs: Sequence[RunRecord], out: Path | None, *, force: bool) -> Path:
    """Writes the report to `out`, by default the path of `report_path`; returns the path."""
    path = report_path([run.path for run in runs], out)
    text = page_html(list(runs))
    with new_file(path, force=force) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def report_path(runs: Sequence[Path | None], out: Path | None) -> Path:
    """`out`, or `report.html` in the only run or in the folder that holds all the runs.

    RunError for no run, too many runs, or runs in different folders without `out`.
    """
    if not runs:
        raise RunError("there is no run to report. Give the folder of a run.")
    if len(runs) > MAX_RUNS:
        raise RunError(
            f"{len(runs)} runs are too many for one page; at most {MAX_RUNS} fit. "
            "Give fewer, or query them with `meshscope sql`."
        )
    if out is not None:
        return out
    folder, *others = {run and (run if len(runs) == 1 else run.parent) for run in runs}
    if others:
        raise RunError(
            f"a report of {len(runs)} runs in different folders needs a file. Give one with --out FILE."
        )
    if folder is None:
        raise RunError("the run is in memory and has no folder for its report. Give a path.")
    return folder / REPORT


def command(
    *,
    runs: list[Path] = option(
        "RUN...: Folders of runs, folders of sweeps, or patterns such as 'runs/*'.", kw_only=False
    ),
    out: Path | None = option(
        "FILE: The HTML file.",
        default=None,
        shown="report.html in the run, or in the folder of the runs",
    ),
    force: bool = option("Replace an earlier report.", default=False),
    is_opened: bool = option("Open it in the browser.", default=False, flags=("--open",)),
) -> Written:
    """Write a report for the browser, one HTML file.

    The file needs no network. It opens with the time of a request, what binds it, whether it fits, and
    what to try next. Several runs are ranked by the time of the request and compared with a baseline.
    """
    # A file among several paths is skipped: a shell expands `sweep/*` to the summary, too.
    skipped = [path for path in runs if len(runs) > 1 and path.is_file()]
    given = (path for path in runs if path not in skipped)
    folders = [folder for path in given for folder in run_folders(path)]
    for path in skipped:
        note(f"skipped {path}: not a run")
    path = report_path(folders, out)
    write_report([read_run(run) for run in folders], path, force=force)
    size = path.stat().st_size
    if is_opened:
        webbrowser.open(path.resolve().as_uri())
    document = {"runs": list(map(str, folders)), "path": str(path), "file_bytes": size}
    return Written(document, f"wrote {path} ({format_bytes(size)})")
