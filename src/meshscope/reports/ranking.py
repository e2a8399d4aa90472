"""Several runs, grouped by their work and ranked by the request: the best first, and which equal it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.request import are_equal, request_cost_of
from meshscope.cost.memory import capacity_of_run
from meshscope.reports.answer import FitState, SourceAnswer, source_answer
from meshscope.reports.conditions import differing_work, work_of
from meshscope.reports.document import fit_document, throughput_document
from meshscope.reports.model import UNKNOWN_LABEL, CellValue, ViewTable, joined, table
from meshscope.reports.tables import rich_table
from meshscope.reports.times import time_document
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds

MAX_EQUALS = 3  # equal runs that a sentence names
OTHER_WORK = "Runs of other work: another model or request. They are not ranked."
EQUAL = (
    "Equal: the difference is less than 3%, or than the errors that the two do not share; 0.5% if they "
    "have no intervals."
)


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class RankedRun:
    """A run with its name among others."""

    name: str
    run: RunRecord

    @cached_property
    def figures(self) -> tuple[SourceAnswer, ...]:
        """The figures of every source, the weakest first."""
        return tuple(source_answer(self.run, source) for source in self.run.sources)

    @cached_property
    def timed(self) -> SourceAnswer:
        """The figures of the strongest source with a time; of the strongest source if none has one."""
        timed = [one for one in self.figures if one.ttft.value or one.tpot.value]
        return (timed or self.figures)[-1]

    @property
    def fits(self) -> FitState:
        """Whether the run fits the memory of a device, by its strongest source that knows."""
        states = [one.fit.memory.fit for one in self.figures if one.fit is not None]
        known = (state for state in reversed(states) if state is not FitState.UNKNOWN)
        return next(known, FitState.UNKNOWN)

    @property
    def request_s(self) -> float | None:
        """Seconds of the request, or of its only phase; None if unknown."""
        times = (self.timed.e2e, self.timed.ttft, self.timed.tpot)
        return next((one.value for one in times if one.value), None)


RunT = TypeVar("RunT", bound=RankedRun)


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class Ranking(Generic[RunT]):
    """Runs of the same work: `ranked` fit or may fit, the fastest first; `rest` do not fit or have no time.

    `work` is None for runs that are each the only one of its work; none of them is ranked.
    """

    work: str | None
    ranked: tuple[RunT, ...]
    rest: tuple[RunT, ...]
    names: Mapping[RunT, str]  # within the group

    @property
    def runs(self) -> tuple[RunT, ...]:
        """All runs in the order of the table."""
        return (*self.ranked, *self.rest)

    @cached_property
    def best(self) -> tuple[RunT, ...]:
        """The fastest run, and those that follow and equal it."""
        costs = [request_cost_of(run.run, run.timed.source) for run in self.ranked]
        for n, cost in enumerate(costs):
            if cost is None or costs[0] is None or not are_equal(costs[0], cost):
                return self.ranked[: max(n, 1)]
        return self.ranked

    @property
    def sentence(self) -> str:
        """`tp=8,sp and tp=8 are equal: 965 and 973 ms`."""
        if all(run.request_s is None for run in self.runs):
            return "No run has a time; the table compares their traffic"
        if not self.ranked:
            return "No run fits the memory of its devices"
        names = [self.names[run] for run in self.best]
        seconds = [format_seconds(run.request_s or 0.0) for run in self.best]
        if len(self.ranked) == 1:
            return f"{names[0]} takes {seconds[0]} for the request"
        if len(names) == 1:
            return f"{names[0]} serves the request fastest: {seconds[0]}"
        if len(names) > MAX_EQUALS:
            return f"{len(names)} runs are equal: {names[0]}, {seconds[0]}, to {names[-1]}, {seconds[-1]}"
        unit = seconds[-1][seconds[-1].rindex(" ") :]
        if all(text.endswith(unit) for text in seconds):
            seconds[:-1] = [text.removesuffix(unit) for text in seconds[:-1]]
        return f"{joined(names)} are equal: {joined(seconds)}"


def rankings(
    runs: Sequence[RunT], label: Callable[[Sequence[RunT]], Sequence[str]]
) -> list[Ranking[RunT]]:
    """The runs grouped by their work, the largest group first, then all runs of other work.

    `label` names the runs of a group.
    """
    groups: dict[str, list[RunT]] = {}
    for number, run in enumerate(runs):  # unknown work is no other run's
        groups.setdefault(work_of(run.run) or f"unknown work of run {number}", []).append(run)
    others = [run for group in groups.values() if len(group) == 1 for run in group]
    shared = [_ranking(work, group, label) for work, group in groups.items() if len(group) > 1]
    rest = [_ranking(None, others, label)] if others else []
    return [*sorted(shared, key=lambda ranking: -len(ranking.runs)), *rest]


def _ranking(
    work: str | None, runs: Sequence[RunT], label: Callable[[Sequence[RunT]], Sequence[str]]
) -> Ranking[RunT]:
    able = [r for r in runs if work and r.fits is not FitState.NO and r.request_s is not None]
    ranked = tuple(sorted(able, key=lambda run: run.request_s or 0.0))
    others = [run for run in runs if run not in ranked]
    rest = tuple(sorted(others, key=lambda run: work is not None and run.fits is FitState.NO))
    names = dict(zip(runs, label(runs), strict=True))
    return Ranking(work=work, ranked=ranked, rest=rest, names=names)


def headline(groups: Sequence[Ranking[Any]]) -> str:
    """The best run in one sentence, or how many requests have one."""
    shared = [ranking for ranking in groups if ranking.work is not None]
    if not shared:
        return "No two runs do the same work"
    return shared[0].sentence if len(shared) == 1 else f"The fastest runs of {len(shared)} requests"


def ranked(runs: Mapping[str, RunRecord]) -> list[Ranking[RankedRun]]:
    """The runs by name, grouped by their work."""
    entries = [RankedRun(name=name, run=run) for name, run in runs.items()]
    return rankings(entries, lambda group: [entry.name for entry in group])


def ranking_lines(runs: Mapping[str, RunRecord]) -> Iterator[RenderableType]:
    """For each work the best run, and the table; then what the order means."""
    groups = ranked(runs)
    for number, ranking in enumerate(groups):
        if number:
            yield Text("")
        if ranking.work is None:
            yield Text(OTHER_WORK)
        else:
            yield Text.assemble((f"{ranking.work}: ", "bold"), ranking.sentence)
        yield rich_table(ranking_table(ranking))
    if any(ranking.ranked for ranking in groups):
        order = "ranked by end-to-end time of the request; runs that do not fit come last"
        has_equals = any(len(ranking.best) > 1 for ranking in groups)
        yield Text(f"{order}. {EQUAL}" if has_equals else order, style="dim")


def ranking_table(ranking: Ranking[Any], notes: Iterable[str] = ()) -> ViewTable:
    """TTFT, TPOT, end-to-end time, decode throughput and fit of each run; its work if it is not ranked."""
    runs = ranking.runs
    has_sources = len({entry.timed.source for entry in runs}) > 1
    differing = zip(runs, differing_work([run.run for run in runs]), strict=True)
    works = {run: words or work_of(run.run) or "" for run, words in differing}
    has_works = ranking.work is None and any(works.values())
    words = ("run", *(("work",) if has_works else ()), *(("source",) if has_sources else ()))
    figures = ("TTFT_s", "TPOT_s", "request_s", "decode tokens/s#", "per chip#", "fits#")
    rows = list[tuple[CellValue, ...]]()
    for entry in runs:
        timed = entry.timed
        names = (
            *((works[entry],) if has_works else ()),
            *((timed.source.value,) if has_sources else ()),
        )
        per_s = (timed.decode_tokens_per_s, timed.decode_tokens_per_s_per_chip)
        rates = (UNKNOWN_LABEL if r.value is None else r.text.partition(" ")[0] for r in per_s)
        times = (timed.ttft, timed.tpot, timed.e2e)
        rows.append((ranking.names[entry], *names, *times, *rates, entry.fits.label))
    return table((*words, *figures), rows, notes=notes)


def ranking_document(runs: Mapping[str, RunRecord]) -> dict[str, Any]:
    """The runs in the order of the tables, each with `time`, `throughput` and `fit` as in its document.

    `work` is what the runs of a group share; `is_best` is whether none of them is faster, apart from equal ones.
    """
    return {
        "runs": [
            {
                "run": str(entry.run.path),
                "source": entry.timed.source.value,
                "work": ranking.work,
                "is_best": entry in ranking.best,
                "time": time_document(entry.run, entry.timed.source),
                "throughput": throughput_document(entry.timed),
                "fit": fit_document(memory.get(entry.timed.source), capacity_of_run(entry.run)),
            }
            for ranking in ranked(runs)
            for entry in ranking.runs
            for memory in [entry.run.memory]
        ]
    }
