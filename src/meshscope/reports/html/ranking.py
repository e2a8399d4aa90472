"""The comparison of several runs: ranked by the request, with a waterfall against a baseline.

Only runs of the same work are ranked against each other: the same model, depth, batch, prompt and output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import polars as pl

from meshscope.analysis.catalog import Unavailable
from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.planner.suggestions import follow_ups
from meshscope.reports.answer import FitState
from meshscope.reports.charts.cost import Breakdown, scaling_chart, step_breakdowns
from meshscope.reports.charts.spec import Chart
from meshscope.reports.conditions import distinct_labels
from meshscope.reports.html.blocks import (
    Block,
    PageTable,
    Paragraph,
    columns,
    fold,
    page_table,
)
from meshscope.reports.html.hero import advices, warnings
from meshscope.reports.html.page_run import MAX_NAME, PageRun, n_decode_steps
from meshscope.reports.html.times import step_charts, waterfall_blocks
from meshscope.reports.model import (
    UNKNOWN_LABEL,
    CellValue,
    Unit,
    ViewTable,
    figure_column,
    joined,
    text_column,
    view_columns,
)
from meshscope.reports.plain import short
from meshscope.reports.ranking import EQUAL, OTHER_WORK, Ranking, rankings, request_s

MAX_COMPARED = 24  # runs in a chart
MIN_SIZES = 3  # numbers of devices from which scaling is drawn
RANKED = "Ranked by the end-to-end time of the request. Runs that do not fit are struck out and have no rank."
PRECISION = "The runs differ in precision, so their outputs differ."


def page_rankings(runs: Sequence[PageRun]) -> list[Ranking[PageRun]]:
    """The runs grouped by their work; a run of other work keeps its name."""
    groups = rankings(
        runs,
        lambda group: [
            short(label, MAX_NAME) for label in distinct_labels([run.run for run in group])
        ],
    )
    return [
        replace(group, names={run: run.name for run in group.runs}) if group.work is None else group
        for group in groups
    ]


def _timed(ranking: Ranking[PageRun]) -> tuple[PageRun, ...]:
    """The first runs with a time, those that do not fit last; charts compare no more."""
    timed = (*ranking.ranked, *(run for run in ranking.rest if request_s(run) is not None))
    return timed[:MAX_COMPARED]


def comparison_blocks(groups: Sequence[Ranking[PageRun]]) -> Iterator[Block]:
    """A table and charts for each group of runs with the same work; the charts of later groups are folded."""
    are_several = sum(ranking.work is not None for ranking in groups) > 1
    for number, ranking in enumerate(groups, start=1):
        yield Paragraph(text=ranking.work or OTHER_WORK, class_name="heading")
        if are_several and ranking.work is not None:
            yield Paragraph(text=f"{ranking.sentence}.", class_name="lead")
        for run in ranking.runs:
            for text, style in warnings(run):
                if "bad" in style and run.fits is not FitState.NO:
                    yield Paragraph(text=f"{run.name}: {text}", class_name=style)
        yield _table(ranking, number)
        if number == 1 and ranking.ranked:
            best = follow_ups([run.run for run in ranking.runs])
            steps = ((ranking.names[ranking.runs[at]], suggestion) for at, suggestion in best)
            yield from advices(ranking.ranked[0], steps)
        if ranking.work is not None and len(_timed(ranking)) > 1:
            drawn = _charts(ranking, number)
            yield from drawn if number == 1 else fold("Step times and their differences", drawn)


def _charts(ranking: Ranking[PageRun], number: int) -> Iterator[Block]:
    """Step times, what the difference of two runs is made of, and scaling over devices."""
    bars = [(run, bar) for run in _timed(ranking) for bar in run.strongest_costs.values()]
    yield from columns(step_charts([(ranking.names[run], bar) for run, bar in bars]))
    yield from waterfall_blocks(
        [(ranking.names[run], _breakdowns(run)) for run in _timed(ranking)],
        n_decode_steps=n_decode_steps(_timed(ranking)[0]),
        table_id=f"differences-{number}",
    )
    yield from columns(_scaling_charts(ranking))


def _table(ranking: Ranking[PageRun], number: int) -> PageTable:
    """The runs as rows, the fastest first, and the columns by interest; places that all share are a note."""
    sent = [] if _timed(ranking) else [f"sent per {phase} step_bytes" for phase in REQUEST_PHASES]
    places = [(_slice(run), run.timed.source.value) for run in ranking.runs]
    has_fits = len({run.fits for run in ranking.runs}) > 1
    is_shown = [len(set(column)) > 1 for column in zip(*places, strict=True)]
    shared = [word for word, shown in zip(places[0], is_shown, strict=True) if not shown]
    shared += [] if has_fits else [f"fits: {ranking.runs[0].fits.label}"]
    view = ViewTable(
        title="Runs",
        columns=(
            figure_column("rank"),
            text_column("run"),
            figure_column("end to end", Unit.SECONDS),
            text_column("against the best"),
            figure_column("decode tokens/s per chip"),
            *((text_column("fits"),) if has_fits else ()),
            *view_columns((), ("TTFT_s", "TPOT_s")),
            *map(text_column, ("interval", "memory of a device")),
            *(
                text_column(n)
                for n, shown in zip(("slice", "source"), is_shown, strict=True)
                if shown
            ),
            *view_columns((), sent),
        ),
        rows=tuple(
            (
                *_row(ranking, run, has_fits=has_fits),
                *(w for w, shown in zip(words, is_shown, strict=True) if shown),
                *_sent(ranking, run),
            )
            for run, words in zip(ranking.runs, places, strict=True)
        ),
        notes=(*([f"All: {', '.join(shared)}."] if shared else []), *_notes(ranking)),
    )
    best = ranking.best if len(ranking.ranked) > 1 else ranking.ranked[:1]
    classes = [
        "best" if run in best else "out" if run.fits is FitState.NO else "" for run in ranking.runs
    ]
    return page_table(f"runs-{number}", view, row_classes=classes)


def _slice(run: PageRun) -> str:
    topology = run.run.manifest.experiment.topology
    return UNKNOWN_LABEL if topology is None else topology.name


def _row(ranking: Ranking[PageRun], run: PageRun, *, has_fits: bool) -> tuple[CellValue, ...]:
    timed, fit = run.timed, run.answer.strongest.fit
    return (
        _rank(ranking, run),
        ranking.names[run],
        timed.e2e.value,
        _against_best(ranking, run),
        timed.decode_tokens_per_s_per_chip.value,
        *((run.fits.label,) if has_fits else ()),
        *(figure.value for figure in (timed.ttft, timed.tpot)),
        None if timed.e2e.low is None else timed.e2e.range_text,
        UNKNOWN_LABEL if fit is None else fit.text.partition(": ")[2],
    )


def _sent(ranking: Ranking[PageRun], run: PageRun) -> Iterator[float | None]:
    """Bytes of a step of each phase, for runs without times."""
    if not _timed(ranking):
        yield from (_sent_bytes(run, phase) for phase in REQUEST_PHASES)


def _rank(ranking: Ranking[PageRun], run: PageRun) -> int | None:
    """The place of a run, 1 for all that equal the best; None without a rank."""
    if run in ranking.best:
        return 1
    return ranking.ranked.index(run) + 1 if run in ranking.ranked else None


def _against_best(ranking: Ranking[PageRun], run: PageRun) -> str | None:
    """`best`, `equal`, or the time over that of the best; None without a rank."""
    if run not in ranking.ranked:
        return None
    best_s, seconds = request_s(ranking.ranked[0]), request_s(run)
    if run is ranking.ranked[0] or not best_s or seconds is None:
        return "best"
    return "equal" if run in ranking.best else f"{seconds / best_s:.2f} x"


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


def _sent_bytes(run: PageRun, phase: Phase) -> float | None:
    """Wire bytes of one step of the phase; None if the phase has no collectives."""
    volume = run.of_strongest("volume")
    if isinstance(volume, Unavailable):
        return None
    wire_bytes = volume.filter(pl.col("phase") == phase.value)["wire_bytes"]
    return float(wire_bytes.sum()) if len(wire_bytes) else None


def _breakdowns(run: PageRun) -> dict[Phase, Breakdown]:
    return step_breakdowns(run.inputs, run.strongest_costs)


def _scaling_charts(ranking: Ranking[PageRun]) -> Iterator[Chart]:
    """Step time over devices, if the runs have several sizes."""
    for phase in REQUEST_PHASES:
        points = sorted(
            (run.inputs.n_devices, costs[phase].step_s, ranking.names[run])
            for run in _timed(ranking)
            if run.inputs.n_devices and phase in (costs := run.strongest_costs)
        )
        if len({n for n, *_ in points}) >= MIN_SIZES:
            yield scaling_chart(phase, points)
