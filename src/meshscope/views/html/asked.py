"""What was asked, under which conditions, and what the run cannot tell."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.catalog import METRICS
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.unattributed import unattributed
from meshscope.views.conditions import condition_lines
from meshscope.views.html.blocks import (
    Block,
    FactList,
    Panel,
    Paragraph,
    Section,
    shown,
    unknown,
)
from meshscope.views.html.side import PageRun

ASKED = (
    "model",
    "slice",
    "plan",
    "request",
)  # conditions that stand at the top; the others at the end


def asked_section(runs: Sequence[PageRun]) -> Section:
    """Model, slice, plan and request of every run."""
    return Section(
        id="asked",
        title="What was asked",
        lead="",
        panels=tuple(Panel(title=run.title, blocks=(_facts(run, is_asked=True),)) for run in runs),
        is_paired=len(runs) > 1,
    )


def _facts(run: PageRun, *, is_asked: bool) -> FactList:
    lines = [
        (name, shown(value, 600))
        for name, value in condition_lines(run.run)
        if (name in ASKED) == is_asked
    ]
    made = [
        ("made", shown(run.run.manifest.created)),
        ("by", shown(" ".join(run.run.manifest.command), 600)),
    ]
    return FactList(facts=tuple(lines if is_asked else [*lines, *made]))


def conditions_section(runs: Sequence[PageRun]) -> Section:
    """Versions, flags, the command, and what the run cannot tell."""
    return Section(
        id="conditions",
        title="Conditions and versions",
        lead="",
        panels=tuple(
            Panel(title=run.title, blocks=(_facts(run, is_asked=False), *_not_known(run)))
            for run in runs
        ),
        is_paired=len(runs) > 1,
    )


def _not_known(run: PageRun) -> Iterator[Block]:
    """What the run cannot tell, by reason."""
    reasons: dict[str, list[str]] = {}
    for metric in METRICS:
        found = run.metrics[metric.name]
        if isinstance(found, Unavailable):
            reasons.setdefault(found.reason, []).append(metric.title)
    lost = unattributed(run.run.rows_of(run.source))
    if lost.count:
        told = "; ".join(f"{n} x {shown(reason, 200)}" for reason, n in list(lost.reasons)[:8])
        yield Paragraph(
            text=f"Not attributed: {lost.count} collectives. {told}", class_name="note warn"
        )
    for reason, titles in reasons.items():
        yield unknown(f"{', '.join(titles)}: {reason}")
