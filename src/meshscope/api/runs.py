"""`meshscope.open`: the runs at a path or pattern, as one set of tables."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.request import Throughput
from meshscope.api.compare import RunComparison
from meshscope.api.database import (
    answer,
    database,
    events_table,
    named,
    run_folders,
    runs_table,
    timeline_table,
)
from meshscope.api.metrics import Metrics, metrics_of_runs
from meshscope.api.report import write_report
from meshscope.api.run import Run, RunTime
from meshscope.errors import RunError, public, read_only
from meshscope.files import path_of
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.memory import Memory
from meshscope.reports.frames import table_html
from meshscope.store.read import read_run


@read_only
class RunSet(Sequence[Run]):
    """Runs opened together; tables are read on first use.

    A set of one run has that run's members, too: `experiment`, `time`, `throughput`, `memory`, `path`,
    `compare`, `save`, `text`.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)

    def __len__(self) -> int:
        """The number of runs."""
        return len(self.folders)

    def __getitem__(self, index: int) -> Run:  # type: ignore[override]  no slices
        """The run at this index, read whole."""
        return Run(record=read_run(self.folders[index]))

    def __repr__(self) -> str:
        """The run, or the paths of the runs."""
        if len(self) == 1:
            return repr(self._only)
        return f"<RunSet of {len(self)}: {', '.join(str(folder) for folder in self.folders)}>"

    @cached_property
    def table(self) -> pl.DataFrame:
        """A row for each run: source, model, plan, slice, request, versions."""
        return runs_table(self.folders)

    @cached_property
    def events(self) -> pl.DataFrame:
        """The event tables of all runs, each row with its run's name in `run`."""
        return events_table(self.folders)

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """The collectives of all runs and sources, each row with its run's name in `run`."""
        return self.events.filter(pl.col("kind").is_not_null())

    @cached_property
    def timeline(self) -> pl.DataFrame:
        """Single executions of the runs whose time was modeled from a schedule."""
        return timeline_table(self.folders)

    @cached_property
    def metrics(self) -> Metrics:
        """Every metric of docs/metrics.md, of every run."""
        return metrics_of_runs({name: read_run(folder) for name, folder in named(self.folders)})

    @public
    def sql(self, query: str) -> pl.DataFrame:
        """The result of a DuckDB query over the views of docs/data.md; SpecError for a wrong query."""
        with database(self.folders) as connection:
            names, rows = answer(connection, query)
        return pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)

    @public
    def report(self, path: str | Path | None = None, *, force: bool = False) -> Path:
        """Writes an HTML report of the runs side by side; several runs need a path."""
        records = [run.record for run in self]
        return write_report(records, None if path is None else path_of(path), force=force)

    @cached_property
    def _only(self) -> Run:
        if len(self) != 1:
            raise RunError(f"{len(self)} runs are open. Choose one by its index, such as runs[0].")
        return self[0]

    @property
    def experiment(self) -> ExperimentRecord:
        """`Run.experiment` of the only run."""
        return self._only.experiment

    @property
    def time(self) -> RunTime:
        """`Run.time` of the only run."""
        return self._only.time

    @property
    def throughput(self) -> Throughput | None:
        """`Run.throughput` of the only run."""
        return self._only.throughput

    @property
    def memory(self) -> Memory | None:
        """`Run.memory` of the only run."""
        return self._only.memory

    @property
    def path(self) -> Path | None:
        """`Run.path` of the only run."""
        return self._only.path

    def compare(self, other: "Run | str | Path | None" = None) -> RunComparison:
        """`Run.compare` of the only run."""
        return self._only.compare(other)

    def save(self, path: str | Path, *, force: bool = False) -> Run:
        """`Run.save` of the only run."""
        return self._only.save(path, force=force)

    def text(self, width: int = 80, *, full: bool = False) -> str:
        """`Run.text` of the only run."""
        return self._only.text(width, full=full)

    def as_dict(self) -> Mapping[str, Any]:
        """`Run.as_dict` of the only run."""
        return self._only.as_dict()

    def _repr_html_(self) -> str:
        """For notebooks: a row for each run."""
        return table_html(
            self.table.drop("path", "versions"),
            title=f"{len(self)} run{'' if len(self) == 1 else 's'}",
        )


@public
def open(path: str | Path) -> RunSet:  # noqa: A001  meshscope.open("runs/*")
    """Opens the runs at a path: a run, a folder of runs, or a pattern such as `runs/*`.

    Example:
        >>> runs = meshscope.open("runs/*")
        >>> runs.sql("select run, sum(wire_bytes * count) from collectives group by run")

    Args:
        path: A run folder, a folder of runs, or a pattern.

    Returns:
        The runs, sorted by path; a set of one run has that run's members, too.

    Raises:
        RunError: There is no run, or one cannot be read.
    """
    return RunSet(run_folders(path))
