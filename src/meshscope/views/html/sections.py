"""The sections of the page in order; a section without data says what is missing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshscope.views.html.blocks import Block
from meshscope.views.html.bytes import (
    memory_blocks,
    roofline_blocks,
    size_blocks,
    traffic_panels,
)
from meshscope.views.html.collectives import (
    collective_blocks,
    condition_blocks,
    experiment_blocks,
    inserted_blocks,
    source_blocks,
)
from meshscope.views.html.page_run import PageRun
from meshscope.views.html.plans import plan_blocks
from meshscope.views.html.times import cost_panels, interval_blocks, timeline_blocks

COST = "One step of each phase on one device. Communication is exposed while the device computes nothing; communication hidden behind compute costs no time."
COLLECTIVES = "Per step on one device; equal layers share a line. Payload is the full array of one operation, wire the bytes that one device sends for it."
TRAFFIC = "Left: bytes from device to device. Right: the same bytes on the links between chips, as routed by the interconnect model."
TIMELINE = "One device. Lanes: compute by part of the model, collectives by mesh axis, copies between memories. Drag to pan; zoom with the buttons, with + and -, or with Ctrl and the mouse wheel."
INTERVALS = "When each mesh axis has traffic in a step, how long it is idle, and what repeats."
ROOFLINE = (
    "Achieved FLOP/s of each part of the model during compute, against the peaks of the chip."
)
SOURCES = (
    "Counts, arrays, groups and bytes must match exactly; collectives without a match are listed."
)
INSERTED = "Who inserted each collective, its opcode, and the algorithm that the compiler chose."

Panel = tuple[str, Sequence[Block]]  # title, which is empty for all runs together, and content


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page; `is_paired` puts its panels side by side if the window is wide."""

    id: str
    title: str
    lead: str
    panels: Sequence[Panel]
    is_paired: bool = False


def sections(runs: Sequence[PageRun]) -> tuple[Section, ...]:
    """All sections in the order of the page; several runs are compared first."""
    are_several = len(runs) > 1

    def by_run(blocks: Callable[[PageRun], Iterable[Block]]) -> list[Panel]:
        return [(run.title, tuple(blocks(run))) for run in runs]

    def for_all(blocks: Iterator[Block]) -> list[Panel]:
        return [("", tuple(blocks))]

    cost = Section("cost", "Step time", COST, cost_panels(runs))
    plans = Section("plans", "Comparison of plans", "", for_all(plan_blocks(runs)))
    experiment, conditions = by_run(experiment_blocks), by_run(condition_blocks)
    return (
        Section("experiment", "Experiment", "", experiment, are_several),
        *((plans, cost) if are_several else (cost, plans)),
        Section("collectives", "Collectives", COLLECTIVES, by_run(collective_blocks)),
        Section(
            "traffic", "Traffic between devices", TRAFFIC, traffic_panels(runs), is_paired=True
        ),
        Section("timeline", "Timeline", TIMELINE, by_run(timeline_blocks)),
        Section("intervals", "Traffic intervals", INTERVALS, by_run(interval_blocks)),
        Section(
            "sizes",
            "Payload sizes",
            "How often each payload occurs in one step.",
            by_run(size_blocks),
        ),
        Section("roofline", "Roofline", ROOFLINE, by_run(roofline_blocks)),
        Section("memory", "Memory", "", for_all(memory_blocks(runs))),
        Section("sources", "Predicted, compiled, measured", SOURCES, by_run(source_blocks)),
        Section("inserted", "Compiler decisions", INSERTED, by_run(inserted_blocks)),
        Section("conditions", "Conditions and versions", "", conditions, are_several),
    )
