"""The comparison of several runs: ranked by the request, with a waterfall against a baseline.

Only runs of the same work are ranked against each other: the same model, depth, batch, prompt and output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from meshscope.analysis.catalog import Unavailable
from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.planner.suggestions import follow_ups
from meshscope.units import format_seconds
from meshscope.views.answer import FitState
from meshscope.views.charts.cost import Breakdown, step_breakdowns
from meshscope.views.html.blocks import (
    Block,
    Chart,
    PageTable,
    Paragraph,
    columns,
    fold,
    page_table,
)
from meshscope.views.html.hero import advices, warnings
from meshscope.views.html.page_run import MAX_NAME, PageRun, n_decode_steps
from meshscope.views.html.times import step_charts
from meshscope.views.html.waterfall import waterfall_blocks
from meshscope.views.model import (
    UNKNOWN_LABEL,
    CellValue,
    ViewTable,
    figure_column,
    joined,
    text_column,
    view_columns,
)
from meshscope.views.plain import short
from meshscope.views.run_label import distinct_labels, work_of

MAX_COMPARED = 24  # runs in a chart
MIN_SIZES = 3  # numbers of devices from which scaling is drawn
SAME_FRAC = 0.005  # two times that differ less are called the same
OTHER_WORK = "Runs of other work: another model or request. They are not ranked."
RANKED = "Ranked by the end-to-end time of the request. Runs that do not fit are struck out and have no rank."
OVERLAP = "The intervals of the first two runs overlap: an error that both share cancels, an independent one can reverse their order."
PRECISION = "The runs differ in precision, so their outputs differ."
SCALING = (
    "The line joins the fastest run of each size. Dashed: ideal scaling from the smallest size."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Runs of the same work: `ranked` fit or may fit, the fastest first; `rest` do not fit or have no time.

    `work` is None for runs that are each the only one of its work; none of them is ranked.
    """

    work: str | None
    ranked: tuple[PageRun, ...]
    rest: tuple[PageRun, ...]
    names: Mapping[int, str]  # within the group, by the number of the run

    @property
    def runs(self) -> tuple[PageRun, ...]:
        """All runs in the order of the table."""
        return (*self.ranked, *self.rest)

    def name(self, run: PageRun) -> str:
        """The name of a run within the group."""
        return self.names[run.number]

    @property
    def timed(self) -> tuple[PageRun, ...]:
        """The first runs with a time, those that do not fit last; charts compare no more."""
        timed = (*self.ranked, *(run for run in self.rest if request_s(run) is not None))
        return timed[:MAX_COMPARED]


def request_s(run: PageRun) -> float | None:
    """Seconds of the request, or of its only phase; None if unknown."""
    timed = run.timed
    return next((f.value for f in (timed.e2e, timed.ttft, timed.tpot) if f.value), None)


def rankings(runs: Sequence[PageRun]) -> list[Ranking]:
    """The runs grouped by their work, the largest group first, then all runs of other work."""
    groups: dict[str, list[PageRun]] = {}
    for run in runs:
        groups.setdefault(_work(run), []).append(run)
    shared = [_ranking(work, group) for work, group in groups.items() if len(group) > 1]
    others = [run for group in groups.values() if len(group) == 1 for run in group]
    names = {run.number: run.name for run in others}
    rest = [Ranking(work=None, ranked=(), rest=tuple(others), names=names)] if others else []
    return [*sorted(shared, key=lambda ranking: -len(ranking.runs)), *rest]


def _work(run: PageRun) -> str:
    """The work of a run; unknown work is no other run's."""
    return work_of(run.run) or f"unknown work of run {run.number}"


def _ranking(work: str, runs: Sequence[PageRun]) -> Ranking:
    able = [run for run in runs if _state(run) is not FitState.NO and request_s(run) is not None]
    ranked = sorted(able, key=lambda run: request_s(run) or 0.0)
    rest = tuple(run for run in runs if run not in ranked)
    names = (short(label, MAX_NAME) for label in distinct_labels([run.run for run in runs]))
    numbers = (run.number for run in runs)
    return Ranking(
        work=work,
        ranked=tuple(ranked),
        rest=rest,
        names=dict(zip(numbers, names, strict=True)),
    )


def _state(run: PageRun) -> FitState:
    """Whether the run fits, by its strongest source that knows."""
    states = [s.fit.state for s in run.answer.sources if s.fit is not None]
    return next(
        (state for state in reversed(states) if state is not FitState.UNKNOWN), FitState.UNKNOWN
    )


def headline(groups: Sequence[Ranking]) -> str:
    """The best run in one sentence, or how many requests have one."""
    shared = [ranking for ranking in groups if ranking.work is not None]
    if not shared:
        return "No two runs do the same work"
    if len(shared) > 1:
        return f"The fastest runs of {len(shared)} requests"
    return _best_sentence(shared[0])


def _best_sentence(ranking: Ranking) -> str:
    if not ranking.timed:
        return "No run has a time; the table compares their traffic"
    if not ranking.ranked:
        return "No run fits the memory of its devices"
    names = list(map(ranking.name, ranking.ranked))
    best_s, *others_s = (request_s(run) or 0.0 for run in ranking.ranked)
    seconds = format_seconds(best_s)
    if not others_s:
        return f"{names[0]} takes {seconds} for the request"
    if others_s[0] - best_s <= SAME_FRAC * others_s[0]:
        return f"{names[0]} and {names[1]} serve the request equally fast: {seconds}"
    return f"{names[0]} serves the request fastest: {seconds}"


def comparison_blocks(groups: Sequence[Ranking]) -> Iterator[Block]:
    """A table and charts for each group of runs with the same work; the charts of later groups are folded."""
    are_several = sum(ranking.work is not None for ranking in groups) > 1
    for number, ranking in enumerate(groups, start=1):
        yield Paragraph(text=ranking.work or OTHER_WORK, class_name="heading")
        if are_several and ranking.work is not None:
            yield Paragraph(text=f"{_best_sentence(ranking)}.", class_name="lead")
        for run in ranking.runs:
            for text, style in warnings(run):
                if "bad" in style and _state(run) is not FitState.NO:
                    yield Paragraph(text=f"{run.name}: {text}", class_name=style)
        yield _table(ranking, number)
        if number == 1 and ranking.ranked:
            best = follow_ups([run.run for run in ranking.runs])
            steps = ((ranking.name(ranking.runs[at]), suggestion) for at, suggestion in best)
            yield from advices(ranking.ranked[0], steps)
        if ranking.work is not None and len(ranking.timed) > 1:
            drawn = _charts(ranking, number)
            yield from drawn if number == 1 else fold("Step times and their differences", drawn)


def _charts(ranking: Ranking, number: int) -> Iterator[Block]:
    """Step times, what the difference of two runs is made of, and scaling over devices."""
    bars = [(run, bar) for run in ranking.timed for bar in run.strongest_costs.values()]
    yield from columns(step_charts([(ranking.name(run), bar) for run, bar in bars]))
    yield from waterfall_blocks(
        [(ranking.name(run), _breakdowns(run)) for run in ranking.timed],
        n_decode_steps=n_decode_steps(ranking.timed[0]),
        table_id=f"differences-{number}",
    )
    yield from columns(_scaling_charts(ranking))


def _table(ranking: Ranking, number: int) -> PageTable:
    """The runs as rows, the fastest first."""
    heads, times = ("run", "slice", "source"), ("TTFT_s", "TPOT_s", "end to end_s")
    sent = [] if ranking.timed else [f"sent per {phase} step_bytes" for phase in REQUEST_PHASES]
    view = ViewTable(
        title="Runs",
        columns=(
            figure_column("rank"),
            *view_columns(heads, times),
            *map(text_column, ("interval", "against the best")),
            figure_column("output tokens/s per chip"),
            *map(text_column, ("memory of a device", "fits")),
            *view_columns((), sent),
        ),
        rows=tuple(_row(ranking, run) for run in ranking.runs),
        notes=tuple(_notes(ranking)),
    )
    best = ranking.ranked[:1]
    classes = [
        "best" if run in best else "out" if _state(run) is FitState.NO else ""
        for run in ranking.runs
    ]
    return page_table(f"runs-{number}", view, row_classes=classes)


def _row(ranking: Ranking, run: PageRun) -> tuple[CellValue, ...]:
    timed, fit, topology = run.timed, run.answer.strongest.fit, run.run.manifest.experiment.topology
    request, rate = timed.e2e, timed.decode_tokens_per_s_per_chip.value
    memory = UNKNOWN_LABEL if fit is None else fit.text.partition(": ")[2]
    return (
        ranking.ranked.index(run) + 1 if run in ranking.ranked else None,
        ranking.name(run),
        UNKNOWN_LABEL if topology is None else topology.name,
        timed.source.value,
        *(f.value for f in (timed.ttft, timed.tpot, request)),
        None if request.low is None else request.range_text,
        _against_best(ranking, run),
        rate,
        memory,
        _state(run).label,
        *(() if ranking.timed else (_sent_bytes(run, phase) for phase in REQUEST_PHASES)),
    )


def _against_best(ranking: Ranking, run: PageRun) -> str | None:
    """`best`, or the time over that of the best; None without a rank."""
    if run not in ranking.ranked:
        return None
    best_s, seconds = request_s(ranking.ranked[0]), request_s(run)
    if run is ranking.ranked[0] or not best_s or seconds is None:
        return "best"
    return f"{seconds / best_s:.2f} x"


def _notes(ranking: Ranking) -> Iterator[str]:
    if ranking.work is None:
        return
    yield RANKED
    if len(ranking.ranked) > 1:
        first, second = (run.timed.e2e for run in ranking.ranked[:2])
        if first.high is not None and second.low is not None and second.low < first.high:
            yield OVERLAP
    workloads = [run.run.manifest.experiment.workload for run in ranking.runs]
    if len({w and (w.weight_dtype, w.activation_dtype, w.cache_dtype) for w in workloads}) > 1:
        yield PRECISION
    sources = sorted({run.timed.source for run in ranking.timed})
    if len(sources) > 1:
        yield f"Times come from different sources ({joined(sources)}), whose errors differ."


def _sent_bytes(run: PageRun, phase: Phase) -> float | None:
    """Wire bytes of one step of the phase; None if the phase has no collectives."""
    volume = run.of_strongest("volume")
    if isinstance(volume, Unavailable):
        return None
    wire_bytes = volume.filter(pl.col("phase") == phase.value)["wire_bytes"]
    return float(wire_bytes.sum()) if len(wire_bytes) else None


def _breakdowns(run: PageRun) -> dict[Phase, Breakdown]:
    return step_breakdowns(run.inputs, run.strongest_costs)


def _scaling_charts(ranking: Ranking) -> Iterator[Chart]:
    """Step time over devices, if the runs have several sizes."""
    for phase in REQUEST_PHASES:
        points = sorted(
            (run.inputs.n_devices, costs[phase].step_s, ranking.name(run))
            for run in ranking.timed
            if run.inputs.n_devices and phase in (costs := run.strongest_costs)
        )
        line = {"name": f"{phase} step", "points": [[name, n, s] for n, s, name in points]}
        if len({n for n, *_ in points}) >= MIN_SIZES:
            described = (f"{name} on {n} devices {format_seconds(s)}" for n, s, name in points)
            yield Chart(
                kind="scaling",
                title=f"{phase.capitalize()} step time over devices",
                description="; ".join(described),
                data={"unit": "s", "lines": [line]},
                note=SCALING,
            )
