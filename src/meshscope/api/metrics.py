"""Metrics of runs as polars tables by name."""

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from meshscope.analysis.catalog import ALIASES, METRICS, Unavailable, metric_inputs, metrics_of
from meshscope.errors import SpecError, nearest, read_only
from meshscope.reports.frames import folded_html
from meshscope.store.run import RunRecord


@read_only
class Metrics(Mapping[str, pl.DataFrame]):
    """Every metric of some runs by its name, each table with a column `run`.

    `unknown` has a row for each metric that a run does not have, with the reason.
    """

    def __init__(self, tables: Mapping[str, pl.DataFrame], unknown: pl.DataFrame) -> None:
        self._tables = dict(tables)
        self.unknown = unknown

    def __call__(self) -> "Metrics":
        """The metrics themselves: `runs.metrics()` and `runs.metrics` are the same."""
        return self

    def __getitem__(self, name: str) -> pl.DataFrame:
        """The table of this metric; SpecError with the nearest names, or the reason why no run has it."""
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
        """The number of metrics that at least one run has."""
        return len(self._tables)

    def __repr__(self) -> str:
        """The names of the metrics."""
        return f"<Metrics: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        """For notebooks: each metric in a folded table, then the unknown ones."""
        titles = {metric.name: metric.title for metric in METRICS}
        tables = [folded_html(table, title=titles[name]) for name, table in self._tables.items()]
        return "".join([*tables, folded_html(self.unknown, title="unknown")])


def metrics_of_runs(runs: Mapping[str, RunRecord]) -> Metrics:
    """Every metric of docs/metrics.md, of every run."""
    tables: dict[str, list[pl.DataFrame]] = {}
    unknown: list[tuple[str, str, str]] = []
    for name, record in runs.items():
        for metric, result in metrics_of(metric_inputs(record)).items():
            if isinstance(result, Unavailable):
                unknown.append((name, metric, result.reason))
            else:
                table = result.select(pl.lit(name).alias("run"), pl.all())
                tables.setdefault(metric, []).append(table)
    joined = {name: pl.concat(parts, how="diagonal_relaxed") for name, parts in tables.items()}
    schema: dict[str, Any] = dict.fromkeys(("run", "metric", "reason"), pl.String)
    return Metrics(joined, pl.DataFrame(unknown, schema=schema, orient="row"))
