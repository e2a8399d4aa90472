"""The section on traffic: the matrix between devices, and the load of every link."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.metric import Unavailable
from meshscope.events.enums import Source
from meshscope.views.charts.traffic import Torus, matrices, tori
from meshscope.views.html import charts
from meshscope.views.html.blocks import Block, Panel, Section, page_table, unknown
from meshscope.views.html.drawing import ChartFactory
from meshscope.views.html.page_run import PageRun
from meshscope.views.model import CellValue, Unit, ViewTable, figure_column, text_column

N_BUSIEST = 5  # links per phase in the table


def traffic_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """The traffic matrix beside the links of the torus, for every run."""
    panels: list[Panel] = []
    for run in runs:
        imbalance = run.table("traffic_imbalance", "Traffic imbalance")
        panels += [
            Panel(title=run.title, blocks=(_matrix(run, factory), imbalance)),
            Panel(title=" " if run.title else "", blocks=tuple(_torus(run, factory))),
        ]
    return Section(
        id="traffic",
        title="Traffic between devices",
        lead="Left: bytes from device to device. Right: the same bytes on the links between chips, as routed by the interconnect model.",
        panels=tuple(panels),
        is_paired=True,
    )


def _matrix(run: PageRun, factory: ChartFactory) -> Block:
    all_matrices = matrices(run.inputs, run.source)
    if not all_matrices:
        return unknown("traffic matrix: the run has no collectives with known bytes and devices")
    first = all_matrices[0]
    total = sum(n_bytes for *_, n_bytes in first.cells)
    fold = f" Each row is {first.fold} devices." if first.fold > 1 else ""
    return factory.chart(
        "matrix",
        "Traffic matrix",
        charts.matrix_data(all_matrices),
        description=f"{first.n_devices} devices; {len(first.cells)} pairs exchange {total:,.0f} bytes in one {first.phase} step.",
        note=f"All-reduce, all-gather and reduce-scatter follow a ring in the order of the group; all-to-all is direct.{fold}",
    )


def _torus(run: PageRun, factory: ChartFactory) -> Iterator[Block]:
    links, topology = run.of_strongest("link_traffic"), run.inputs.topology
    if isinstance(links, Unavailable) or topology is None:
        reason = links.reason if isinstance(links, Unavailable) else "the run has no slice"
        yield unknown(f"link loads: {reason}")
        return
    by_phase = tori(links, topology, Source(links["source"][0]))
    first = by_phase[0]
    if topology.n_chips > charts.MAX_CHIPS:
        yield unknown(
            f"link chart: {topology.n_chips:,} chips exceed the limit of {charts.MAX_CHIPS:,}; the table lists the busiest links"
        )
    else:
        yield factory.chart(
            "torus",
            "Link loads",
            charts.torus_data(by_phase),
            description=f"{topology.name}; {len(first.links)} links carry traffic in one {first.phase} step.",
            note="Squares are chips with their device ids; each link is drawn once per direction.",
        )
    yield page_table(run.html_id("links"), _busiest_links(by_phase))


def _busiest_links(by_phase: Sequence[Torus]) -> ViewTable:
    return ViewTable(
        title="Busiest links",
        columns=(
            *map(text_column, ("phase", "from chip", "to chip")),
            figure_column("load", Unit.BYTES),
            figure_column("time at peak", Unit.SECONDS),
        ),
        rows=tuple(row for torus in by_phase for row in _busiest_rows(torus)),
    )


def _busiest_rows(torus: Torus) -> Iterator[tuple[CellValue, ...]]:
    """The links with the most bytes in one step, summed over all axes."""
    for link in sorted(torus.links, key=lambda link: -link.load_bytes)[:N_BUSIEST]:
        chips = (_chip(torus, link.slice_index, chip) for chip in (link.source, link.target))
        yield (torus.phase, *chips, link.load_bytes, link.link_s)


def _chip(torus: Torus, slice_index: int, chip: tuple[int, int, int]) -> str:
    coordinates = ",".join(map(str, chip))
    return f"{coordinates} of slice {slice_index}" if torus.n_slices > 1 else coordinates
