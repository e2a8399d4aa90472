"""`meshscope show`: a run, or several ranked, as text or JSON."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from meshscope.api.console import Shown, basis_of, shown_run
from meshscope.api.options import RunOutput, option
from meshscope.api.run import Run
from meshscope.errors import UsageError
from meshscope.reports.collectives import insertion_lines
from meshscope.reports.document import run_document
from meshscope.reports.metrics import metrics_document, metrics_text
from meshscope.reports.ranking import ranking_document, ranking_lines
from meshscope.reports.tables import with_first_block
from meshscope.reports.times import roofline_lines
from meshscope.store.folder import is_run
from meshscope.store.read import read_run


def command(
    *,
    runs: list[Path] = option("RUN...: Folders of runs, or a pattern 'runs/*'.", kw_only=False),
    metrics: bool = option("Every metric of docs/metrics.md instead of the tables.", default=False),
    roofline: bool = option(
        "Limiting resource of each part: compute, HBM or links.", default=False
    ),
    inserted: bool = option(
        "Why the partitioner inserted each collective, and which of the program move more than is kept.",
        default=False,
    ),
    output: RunOutput,
) -> Shown:
    """Show a run, or rank several.

    Prints the answer of a run, or its collectives, its metrics, or its roofline. Several runs are
    ranked, one line each, the best first. With --json, --metrics adds the key `metrics` to the document.
    """
    n_forms = metrics + roofline + inserted + output.rows
    if n_forms > 1:
        raise UsageError("give one of --rows, --metrics, --roofline and --inserted")
    # Each run once; a folder of runs and a pattern stand for their runs.
    folders = dict[Path, None]()
    for path in runs:
        is_one = is_run(path) or not (path.is_dir() or any(mark in str(path) for mark in "*?["))
        # duckdb is slow to import
        several = [path] if is_one else import_module("meshscope.api.database").run_folders(path)
        folders |= dict.fromkeys(several)
    if len(folders) > 1:
        if n_forms:
            raise UsageError("--rows, --metrics, --roofline and --inserted take one run")
        records = {str(folder): read_run(folder) for folder in folders}
        return Shown(
            lambda: ranking_document(records),
            lambda _: with_first_block(ranking_lines(records), Text("")),
            basis=basis_of(*records.values()),
        )
    record = read_run(next(iter(folders)))
    if not metrics and not roofline and not inserted:
        return shown_run(Run(record=record), rows=output.rows)

    def text(console: Console) -> Iterable[RenderableType]:
        if inserted:
            return insertion_lines(import_module("meshscope.api.compare").explained(record))
        return roofline_lines(record) if roofline else metrics_text(record, console)

    return Shown(
        lambda: run_document(record) | ({"metrics": metrics_document(record)} if metrics else {}),
        text,
        basis=basis_of(record),
    )
