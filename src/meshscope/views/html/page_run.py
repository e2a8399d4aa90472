"""A run on a page: its letter, its short label, and its metrics, computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import polars as pl

from meshscope.analysis.catalog import METRICS, Result, Unavailable, metrics_of
from meshscope.analysis.metric_inputs import MetricInputs, metric_inputs
from meshscope.events.enums import Phase, Source
from meshscope.store.run import RunRecord
from meshscope.views.charts.cost import CostBar, cost_bars, strongest_costs
from meshscope.views.frames import metric_table, prefill_first
from meshscope.views.html.blocks import PageTable, Paragraph, page_table, unknown
from meshscope.views.model import UNKNOWN_LABEL
from meshscope.views.plain import short
from meshscope.views.run_label import label_columns

NO_ROWS = Unavailable(reason="the metric has no rows for this run")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """One run on the page."""

    letter: str
    run: RunRecord
    inputs: MetricInputs
    metrics: dict[str, Result]
    costs: tuple[CostBar, ...]
    is_alone: bool

    @property
    def source(self) -> Source:
        """The strongest source of the run."""
        return self.run.manifest.source

    @property
    def label(self) -> str:
        """Model, plan, slice, and program options that are not defaults."""
        return " ".join(short(text, 60) for text in label_columns(self.run) if text)

    @property
    def plan(self) -> str:
        """The plan as the user wrote it."""
        return short(self.run.manifest.experiment.plan or UNKNOWN_LABEL, 40)

    @property
    def title(self) -> str:
        """The title of the run's panel; empty if the page has only one run."""
        return "" if self.is_alone else f"{self.letter}: {self.label}"

    @property
    def strongest_costs(self) -> dict[Phase, CostBar]:
        """For each phase the step of the strongest source that has one."""
        return strongest_costs(self.costs)

    def with_letter(self, text: str) -> str:
        """The text after the letter of the run, if the page has several runs."""
        return text if self.is_alone else f"{self.letter} {text}".strip()

    def html_id(self, name: str) -> str:
        """An id that is unique on the page."""
        return f"{name}-{self.letter.lower()}"

    def of_strongest(self, name: str) -> pl.DataFrame | Unavailable:
        """The rows of a metric for the strongest source that has some, prefill first."""
        result = self.metrics[name]
        if isinstance(result, Unavailable):
            return result
        if "source" in result.columns:
            sources = set(result["source"].unique())
            strongest = next((s for s in reversed(Source) if s.value in sources), self.source)
            result = result.filter(pl.col("source") == strongest.value)
        return NO_ROWS if result.is_empty() else prefill_first(result)

    def table(self, name: str, title: str, *, is_defined: bool = False) -> PageTable | Paragraph:
        """A metric as a table, or the reason why it is unavailable.

        `is_defined` adds the first paragraph of the metric's definition as a note.
        """
        result = self.of_strongest(name)
        if isinstance(result, Unavailable):
            return unknown(f"{title}: {result.reason}")
        id_ = self.html_id(name.replace("_", "-"))
        definition = next(metric.definition for metric in METRICS if metric.name == name)
        note = definition.partition("\n\n")[0].replace("`", "") if is_defined else ""
        return page_table(id_, metric_table(name, result, title=title), note=note)


def page_runs(runs: Sequence[RunRecord]) -> list[PageRun]:
    """The runs with their letters and metrics."""
    return [_page_run(run, i, is_alone=len(runs) == 1) for i, run in enumerate(runs)]


def letter_of(index: int) -> str:
    """A, B, ... Z, A2, B2, ..."""
    round_, letter = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(round_ + 1) if round_ else "")


def _page_run(run: RunRecord, index: int, *, is_alone: bool) -> PageRun:
    inputs = metric_inputs(run)
    return PageRun(
        letter=letter_of(index),
        run=run,
        inputs=inputs,
        metrics=metrics_of(inputs),
        costs=cost_bars(inputs),
        is_alone=is_alone,
    )
