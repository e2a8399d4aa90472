"""The content of the sections on traffic, payload sizes, the roofline and memory."""

from collections import Counter
from collections.abc import Iterator

from meshscope.analysis.catalog import Unavailable
from meshscope.analysis.roofline import RESOURCES, roofline_bounds, roofline_of
from meshscope.events.enums import Source
from meshscope.reports.charts.points import roofline_chart
from meshscope.reports.charts.traffic import (
    MAX_CHIPS,
    Torus,
    TrafficMatrix,
    matrices,
    matrix_chart,
    size_chart,
    size_counts,
    tori,
    torus_chart,
)
from meshscope.reports.html.blocks import (
    Block,
    Paragraph,
    columns,
    page_table,
)
from meshscope.reports.html.page_run import PageRun
from meshscope.reports.model import ViewTable, view_columns
from meshscope.reports.plain import short
from meshscope.reports.words import counted
from meshscope.units import format_bytes

N_BUSIEST = 5  # links per phase in the table
MIN_SIZES = 4  # payload sizes of a phase from which they are drawn
BOUNDS_NOTE = "Lower bounds of each part: its FLOPs, HBM bytes and wire bytes at peak rates. The largest bound is binding."


def traffic_blocks(run: PageRun) -> Iterator[Block]:
    """Bytes from device to device and over the links of the torus; equal ones in a sentence each."""
    every = matrices(run.inputs, run.source)
    if every and all(map(_is_regular, every)):
        yield Paragraph(text=" ".join(map(_regular_sentence, every)), class_name="say")
        yield from _torus(run)
    else:
        yield from columns([*([matrix_chart(every)] if every else []), *_torus(run)])
    imbalance = run.of_strongest("traffic_imbalance")
    if not isinstance(imbalance, Unavailable) and (imbalance["imbalance"] > 1).any():
        yield from run.tables("traffic_imbalance", "Traffic imbalance")


def _is_regular(matrix: TrafficMatrix) -> bool:
    """Whether all devices send the same bytes to equally many others."""
    senders = [sender for sender, *_ in matrix.cells]
    n_each = {senders.count(sender) for sender in set(senders)}
    n_rows = -(-matrix.n_devices // matrix.fold)
    is_whole = len(set(senders)) == n_rows and matrix.fold == 1
    return is_whole and len(n_each) == 1 and len({n_bytes for *_, n_bytes in matrix.cells}) == 1


def _regular_sentence(matrix: TrafficMatrix) -> str:
    sent = format_bytes(matrix.cells[0][2])
    n_targets = len(matrix.cells) // matrix.n_devices
    targets = f"each of {n_targets} devices" if n_targets > 1 else "the next device of its ring"
    return f"In a {matrix.phase} step every device sends {sent} to {targets} (over {short(matrix.axis, 40)})."


def _torus(run: PageRun) -> Iterator[Block]:
    """The links of the slice, and the busiest of them if loads differ."""
    links, topology = run.of_strongest("link_traffic"), run.inputs.topology
    if isinstance(links, Unavailable) or links.is_empty() or topology is None:
        return
    by_phase = tori(links, topology, Source(links["source"][0]))
    are_even = all(map(_is_even, by_phase))
    if are_even:
        yield Paragraph(text=" ".join(map(_even_sentence, by_phase)), class_name="say")
    if topology.n_chips <= MAX_CHIPS:
        yield torus_chart(by_phase, topology.name)
    if are_even:
        return
    view = ViewTable(
        title="Busiest links",
        columns=view_columns(
            ("phase", "from device", "to device"), ("load_bytes", "time at peak_s")
        ),
        rows=tuple(row for torus in by_phase for row in _busiest_rows(torus)),
    )
    yield page_table(run.html_id("links"), view)


def _is_even(torus: Torus) -> bool:
    return len({link.load_bytes for link in torus.links}) == 1


def _even_sentence(torus: Torus) -> str:
    sent = format_bytes(torus.links[0].load_bytes)
    links = counted(len(torus.links), "link direction")
    return f"In a {torus.phase} step {links} carry traffic, {sent} each."


def _busiest_rows(torus: Torus) -> Iterator[tuple[str | float | None, ...]]:
    """The links with the most bytes in one step, summed over all axes; chips by their device ids."""
    names = {(index, (x, y, z)): devices for index, x, y, z, devices in torus.chips}
    for link in sorted(torus.links, key=lambda link: -link.load_bytes)[:N_BUSIEST]:
        ends = (names[link.slice_index, chip] for chip in (link.source, link.target))
        yield (torus.phase, *ends, link.load_bytes, link.link_s)


def size_blocks(run: PageRun) -> Iterator[Block]:
    """Counts of each payload size, and the achieved bandwidth; nothing for a few sizes."""
    sizes = run.of_strongest("size_distribution")
    counts = (
        ()
        if isinstance(sizes, Unavailable) or sizes.is_empty()
        else size_counts(sizes, Source(sizes["source"][0]))
    )
    if max(Counter(c.phase for c in counts).values(), default=0) >= MIN_SIZES:
        yield size_chart(counts)
        yield from run.tables("size_summary", "Summary of payload sizes")
    yield from run.tables("bandwidth", "Achieved bandwidth", is_defined=True)


def roofline_blocks(run: PageRun) -> Iterator[Block]:
    """Each part below the roofline of the chip, its binding resource, MFU and MBU."""
    roofline = roofline_of(run.inputs)
    if roofline is not None:
        yield roofline_chart(roofline)
    yield from _bounds(run)
    yield from run.tables("mfu", "MFU", is_defined=True)
    yield from run.tables("mbu", "MBU", is_defined=True)


def _bounds(run: PageRun) -> Iterator[Block]:
    """The binding resource of each part, as `show --roofline` prints it."""
    experiment = run.run.manifest.experiment
    chip, dtype = experiment.chip, experiment.weight_dtype
    rows = [
        (
            *(t.phase.value, t.source.value, b.part, RESOURCES[b.binding]),
            *(b.compute_s, b.hbm_s, b.interconnect_s, b.taken_s, b.roof_frac),
        )
        for t in run.inputs.times
        for b in (() if chip is None else roofline_bounds(t, chip, dtype))
    ]
    if not rows:
        return
    bounds = ("compute bound_s", "HBM bound_s", "link bound_s", "modeled_s")
    columns = view_columns(
        ("phase", "source", "part", "bound by"), (*bounds, "bound / modeled_frac")
    )
    view = ViewTable(title="Binding resource", columns=columns, rows=tuple(rows))
    yield page_table(run.html_id("bounds"), view, note=BOUNDS_NOTE)
