"""Who sends how much to whom: the matrix between devices, and the load of every link."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.metric import Unavailable
from meshscope.events.enums import Source
from meshscope.views.charts.traffic import Torus, matrices, tori
from meshscope.views.html import charts
from meshscope.views.html.blocks import (
    Block,
    Cell,
    Panel,
    Section,
    cell,
    table_of_rows,
    unknown,
)
from meshscope.views.html.drawing import Charts
from meshscope.views.html.side import PageRun

N_BUSIEST = 5  # links of each phase that are listed


def traffic_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """The matrix between devices beside the links of the torus, of every run."""
    panels: list[Panel] = []
    for run in runs:
        panels += [
            Panel(
                title=run.title,
                blocks=(_matrix(run, new), run.table("traffic_imbalance", "Imbalance of traffic")),
            ),
            Panel(title=" " if run.title else "", blocks=tuple(_torus(run, new))),
        ]
    return Section(
        id="traffic",
        title="Who sends how much to whom",
        lead="Left the logical traffic from device to device, right the same bytes over the links between chips, as the interconnect model routes them.",
        panels=tuple(panels),
        is_paired=True,
    )


def _matrix(run: PageRun, new: Charts) -> Block:
    found = matrices(run.subject, run.source)
    if not found:
        return unknown(
            "the traffic matrix: the run has no collectives with known bytes and devices"
        )
    total = sum(n_bytes for *_, n_bytes in found[0].cells)
    folded = f" A row stands for {found[0].fold} devices." if found[0].fold > 1 else ""
    return new.new(
        "matrix",
        "Traffic matrix",
        charts.matrix_data(found),
        about=f"{found[0].n_devices} devices; {len(found[0].cells)} pairs talk, {total:,.0f} bytes together in a {found[0].phase} step.",
        note=f"All-reduce, all-gather and reduce-scatter go round a ring in the order of the group, all-to-all directly.{folded}",
    )


def _torus(run: PageRun, new: Charts) -> Iterator[Block]:
    found, topology = run.of_strongest("link_traffic"), run.subject.topology
    if isinstance(found, Unavailable) or topology is None:
        yield unknown(
            f"link loads: {found.reason if isinstance(found, Unavailable) else 'no slice'}"
        )
        return
    source = Source(found["source"][0])
    drawn = tori(found, topology, source)
    if topology.n_chips > charts.MAX_CHIPS:
        yield unknown(
            f"{topology.n_chips:,} chips are not drawn, only up to {charts.MAX_CHIPS:,}; the table has the busiest links"
        )
    else:
        yield new.new(
            "torus",
            "Load of every link",
            charts.torus_data(drawn),
            about=f"{topology.name}; {len(drawn[0].links)} links carry something in a {drawn[0].phase} step.",
            note="A square is a chip with its device ids; each link is drawn twice, once in each direction.",
        )
    names = ("phase", "from chip", "to chip", "load", "time at peak")
    rows = [row for torus in drawn for row in _busiest(torus)]
    yield table_of_rows(run.key("links"), "The busiest links", names, rows)


def _busiest(torus: Torus) -> Iterator[list[Cell]]:
    """Those that carry most in a step of the phase, all axes together."""
    for link in sorted(torus.links, key=lambda link: -link.load_bytes)[:N_BUSIEST]:
        yield [
            Cell(text=torus.phase),
            Cell(text=_chip_words(torus, link.slice_index, link.source)),
            Cell(text=_chip_words(torus, link.slice_index, link.target)),
            cell("load_bytes", link.load_bytes),
            cell("link_s", link.link_s),
        ]


def _chip_words(torus: Torus, slice_index: int, chip: tuple[int, int, int]) -> str:
    place = ",".join(map(str, chip))
    return f"{place} of slice {slice_index}" if torus.n_slices > 1 else place
