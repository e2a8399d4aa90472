"""Several runs as one table, a line each, the best first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.store.run import RunRecord
from meshscope.views.answer import FitState, SourceAnswer, source_answer
from meshscope.views.document import fit_document, throughput_document
from meshscope.views.model import UNKNOWN_LABEL, Figure, ViewTable, view_columns
from meshscope.views.run_label import work_of
from meshscope.views.tables import rich_table
from meshscope.views.times import time_document


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRun:
    """A run with the figures of its strongest source."""

    name: str
    run: RunRecord
    figures: SourceAnswer

    @property
    def fits(self) -> FitState:
        """Whether the run fits the memory of a device."""
        return FitState.UNKNOWN if self.figures.fit is None else self.figures.fit.state


def ranked(runs: Mapping[str, RunRecord]) -> list[RankedRun]:
    """The runs by name, the best first; those that do not fit, then those without times, come last.

    Runs of the same work are ranked by their end-to-end time, others by decode tokens/s a chip.
    """
    entries = [
        RankedRun(name=name, run=run, figures=source_answer(run, run.manifest.source))
        for name, run in runs.items()
    ]
    is_same = is_same_work(entries)
    return sorted(entries, key=lambda entry: _rank(entry, is_same_work=is_same))


def is_same_work(runs: Sequence[RankedRun]) -> bool:
    """Whether all runs serve the same known request with the same known model."""
    works = {work_of(entry.run) for entry in runs}
    return len(works) == 1 and None not in works


def _rank(entry: RankedRun, *, is_same_work: bool) -> tuple[object, ...]:
    figures = entry.figures
    key = figures.e2e.value
    if not is_same_work:
        rate = figures.decode_tokens_per_s_per_chip.value
        key = None if rate is None else -rate
    return (entry.fits is FitState.NO, key is None, key or 0.0, entry.name)


def ranking_lines(runs: Mapping[str, RunRecord]) -> Iterator[RenderableType]:
    """The table and what the order means."""
    entries = ranked(runs)
    yield rich_table(ranking_table(entries))
    order = "end-to-end time of the request"
    if not is_same_work(entries):
        order = "decode tokens/s a chip, as the runs do different work"
    yield Text(f"ranked by {order}; runs that do not fit come last", style="dim")


def ranking_table(runs: Sequence[RankedRun]) -> ViewTable:
    """TTFT, TPOT, end-to-end time, decode throughput and fit of each run."""
    has_sources = len({entry.figures.source for entry in runs}) > 1
    words = ("run", "source") if has_sources else ("run",)
    figures = ("TTFT_s", "TPOT_s", "request_s", "tokens/s", "a chip", "fits")
    return ViewTable(
        columns=view_columns(words, figures),
        rows=tuple(
            (
                entry.name,
                *((entry.figures.source.value,) if has_sources else ()),
                *(entry.figures.ttft, entry.figures.tpot, entry.figures.e2e),
                _bare(entry.figures.decode_tokens_per_s),
                _bare(entry.figures.decode_tokens_per_s_per_chip),
                entry.fits.label,
            )
            for entry in runs
        ),
    )


def _bare(rate: Figure) -> str:
    """A rate without its unit, which the header names."""
    return UNKNOWN_LABEL if rate.value is None else rate.text.partition(" ")[0]


def ranking_document(runs: Mapping[str, RunRecord]) -> dict[str, Any]:
    """The runs in the order of the table, each with `time`, `throughput` and `fit` as in its document."""
    return {"runs": [_entry_document(entry) for entry in ranked(runs)]}


def _entry_document(entry: RankedRun) -> dict[str, Any]:
    source = entry.figures.source
    return {
        "run": str(entry.run.path),
        "source": source.value,
        "time": time_document(entry.run, source),
        "throughput": throughput_document(entry.run, source),
        "fit": fit_document(entry.run, source),
    }
