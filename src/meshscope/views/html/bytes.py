"""The content of the sections on traffic, payload sizes, the roofline and memory."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.catalog import Unavailable
from meshscope.analysis.roofline import roofline_bounds, roofline_of
from meshscope.events.enums import Source
from meshscope.units import format_gib
from meshscope.views.charts.traffic import Torus, matrices, tori
from meshscope.views.charts.volume import size_counts
from meshscope.views.html import charts
from meshscope.views.html.blocks import Block, Chart, page_table, unknown
from meshscope.views.html.page_run import PageRun
from meshscope.views.model import ViewTable, view_columns
from meshscope.views.roofs import LABELS

N_BUSIEST = 5  # links per phase in the table
MAX_DESCRIBED = 12  # marks that the description of a chart lists
NO_ROOFLINE = "a point needs the FLOPs, bytes and time of a part, and the chip needs published peaks; compiled runs for TPUs and measured runs have them"
RINGS = "All-reduce, all-gather and reduce-scatter follow a ring in the order of the group; all-to-all is direct."
ROOFLINE_NOTE = "Hollow marks are predicted. FLOPs and bytes come from the shapes of the operations and are divided by compute time alone. Bytes prefetched ahead of a part, such as weights in decode, are not counted and shift its point to the right. Bytes that stay in VMEM are counted and can lift a point above the roofline."
BOUNDS_NOTE = "Lower bounds of each part: peak FLOP/s, peak HBM bandwidth, and the interconnect model. The largest bound is binding."
MEMORY_NOTE = "Dashed: HBM capacity of one device. Predictions do not include temporaries, which the compiler allocates."


def traffic_panels(runs: Sequence[PageRun]) -> list[tuple[str, Sequence[Block]]]:
    """The traffic matrix beside the links of the torus, for every run."""
    panels: list[tuple[str, Sequence[Block]]] = []
    for run in runs:
        imbalance = run.table("traffic_imbalance", "Traffic imbalance")
        panels += [(run.title, (_matrix(run), imbalance))]
        panels += [(" " if run.title else "", tuple(_torus(run)))]
    return panels


def _matrix(run: PageRun) -> Block:
    all_matrices = matrices(run.inputs, run.source)
    if not all_matrices:
        return unknown("traffic matrix: the run has no collectives with known bytes and devices")
    first = all_matrices[0]
    total = sum(n_bytes for *_, n_bytes in first.cells)
    fold = f" Each row is {first.fold} devices." if first.fold > 1 else ""
    return Chart(
        kind="matrix",
        title="Traffic matrix",
        description=f"{first.n_devices} devices; {len(first.cells)} pairs exchange {total:,.0f} bytes in one {first.phase} step",
        data=charts.matrix_data(all_matrices),
        note=f"{RINGS}{fold}",
    )


def _torus(run: PageRun) -> Iterator[Block]:
    links, topology = run.of_strongest("link_traffic"), run.inputs.topology
    if isinstance(links, Unavailable) or topology is None:
        reason = links.reason if isinstance(links, Unavailable) else "the run has no slice"
        yield unknown(f"link loads: {reason}")
        return
    by_phase = tori(links, topology, Source(links["source"][0]))
    if topology.n_chips > charts.MAX_CHIPS:
        yield unknown(
            f"link chart: {topology.n_chips:,} chips exceed the limit of {charts.MAX_CHIPS:,}; the table lists the busiest links"
        )
    else:
        yield Chart(
            kind="torus",
            title="Link loads",
            description=f"{topology.name}; {len(by_phase[0].links)} links carry traffic in one {by_phase[0].phase} step",
            data=charts.torus_data(by_phase),
            note="Squares are chips with their device ids; each link is drawn once per direction.",
        )
    view = ViewTable(
        title="Busiest links",
        columns=view_columns(("phase", "from chip", "to chip"), ("load_bytes", "time at peak_s")),
        rows=tuple(row for torus in by_phase for row in _busiest_rows(torus)),
    )
    yield page_table(run.html_id("links"), view)


def _busiest_rows(torus: Torus) -> Iterator[tuple[str | float | None, ...]]:
    """The links with the most bytes in one step, summed over all axes."""
    for link in sorted(torus.links, key=lambda link: -link.load_bytes)[:N_BUSIEST]:
        of_slice = f" of slice {link.slice_index}" if torus.n_slices > 1 else ""
        chips = (f"{','.join(map(str, chip))}{of_slice}" for chip in (link.source, link.target))
        yield (torus.phase, *chips, link.load_bytes, link.link_s)


def size_blocks(run: PageRun) -> Iterator[Block]:
    """Counts of each payload size, and the achieved bandwidth."""
    sizes = run.of_strongest("size_distribution")
    if isinstance(sizes, Unavailable):
        yield unknown(sizes.reason)
    elif counts := size_counts(sizes, Source(sizes["source"][0])):
        described = (
            f"{c.count} {c.kind} of {c.payload_bytes:,} bytes in {c.phase}" for c in counts
        )
        yield Chart(
            kind="sizes",
            title="Payload sizes",
            description="; ".join(list(described)[:MAX_DESCRIBED]),
            data=charts.sizes_data(counts),
        )
    else:
        yield unknown("no collective has a known size")
    yield run.table("size_summary", "Summary of payload sizes")
    yield run.table("bandwidth", "Achieved bandwidth", is_defined=True)


def roofline_blocks(run: PageRun) -> Iterator[Block]:
    """Each part below the roofline of the chip, its binding resource, MFU and MBU."""
    roofline = roofline_of(run.inputs)
    if roofline is None:
        yield unknown(NO_ROOFLINE)
    else:
        peak = roofline.peaks.flops_per_s
        described = (
            f"{p.part} in {p.phase} at {p.flops_per_s / peak:.0%} of peak FLOP/s"
            for p in roofline.points[:MAX_DESCRIBED]
        )
        yield Chart(
            kind="roofline",
            title="Roofline of one device",
            description="; ".join(described),
            data=charts.roofline_data(roofline),
            note=ROOFLINE_NOTE,
        )
    yield _bounds(run)
    yield run.table("mfu", "MFU", is_defined=True)
    yield run.table("mbu", "MBU", is_defined=True)


def _bounds(run: PageRun) -> Block:
    """The binding resource of each part, as `show --roofline` prints it."""
    chip = run.run.manifest.experiment.chip
    rows = [
        (
            *(t.phase.value, t.source.value, b.part, LABELS[b.binding]),
            *(b.compute_s, b.hbm_s, b.interconnect_s, b.taken_s, b.roof_frac),
        )
        for t in run.inputs.times
        for b in (() if chip is None else roofline_bounds(t, chip))
    ]
    if not rows:
        return unknown("the binding resource: no step of the run is modeled")
    bounds = ("compute bound_s", "HBM bound_s", "interconnect bound_s", "modeled_s")
    columns = view_columns(
        ("phase", "source", "part", "bound by"), (*bounds, "bound / modeled_frac")
    )
    view = ViewTable(title="Binding resource", columns=columns, rows=tuple(rows))
    return page_table(run.html_id("bounds"), view, note=BOUNDS_NOTE)


def memory_blocks(runs: Sequence[PageRun]) -> Iterator[Block]:
    """Weights, KV cache and temporaries of one device, against its HBM."""
    bars = [(r.with_letter(source.value), m) for r in runs for source, m in r.run.memory.items()]
    if bars:
        totals = ((n, m.total_bytes or m.weights_bytes + m.kv_cache_bytes) for n, m in bars)
        yield Chart(
            kind="bars",
            title="Memory of one device",
            description="; ".join(f"{name} {format_gib(total)}" for name, total in totals),
            data=charts.memory_data(bars),
            note=MEMORY_NOTE,
        )
    for run in runs:
        yield run.table("hbm", run.with_letter("memory").capitalize())
