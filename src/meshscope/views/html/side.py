"""A run on a page: its letter among others, a short name, and its metrics, computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import polars as pl

from meshscope.analysis.catalog import Result, metrics_of
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.analysis.run_inputs import metric_inputs
from meshscope.events.enums import Phase, Source
from meshscope.spec.program import Frontend, Partitioner
from meshscope.store.run import RunRecord
from meshscope.views.charts.cost import CostBar, cost_bars
from meshscope.views.html.blocks import PageTable, Paragraph, shown, table_of_frame, unknown

# What a short name leaves out: how a program is usually asked for.
USUAL = {"partitioner": Partitioner.MANUAL, "frontend": Frontend.JAX}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """One run on the page."""

    letter: str
    run: RunRecord
    subject: MetricInputs
    metrics: dict[str, Result]
    costs: tuple[CostBar, ...]
    is_alone: bool

    @property
    def source(self) -> Source:
        """The strongest source that the run has."""
        return self.run.manifest.source

    @property
    def short(self) -> str:
        """Model, plan and slice in a few words."""
        experiment = self.run.manifest.experiment
        model = experiment.model_name or "imported"
        program, topology = experiment.program, experiment.topology
        values = [getattr(program, name) for name in USUAL] if program is not None else []
        unusual = [value for value in values if value not in USUAL.values()]
        slice_name = None if topology is None else topology.name
        words = (model.rpartition("/")[2], experiment.plan, slice_name, *unusual)
        return " ".join(shown(word, 60) for word in words if word)

    @property
    def title(self) -> str:
        """What stands above the panel of the run; nothing where it is the only one."""
        return "" if self.is_alone else f"{self.letter}: {self.short}"

    def named(self, words: str) -> str:
        """The words, with the letter of the run in front where there are several."""
        return words if self.is_alone else f"{self.letter} {words}"

    def key(self, name: str) -> str:
        """An id on the page that no other run has."""
        return f"{name}-{self.letter.lower()}"

    def of_strongest(self, name: str) -> pl.DataFrame | Unavailable:
        """A metric's rows of the strongest source that has some, prefill first, or why there are none."""
        found = self.metrics[name]
        if isinstance(found, Unavailable):
            return found
        if "source" in found.columns:
            sources = set(found["source"].unique())
            strongest = next((s for s in reversed(Source) if s.value in sources), None)
            found = found.filter(pl.col("source") == (strongest or self.source).value)
        if found.is_empty():
            return Unavailable(reason="the metric has no rows for this run")
        if "phase" not in found.columns:
            return found
        ranks = {phase.value: i for i, phase in enumerate(Phase)}
        rank = pl.col("phase").replace_strict(ranks, default=len(ranks), return_dtype=pl.Int64)
        return found.sort(rank, maintain_order=True)

    def table(self, name: str, title: str, *, note: str = "") -> PageTable | Paragraph:
        """A metric as a table, or why it is not known."""
        found = self.of_strongest(name)
        if isinstance(found, Unavailable):
            return unknown(f"{title}: {found.reason}")
        return table_of_frame(self.key(name.replace("_", "-")), title, found, note=note)


def page_runs(runs: Sequence[RunRecord]) -> list[PageRun]:
    """The runs with their letters, metrics computed."""
    return [_page_run(run, i, is_alone=len(runs) == 1) for i, run in enumerate(runs)]


def letter_of(index: int) -> str:
    """A, B, ... Z, A2, B2, ..."""
    round_, letter = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(round_ + 1) if round_ else "")


def _page_run(run: RunRecord, index: int, *, is_alone: bool) -> PageRun:
    subject = metric_inputs(run)
    return PageRun(
        letter=letter_of(index),
        run=run,
        subject=subject,
        metrics=metrics_of(subject),
        costs=cost_bars(subject),
        is_alone=is_alone,
    )
