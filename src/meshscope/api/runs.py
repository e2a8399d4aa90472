"""Runs for Python and notebooks: `meshscope.open("runs/*")`, its tables, metrics and SQL."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.catalog import ALIASES, METRICS, metrics_of
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.run_inputs import metric_inputs
from meshscope.api.database import (
    answer,
    database,
    events_table,
    named,
    run_folders,
    runs_table,
    timeline_table,
)
from meshscope.errors import SpecError, nearest
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord
from meshscope.views.notebook import folded_html, table_html


class Metrics(Mapping[str, pl.DataFrame]):
    """Every metric of some runs by its name, each table with a column `run`.

    `unknown` has a row for each metric that a run does not have, with the reason.
    """

    def __init__(self, tables: Mapping[str, pl.DataFrame], unknown: pl.DataFrame) -> None:
        self._tables = dict(tables)
        self.unknown = unknown

    def __getitem__(self, name: str) -> pl.DataFrame:
        """The table of this metric; SpecError offers the nearest names, or says why no run has it."""
        name = ALIASES.get(name, name)
        if name in self._tables:
            return self._tables[name]
        reasons = self.unknown.filter(pl.col("metric") == name)["reason"].unique().to_list()
        if reasons:
            raise SpecError(f"no run has the metric '{name}': {'; '.join(sorted(reasons))}.")
        raise SpecError(f"unknown metric '{name}'. {nearest(name, [m.name for m in METRICS])}")

    def __iter__(self) -> Iterator[str]:
        """The names of the metrics that at least one run has."""
        return iter(self._tables)

    def __len__(self) -> int:
        """How many metrics at least one run has."""
        return len(self._tables)

    def _repr_html_(self) -> str:
        """For notebooks: each metric, to be unfolded, then what is not known."""
        titles = {metric.name: metric.title for metric in METRICS}
        tables = [folded_html(table, title=titles[name]) for name, table in self._tables.items()]
        return "".join([*tables, folded_html(self.unknown, title="not known")])


class RunSet(Sequence[RunRecord]):
    """Runs that were found together; tables are read when they are first asked for."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.folders)

    def __getitem__(self, index: int) -> RunRecord:  # type: ignore[override]  no slices
        """The run at this place, read whole."""
        return read_run(self.folders[index])

    def __repr__(self) -> str:
        """The paths of the runs."""
        return f"Runs({', '.join(str(folder) for folder in self.folders)})"

    @cached_property
    def table(self) -> pl.DataFrame:
        """A row for each run: source, model, plan, slice, request, versions."""
        return runs_table(self.folders)

    @cached_property
    def events(self) -> pl.DataFrame:
        """The event tables of all runs, each row with its run's name in `run`."""
        return events_table(self.folders)

    @cached_property
    def timeline(self) -> pl.DataFrame:
        """Single executions of the runs whose time was modelled from a schedule."""
        return timeline_table(self.folders)

    def metrics(self) -> Metrics:
        """Every metric of docs/metrics.md, of every run."""
        tables: dict[str, list[pl.DataFrame]] = {}
        unknown: list[tuple[str, str, str]] = []
        for name, folder in named(self.folders):
            for metric, result in metrics_of(metric_inputs(read_run(folder))).items():
                if isinstance(result, Unavailable):
                    unknown.append((name, metric, result.reason))
                else:
                    own = result.select(pl.lit(name).alias("run"), pl.all())
                    tables.setdefault(metric, []).append(own)
        joined = {name: pl.concat(own, how="diagonal_relaxed") for name, own in tables.items()}
        schema: dict[str, Any] = dict.fromkeys(("run", "metric", "reason"), pl.String)
        return Metrics(joined, pl.DataFrame(unknown, schema=schema, orient="row"))

    def sql(self, query: str) -> pl.DataFrame:
        """The answer of DuckDB over the views of docs/sql.md; SpecError for a query that does not read."""
        with database(self.folders) as connection:
            names, rows = answer(connection, query)
        return pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)

    def _repr_html_(self) -> str:
        """For notebooks: a row for each run."""
        return table_html(
            self.table.drop("path", "versions"),
            title=f"{len(self)} run{'' if len(self) == 1 else 's'}",
        )


def open_runs(pattern: str) -> RunSet:
    """The runs at this path, or that this pattern matches; RunError where there is none."""
    return RunSet(run_folders(pattern))
