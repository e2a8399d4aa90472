"""Writes the HTML report of one run, or of several side by side."""

from collections.abc import Sequence
from pathlib import Path

from meshscope.errors import RunError
from meshscope.exporters.files import new_file
from meshscope.store.run import RunRecord
from meshscope.views.html.page import page_html

REPORT = "report.html"
MAX_RUNS = 24  # side by side on one page


def write_report(runs: Sequence[RunRecord], out: Path | None, *, force: bool) -> Path:
    """Writes the report to `out`, by default `report.html` in the only run; returns the path."""
    path = report_path([run.path for run in runs], out)
    text = page_html(list(runs))
    with new_file(path, force=force) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def report_path(runs: Sequence[Path | None], out: Path | None) -> Path:
    """The file of the report; RunError for too many runs, or several without `out`."""
    if len(runs) > MAX_RUNS:
        raise RunError(
            f"{len(runs)} runs are too many for one page; at most {MAX_RUNS} fit. "
            "Give fewer, or query them with `meshscope sql`."
        )
    if out is not None:
        return out
    if len(runs) > 1:
        raise RunError(f"a report of {len(runs)} runs needs a file. Give one with --out FILE.")
    if runs[0] is None:
        raise RunError("the run is in memory and has no folder for its report. Give a path.")
    return runs[0] / REPORT
