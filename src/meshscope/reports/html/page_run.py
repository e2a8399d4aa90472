"""A run on a page: its name, its answer, and its metrics, computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from meshscope.analysis.catalog import (
    METRICS,
    MetricInputs,
    Result,
    Unavailable,
    metric_inputs,
    metrics_of,
)
from meshscope.events.enums import Phase, Source
from meshscope.reports.answer import Answer, FitState, SourceAnswer, answer_of
from meshscope.reports.charts.cost import CostBar, cost_bars, strongest_costs
from meshscope.reports.conditions import distinct_labels
from meshscope.reports.frames import metric_table, prefill_first
from meshscope.reports.html.blocks import PageTable, page_table
from meshscope.reports.plain import short
from meshscope.store.run import RunRecord

MAX_NAME = 80  # characters of a run's name


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: metrics are computed on first use
class PageRun:
    """One run on the page; `number` counts from 1."""

    number: int
    name: str
    run: RunRecord
    answer: Answer
    inputs: MetricInputs
    costs: tuple[CostBar, ...]

    @cached_property
    def metrics(self) -> dict[str, Result]:
        """Every metric by name."""
        return metrics_of(self.inputs)

    @property
    def source(self) -> Source:
        """The strongest source of the run."""
        return self.run.manifest.source

    @property
    def timed(self) -> SourceAnswer:
        """The answer of the strongest source with a time; of the strongest source if none has one."""
        timed = [s for s in self.answer.sources if s.ttft.value or s.tpot.value]
        return (timed or [self.answer.strongest])[-1]

    @property
    def fits(self) -> FitState:
        """Whether the run fits, by its strongest source that knows."""
        states = [s.fit.state for s in self.answer.sources if s.fit is not None]
        known = (state for state in reversed(states) if state is not FitState.UNKNOWN)
        return next(known, FitState.UNKNOWN)

    @property
    def strongest_costs(self) -> dict[Phase, CostBar]:
        """For each phase the step of the strongest source that has one."""
        return strongest_costs(self.costs)

    def html_id(self, name: str) -> str:
        """An id that is unique on the page."""
        return f"{name}-{self.number}"

    def of_strongest(self, name: str) -> pl.DataFrame | Unavailable:
        """The rows of a metric for the strongest source that has some, prefill first."""
        result = self.metrics[name]
        if isinstance(result, Unavailable):
            return result
        if "source" in result.columns:
            sources = set(result["source"].unique())
            strongest = next((s for s in reversed(Source) if s.value in sources), self.source)
            result = result.filter(pl.col("source") == strongest.value)
        return prefill_first(result)

    def tables(self, name: str, title: str, *, is_defined: bool = False) -> list[PageTable]:
        """A metric as one table; none if it is unavailable or has no rows.

        `is_defined` adds the first paragraph of the metric's definition as a note.
        """
        result = self.of_strongest(name)
        if isinstance(result, Unavailable) or result.is_empty():
            return []
        id_ = self.html_id(name.replace("_", "-"))
        definition = next(metric.definition for metric in METRICS if metric.name == name)
        note = definition.partition("\n\n")[0].replace("`", "") if is_defined else ""
        return [page_table(id_, metric_table(name, result, title=title), note=note)]


def n_decode_steps(run: PageRun) -> int | None:
    """Decode steps of the request; None if unknown."""
    workload = run.run.manifest.experiment.workload
    return None if workload is None else workload.n_decode_steps


def page_runs(runs: Sequence[RunRecord]) -> list[PageRun]:
    """The runs with their names, answers and metrics."""
    names = distinct_labels(runs)
    return [_page_run(run, i + 1, names[i]) for i, run in enumerate(runs)]


def _page_run(run: RunRecord, number: int, name: str) -> PageRun:
    inputs = metric_inputs(run)
    return PageRun(
        number=number,
        name=short(name, MAX_NAME) or f"run {number}",
        run=run,
        answer=answer_of(run),
        inputs=inputs,
        costs=cost_bars(inputs),
    )
