"""The comparison of several runs: ranked by the request, with a waterfall against a baseline."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshscope.reports.answer import FitState
from meshscope.reports.charts.cost import cost_charts, scaling_charts
from meshscope.reports.conditions import distinct_labels
from meshscope.reports.html.blocks import Block, columns, fold, page_table, paragraph
from meshscope.reports.html.run import MAX_NAME, PageRun, suggestions, warnings
from meshscope.reports.html.sections import waterfall_blocks
from meshscope.reports.model import joined, short
from meshscope.reports.ranking import EQUAL, OTHER_WORK, Ranking, ranking_table, rankings, request_s
from meshscope.serving.suggestions import suggestions_of
from meshscope.store.run import RunRecord

MAX_COMPARED = 24  # runs in a chart
MIN_SIZES = 3  # numbers of devices from which scaling is drawn
RANKED = "Ranked by the end-to-end time of the request. Runs that do not fit are struck out."
PRECISION = "The runs differ in precision, so their outputs differ."


def page_rankings(runs: Sequence[RunRecord]) -> list[Ranking[PageRun]]:
    """The runs grouped by their work; a run of other work has its name among all runs."""

    def labels(group: Sequence[RunRecord]) -> list[str]:
        return [short(label, MAX_NAME) for label in distinct_labels(group)]

    every = [
        PageRun(number=number, name=name or f"run {number}", run=run)
        for number, (run, name) in enumerate(zip(runs, labels(runs), strict=True), start=1)
    ]
    return [
        replace(group, names={run: run.name for run in group.runs}) if group.work is None else group
        for group in rankings(every, lambda group: labels([run.run for run in group]))
    ]


def _timed(ranking: Ranking[PageRun]) -> tuple[PageRun, ...]:
    """The first runs with a time, those that do not fit last; charts compare no more."""
    timed = (*ranking.ranked, *(run for run in ranking.rest if request_s(run) is not None))
    return timed[:MAX_COMPARED]


def comparison_blocks(groups: Sequence[Ranking[PageRun]]) -> Iterator[Block]:
    """A table and charts for each group of runs with the same work; the charts of later groups are folded."""
    are_several = sum(ranking.work is not None for ranking in groups) > 1
    for number, ranking in enumerate(groups, start=1):
        yield paragraph(ranking.work or OTHER_WORK, "heading")
        if are_several and ranking.work is not None:
            yield paragraph(f"{ranking.sentence}.", "lead")
        for run in ranking.runs:
            for text, style in warnings(run):
                if "bad" in style and run.fits is not FitState.NO:
                    yield paragraph(f"{run.name}: {text}", style)
        best = ranking.best if len(ranking.ranked) > 1 else ranking.ranked[:1]
        classes = [
            "best" if run in best else "out" if run.fits is FitState.NO else ""
            for run in ranking.runs
        ]
        view = ranking_table(ranking, notes=_notes(ranking))
        yield page_table(f"runs-{number}", replace(view, title="Runs"), row_classes=classes)
        if number == 1 and ranking.ranked:
            fastest = ranking.ranked[0]
            steps = ((ranking.names[fastest], one) for one in suggestions_of(fastest.run))
            yield from suggestions(steps)
        if ranking.work is not None and len(_timed(ranking)) > 1:
            drawn = _charts(ranking, number)
            yield from drawn if number == 1 else fold("Step times and their differences", drawn)


def _charts(ranking: Ranking[PageRun], number: int) -> Iterator[Block]:
    named = [(ranking.names[run], run) for run in _timed(ranking)]
    bars = [(name, bar) for name, run in named for bar in run.strongest_costs.values()]
    yield from columns(cost_charts(bars))
    yield from waterfall_blocks(
        [(name, run.breakdowns) for name, run in named],
        n_decode_steps=named[0][1].n_decode_steps,
        table_id=f"differences-{number}",
    )
    of_runs = ((name, run.inputs, run.strongest_costs) for name, run in named)
    yield from columns(scaling_charts(of_runs, MIN_SIZES))


def _notes(ranking: Ranking[PageRun]) -> Iterator[str]:
    if ranking.work is None:
        return
    yield RANKED
    if len(ranking.best) > 1:
        yield EQUAL
    workloads = [run.run.manifest.experiment.workload for run in ranking.runs]
    if len({w and (w.weight_dtype, w.activation_dtype, w.cache_dtype) for w in workloads}) > 1:
        yield PRECISION
    sources = sorted({run.timed.source for run in _timed(ranking)})
    if len(sources) > 1:
        yield f"Times come from different sources ({joined(sources)}), whose errors differ."
