"""Sizes of collectives, what each part reaches below the roofs of the chip, and the memory."""

from collections.abc import Sequence
from typing import Any

from meshscope.analysis.metric import Unavailable
from meshscope.analysis.roofline import RooflineBound, roofline_bounds, roofline_of
from meshscope.events.enums import Source
from meshscope.units import format_gib
from meshscope.views.charts.sizes import size_counts
from meshscope.views.html import charts
from meshscope.views.html.blocks import (
    Block,
    Cell,
    Panel,
    Section,
    cell,
    shown,
    table_of_rows,
    unknown,
)
from meshscope.views.html.drawing import Charts, definition
from meshscope.views.html.side import PageRun
from meshscope.views.roofs import LABELS

NO_ROOF = (
    "a point needs FLOPs and bytes of a part with its time, and published peaks of the chip; "
    "compiled runs for TPUs and measured ones have them"
)


def sizes_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """How often each payload occurs, and the bandwidth that collectives reach."""
    panels: list[Panel] = []
    for run in runs:
        found = run.of_strongest("size_distribution")
        counts = (
            () if isinstance(found, Unavailable) else size_counts(found, Source(found["source"][0]))
        )
        blocks: list[Block] = []
        if counts:
            about = "; ".join(
                f"{c.count} {c.kind} of {c.payload_bytes:,} bytes in {c.phase}" for c in counts[:12]
            )
            blocks.append(
                new.new(
                    "sizes", "Sizes of collectives", charts.sizes_data(counts), about=f"{about}."
                )
            )
        else:
            reason = (
                found.reason if isinstance(found, Unavailable) else "no collective has a known size"
            )
            blocks.append(unknown(reason))
        blocks.append(run.table("size_summary", "Sizes in figures"))
        blocks.append(run.table("bandwidth", "Bandwidth reached", note=definition("bandwidth")))
        panels.append(Panel(title=run.title, blocks=tuple(blocks)))
    return Section(
        id="sizes",
        title="Sizes",
        lead="How often each payload occurs in one step.",
        panels=tuple(panels),
    )


def roofline_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """Each part below the roofs of the chip, which roof binds, MFU and MBU."""
    panels: list[Panel] = []
    for run in runs:
        roof = roofline_of(run.subject)
        blocks: list[Block] = [unknown(NO_ROOF)]
        if roof is not None:
            parts = "; ".join(
                f"{p.part} in {p.phase} {p.flops_per_s / roof.peaks.flops_per_s:.0%} of the peak"
                for p in roof.points[:12]
            )
            note = "A hollow mark is predicted. FLOPs and bytes as the shapes of the operations say, over compute time alone. What is copied to the chip ahead of a part, such as weights in decode, is not among its bytes: its point stands too far right. What stays on the chip is, and can put it above the slope."
            blocks = [
                new.new(
                    "roofline",
                    "Roofline of one device",
                    charts.roof_data(roof),
                    about=f"{parts}.",
                    note=note,
                )
            ]
        blocks.append(_roofs(run))
        blocks += [
            run.table("mfu", "MFU", note=definition("mfu")),
            run.table("mbu", "MBU", note=definition("mbu")),
        ]
        panels.append(Panel(title=run.title, blocks=tuple(blocks)))
    return Section(
        id="roofline",
        title="Roofline",
        lead="What each part of the model reaches while it computes, against what the chip can do at best.",
        panels=tuple(panels),
    )


def _roofs(run: PageRun) -> Block:
    """Which of three roofs binds each part, as `show --roofline` prints."""
    chip = None if run.subject.topology is None else run.subject.topology.chip
    rows = [
        [Cell(text=time.phase.value), Cell(text=time.source.value), *_roof_cells(one)]
        for time in run.subject.times
        for one in (() if chip is None else roofline_bounds(time, chip))
    ]
    if not rows:
        return unknown("which roof binds: no step of the run is modelled")
    names = (
        "phase",
        "source",
        "part",
        "compute roof",
        "HBM roof",
        "wires",
        "modelled",
        "at the roof",
    )
    note = "Least time of each part at the peak of the matrix units, of the HBM, and by the interconnect model; the longest binds."
    return table_of_rows(run.key("roofs"), "Which roof binds", (*names, "binds"), rows, note=note)


def _roof_cells(one: RooflineBound) -> list[Cell]:
    seconds = (one.compute_s, one.hbm_s, one.interconnect_s, one.taken_s)
    return [
        Cell(text=shown(one.part, 40)),
        *(cell("roof_s", value) for value in seconds),
        cell("roof_frac", one.roof_frac),
        Cell(text=LABELS[one.binding]),
    ]


def memory_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """Weights, cache and temporaries of one device against its HBM."""
    bars = [
        (" ".join(filter(None, ("" if run.is_alone else run.letter, source.value))), memory)
        for run in runs
        for source, memory in run.run.memory.items()
    ]
    blocks: list[Block] = []
    if bars:
        blocks.append(
            new.new(
                "bars",
                "Memory of one device",
                charts.memory_data(bars),
                about="; ".join(f"{name} {format_gib(_known_bytes(m))}" for name, m in bars) + ".",
                note="Dashed: the HBM of one device. A prediction knows no temporaries: they are the compiler's.",
            )
        )
    blocks += [run.table("hbm", run.named("memory").capitalize()) for run in runs]
    return Section(
        id="memory", title="Memory", lead="", panels=(Panel(title="", blocks=tuple(blocks)),)
    )


def _known_bytes(memory: Any) -> int:
    return memory.total_bytes or memory.weights_bytes + memory.kv_cache_bytes
