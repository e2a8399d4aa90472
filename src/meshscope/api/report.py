"""Writes the HTML report of one run, or of several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshscope.api.database import run_folders
from meshscope.errors import RunError
from meshscope.reports.export.files import new_file
from meshscope.reports.html.page import page_html
from meshscope.store.run import RunRecord

REPORT = "report.html"
MAX_RUNS = 200  # on one page


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRuns:
    """Folders of runs, and files beside them that are no runs."""

    folders: tuple[Path, ...]
    skipped: tuple[Path, ...]


def runs_at(paths: Sequence[Path]) -> FoundRuns:
    """The runs at these paths: runs, folders of runs such as a sweep, or patterns.

    A file among several paths is skipped: a shell expands `sweep/*` to the summary, too. RunError if a
    path has no run.
    """
    skipped = tuple(path for path in paths if len(paths) > 1 and path.is_file())
    folders = (folder for path in paths if path not in skipped for folder in run_folders(path))
    return FoundRuns(folders=tuple(folders), skipped=skipped)


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
    folders = {None if run is None else run if len(runs) == 1 else run.parent for run in runs}
    folder = folders.pop()
    if folders:
        raise RunError(
            f"a report of {len(runs)} runs in different folders needs a file. Give one with --out FILE."
        )
    if folder is None:
        raise RunError("the run is in memory and has no folder for its report. Give a path.")
    return folder / REPORT
