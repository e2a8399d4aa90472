"""The sections of a run in order; a section without data is left out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshscope.analysis.join import Agreement
from meshscope.reports.html.blocks import Block
from meshscope.reports.html.bytes import roofline_blocks, size_blocks, traffic_blocks
from meshscope.reports.html.collectives import (
    collective_blocks,
    condition_blocks,
    inserted_blocks,
    source_blocks,
)
from meshscope.reports.html.page_run import PageRun
from meshscope.reports.html.times import (
    cost_blocks,
    interval_blocks,
    speculation_blocks,
    timeline_blocks,
)

COST = "One step of each phase on one device. Communication is exposed while the device computes nothing; communication hidden behind compute costs no time."
SPECULATION = "A draft proposes tokens, and the model verifies them in one decode step. The verification and the draft have run folders of their own."
COLLECTIVES = "Per step on one device; equal layers share a line. Payload is the full array of one operation, wire the bytes that one device sends for it."
SOURCES = (
    "Counts, arrays, groups and bytes must match exactly; times must agree within their intervals."
)
TIMELINE = "One device. Lanes: compute by part of the model, collectives by mesh axis, copies between memories. Drag to pan; zoom with the buttons, with + and -, or with Ctrl and the mouse wheel."
TRAFFIC = "Bytes from device to device, and the same bytes on the links between chips, as routed by the interconnect model."
INTERVALS = "When each mesh axis has traffic in a step, how long it is idle, and what repeats."
ROOFLINE = (
    "Achieved FLOP/s of each part of the model during compute, against the peaks of the chip."
)
SIZES = "How often each payload occurs in one step, and the bandwidth that it achieves."
INSERTED = "Who inserted each collective, its opcode, and the algorithm that the compiler chose."


@dataclass(frozen=True, slots=True, kw_only=True)
class _SectionKind:
    """A section of every run: what makes its blocks, and whether it is open at first."""

    name: str
    title: str
    lead: str
    blocks: Callable[[PageRun], Iterator[Block]]
    is_open: bool = False


KINDS = (
    _SectionKind(name="cost", title="Step time", lead=COST, blocks=cost_blocks, is_open=True),
    _SectionKind(
        name="speculation",
        title="Speculative decoding",
        lead=SPECULATION,
        blocks=speculation_blocks,
        is_open=True,
    ),
    _SectionKind(
        name="timeline", title="Timeline", lead=TIMELINE, blocks=timeline_blocks, is_open=True
    ),
    _SectionKind(
        name="collectives",
        title="Collectives",
        lead=COLLECTIVES,
        blocks=collective_blocks,
        is_open=True,
    ),
    _SectionKind(
        name="sources", title="Agreement of sources and totals", lead=SOURCES, blocks=source_blocks
    ),
    _SectionKind(name="roofline", title="Roofline", lead=ROOFLINE, blocks=roofline_blocks),
    _SectionKind(
        name="traffic", title="Traffic between devices", lead=TRAFFIC, blocks=traffic_blocks
    ),
    _SectionKind(
        name="intervals", title="Traffic intervals", lead=INTERVALS, blocks=interval_blocks
    ),
    _SectionKind(name="sizes", title="Payload sizes and bandwidth", lead=SIZES, blocks=size_blocks),
    _SectionKind(
        name="inserted", title="Compiler decisions", lead=INSERTED, blocks=inserted_blocks
    ),
    _SectionKind(
        name="conditions", title="Conditions and versions", lead="", blocks=condition_blocks
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]
    is_open: bool


def _is_contradicted(run: PageRun) -> bool:
    """Whether the sources of the run disagree on collectives or times."""
    return any(
        a.agreement is Agreement.DIFFERENT or a.is_time_within is False
        for a in run.answer.agreements
    )


def sections(run: PageRun) -> tuple[Section, ...]:
    """The sections of a run that have something to show."""
    every = (
        Section(
            id=run.html_id(kind.name),
            title=kind.title,
            lead=kind.lead,
            blocks=tuple(kind.blocks(run)),
            is_open=kind.is_open or (kind.name == "sources" and _is_contradicted(run)),
        )
        for kind in KINDS
    )
    return tuple(section for section in every if section.blocks)
