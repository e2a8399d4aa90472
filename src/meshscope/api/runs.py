"""`meshscope.open`: the runs at a path or pattern, as one set of tables."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.catalog import METRICS, Unavailable, metric_inputs, metrics_of
from meshscope.api.database import (
    answer,
    database,
    events_table,
    named,
    run_folders,
    runs_table,
    timeline_table,
)
from meshscope.api.report import write_report
from meshscope.api.run import Run
from meshscope.errors import RunError, SpecError, nearest, public, read_only
from meshscope.files import path_of
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord


@read_only
class Metrics(dict[str, pl.DataFrame]):
    """Every metric of some runs by its name, each table with a column `run`.

    `unknown` has a row for each metric that a run does not have, with the reason.
    """

    def __init__(self, tables: Mapping[str, pl.DataFrame], unknown: pl.DataFrame) -> None:
        super().__init__(tables)
        self.unknown = unknown

    def __call__(self) -> "Metrics":
        """The metrics themselves: `runs.metrics()` and `runs.metrics` are the same."""
        return self

    def __missing__(self, name: str) -> pl.DataFrame:
        """SpecError with the nearest names, or the reason why no run has this metric."""
        reasons = self.unknown.filter(pl.col("metric") == name)["reason"].unique().to_list()
        if reasons:
            raise SpecError(f"no run has the metric '{name}': {'; '.join(sorted(reasons))}.")
        raise SpecError(f"unknown metric '{name}'. {nearest(name, [m.name for m in METRICS])}")

    def __repr__(self) -> str:
        return f"<Metrics: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        titles = {metric.name: metric.title for metric in METRICS} | {"unknown": "unknown"}
        tables = {**self, "unknown": self.unknown}
        return "".join(
            f"<details><summary>{titles[name]}</summary><pre>{escape(str(table))}</pre></details>"
            for name, table in tables.items()
        )


def metrics_of_runs(runs: Mapping[str, RunRecord]) -> Metrics:
    """Every metric of docs/metrics.md, of every run."""
    tables, unknown = defaultdict[str, list[pl.DataFrame]](list), list[tuple[str, str, str]]()
    for name, record in runs.items():
        for metric, result in metrics_of(metric_inputs(record)).items():
            if isinstance(result, Unavailable):
                unknown.append((name, metric, result.reason))
            else:
                tables[metric].append(result.select(pl.lit(name).alias("run"), pl.all()))
    joined = {name: pl.concat(parts, how="diagonal_relaxed") for name, parts in tables.items()}
    schema: dict[str, Any] = dict.fromkeys(("run", "metric", "reason"), pl.String)
    return Metrics(joined, pl.DataFrame(unknown, schema=schema, orient="row"))


class RunSet(Sequence[Run]):
    """Runs opened together; tables are read on first use. A set of one run has that run's members, too."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, index: int) -> Run:  # type: ignore[override]  no slices
        """The run at this index, read whole."""
        return Run(record=read_run(self.folders[index]))

    def __repr__(self) -> str:
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

    def __getattr__(self, name: str) -> Any:
        """A member of the only run, such as `time`."""
        if name.startswith("_") or not hasattr(Run, name):
            known = ", ".join(one for one in dir(self) if not one.startswith("_"))
            raise AttributeError(f"'RunSet' has no field '{name}'. Known: {known}.")
        return getattr(self._only, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(Run)})

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self.table.drop('path', 'versions')))}</pre>"


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
