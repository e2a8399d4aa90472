"""The sections on what was run, under which conditions, and what is unknown."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.catalog import METRICS
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.unattributed import unattributed
from meshscope.views.conditions import condition_lines
from meshscope.views.html.blocks import (
    Block,
    DescriptionList,
    Panel,
    Paragraph,
    Section,
    unknown,
)
from meshscope.views.html.page_run import PageRun
from meshscope.views.plain import short
from meshscope.views.words import counted

MAX_CONDITION = 600  # characters
MAX_REASONS = 8
EXPERIMENT = ("model", "slice", "plan", "request")  # conditions at the top of the page


def experiment_section(runs: Sequence[PageRun]) -> Section:
    """Model, slice, plan and request of every run."""
    return Section(
        id="experiment",
        title="Experiment",
        lead="",
        panels=tuple(
            Panel(title=run.title, blocks=(DescriptionList(pairs=_experiment(run)),))
            for run in runs
        ),
        is_paired=len(runs) > 1,
    )


def _experiment(run: PageRun) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in _conditions(run) if pair[0] in EXPERIMENT)


def _conditions(run: PageRun) -> list[tuple[str, str]]:
    return [(name, short(value, MAX_CONDITION)) for name, value in condition_lines(run.run)]


def conditions_section(runs: Sequence[PageRun]) -> Section:
    """Versions, flags, the command, and the metrics that are unavailable."""
    return Section(
        id="conditions",
        title="Conditions and versions",
        lead="",
        panels=tuple(
            Panel(title=run.title, blocks=(_other_conditions(run), *_unavailable(run)))
            for run in runs
        ),
        is_paired=len(runs) > 1,
    )


def _other_conditions(run: PageRun) -> DescriptionList:
    pairs = [pair for pair in _conditions(run) if pair[0] not in EXPERIMENT]
    manifest = run.run.manifest
    command = short(" ".join(manifest.command), MAX_CONDITION)
    return DescriptionList(
        pairs=(*pairs, ("created", short(manifest.created)), ("command", command))
    )


def _unavailable(run: PageRun) -> Iterator[Block]:
    """The unattributed collectives, and the metrics without values by reason."""
    lost = unattributed(run.run.rows_of(run.source))
    if lost.count:
        reasons = "; ".join(f"{n} x {short(text, 200)}" for text, n in lost.reasons[:MAX_REASONS])
        text = f"Unattributed: {counted(lost.count, 'collective')}. {reasons}"
        yield Paragraph(text=text, class_name="note warn")
    titles: dict[str, list[str]] = {}
    for metric in METRICS:
        result = run.metrics[metric.name]
        if isinstance(result, Unavailable):
            titles.setdefault(result.reason, []).append(metric.title)
    for reason, names in titles.items():
        yield unknown(f"{', '.join(names)}: {reason}")
