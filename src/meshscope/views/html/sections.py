"""The sections of the page, from what was asked to the versions; none disappears, it says what it lacks."""

from collections.abc import Sequence

from meshscope.views.html.asked import asked_section, conditions_section
from meshscope.views.html.blocks import (
    Panel,
    Section,
)
from meshscope.views.html.collectives import collectives_block, inserted_blocks, source_blocks
from meshscope.views.html.cost import cost_section
from meshscope.views.html.drawing import Charts
from meshscope.views.html.limits import memory_section, roofline_section, sizes_section
from meshscope.views.html.plans import plans_section
from meshscope.views.html.side import PageRun
from meshscope.views.html.timelines import intervals_section, timeline_section
from meshscope.views.html.traffic import traffic_section


def sections(runs: Sequence[PageRun], new: Charts) -> tuple[Section, ...]:
    """All sections, in the order of the page."""
    return (
        asked_section(runs),
        *_cost_and_plans(runs, new),
        _collectives(runs),
        traffic_section(runs, new),
        timeline_section(runs, new),
        intervals_section(runs, new),
        sizes_section(runs, new),
        roofline_section(runs, new),
        memory_section(runs, new),
        _sources(runs),
        _inserted(runs),
        conditions_section(runs),
    )


def _cost_and_plans(runs: Sequence[PageRun], new: Charts) -> tuple[Section, Section]:
    """Several runs are told apart first."""
    if len(runs) > 1:
        plans = plans_section(runs, new)
        return plans, cost_section(runs, new)
    return cost_section(runs, new), plans_section(runs, new)


def _collectives(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="collectives",
        title="The collectives",
        lead="Of one step on one device, layers of a kind on one line. Payload is the whole array of one operation, wire what one device sends for it.",
        panels=tuple(Panel(title=run.title, blocks=(collectives_block(run),)) for run in runs),
    )


def _sources(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="sources",
        title="Predicted, compiled, measured",
        lead="Counts, arrays, groups and bytes must agree exactly; a row without a partner is a finding.",
        panels=tuple(Panel(title=run.title, blocks=tuple(source_blocks(run))) for run in runs),
    )


def _inserted(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="inserted",
        title="What the compiler made of it",
        lead="Who put each collective there, what the compiler calls it, and the algorithm that it chose.",
        panels=tuple(Panel(title=run.title, blocks=tuple(inserted_blocks(run))) for run in runs),
    )
