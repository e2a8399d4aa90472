"""`meshscope show`: a run, or several ranked, as text or JSON."""

from importlib import import_module
from pathlib import Path

from meshscope.api.console import echo, new_console, print_all, print_json
from meshscope.api.options import FULL, JSON, option, request
from meshscope.api.request import PROFILE
from meshscope.errors import UsageError
from meshscope.reports.collectives import insertion_lines
from meshscope.reports.document import run_document
from meshscope.reports.metrics import metrics_document, metrics_text
from meshscope.reports.ranking import ranking_document, ranking_lines
from meshscope.reports.roofs import roofline_lines
from meshscope.reports.text import full_text, run_text
from meshscope.store.folder import is_run
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord


@request
class ShowRequest:
    """The options of `show`."""

    runs: list[Path] = option(
        "Folders of runs, or a pattern 'runs/*'.", metavar="RUN...", kw_only=False
    )
    metrics: bool = option("Every metric of docs/metrics.md instead of the tables.", default=False)
    roofline: bool = option("Limiting resource of each part: compute, HBM or links.", default=False)
    inserted: bool = option("Why the partitioner inserted each collective.", default=False)
    profile: Path | None = option(PROFILE, default=None)
    full: bool = option(FULL, default=False)
    as_json: bool = option(JSON, default=False)

    @property
    def n_forms(self) -> int:
        """How many forms of the output are asked for."""
        return self.metrics + self.roofline + self.inserted + self.full


def command(asked: ShowRequest) -> None:
    """Show a run, or rank several.

    Prints the answer of a run and its collectives, or its metrics, or its roofline. Several runs are
    ranked, one line each, the best first. With --json, --metrics adds the key `metrics` to the document.
    """
    if asked.n_forms > 1:
        raise UsageError("give one of --full, --metrics, --roofline and --inserted")
    folders = _folders(asked.runs)
    if len(folders) > 1:
        if asked.n_forms or asked.profile is not None:
            raise UsageError("--full, --metrics, --roofline, --inserted and --profile take one run")
        _show_several(folders, as_json=asked.as_json)
        return
    record = read_run(folders[0])
    if asked.profile is not None:
        record = import_module("meshscope.api.reprice").repriced(record, asked.profile)
    if asked.as_json:
        extra = {"metrics": metrics_document(record)} if asked.metrics else {}
        print_json({**run_document(record), **extra})
        return
    if asked.inserted:
        explained = import_module("meshscope.api.explain").explained(record)
        for line in insertion_lines(explained):
            echo(line)
        return
    console = new_console()
    if asked.roofline:
        print_all(console, roofline_lines(record, record.manifest.experiment.chip))
        return
    text = metrics_text if asked.metrics else full_text if asked.full else run_text
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
