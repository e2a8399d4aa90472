"""The sections of the page in order; a section without data says what is missing."""

from collections.abc import Sequence

from meshscope.views.html.blocks import Panel, Section
from meshscope.views.html.collectives import collectives_block, inserted_blocks, source_blocks
from meshscope.views.html.conditions import conditions_section, experiment_section
from meshscope.views.html.cost import cost_section
from meshscope.views.html.drawing import ChartFactory
from meshscope.views.html.page_run import PageRun
from meshscope.views.html.plans import plans_section
from meshscope.views.html.sizes import memory_section, roofline_section, sizes_section
from meshscope.views.html.timelines import intervals_section, timeline_section
from meshscope.views.html.traffic import traffic_section


def sections(runs: Sequence[PageRun], factory: ChartFactory) -> tuple[Section, ...]:
    """All sections in the order of the page."""
    return (
        experiment_section(runs),
        *_cost_and_plans(runs, factory),
        _collectives(runs),
        traffic_section(runs, factory),
        timeline_section(runs, factory),
        intervals_section(runs, factory),
        sizes_section(runs, factory),
        roofline_section(runs, factory),
        memory_section(runs, factory),
        _sources(runs),
        _inserted(runs),
        conditions_section(runs),
    )


def _cost_and_plans(runs: Sequence[PageRun], factory: ChartFactory) -> tuple[Section, Section]:
    """Several runs are compared first."""
    if len(runs) > 1:
        plans = plans_section(runs, factory)
        return plans, cost_section(runs, factory)
    return cost_section(runs, factory), plans_section(runs, factory)


def _collectives(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="collectives",
        title="Collectives",
        lead="Per step on one device; equal layers share a line. Payload is the full array of one operation, wire the bytes that one device sends for it.",
        panels=tuple(Panel(title=run.title, blocks=(collectives_block(run),)) for run in runs),
    )


def _sources(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="sources",
        title="Predicted, compiled, measured",
        lead="Counts, arrays, groups and bytes must match exactly; collectives without a match are listed.",
        panels=tuple(Panel(title=run.title, blocks=tuple(source_blocks(run))) for run in runs),
    )


def _inserted(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="inserted",
        title="Compiler decisions",
        lead="Who inserted each collective, its opcode, and the algorithm that the compiler chose.",
        panels=tuple(Panel(title=run.title, blocks=tuple(inserted_blocks(run))) for run in runs),
    )
