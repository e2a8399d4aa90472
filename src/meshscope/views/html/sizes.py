"""The sections on payload sizes, the roofline, and memory."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.metric import Unavailable
from meshscope.analysis.roofline import RooflineBound, roofline_bounds, roofline_of
from meshscope.events.enums import Source
from meshscope.spec.plan.memory import Memory
from meshscope.units import format_gib
from meshscope.views.charts.volume import size_counts
from meshscope.views.html import charts
from meshscope.views.html.blocks import Block, Panel, Section, page_table, unknown
from meshscope.views.html.drawing import ChartFactory, definition
from meshscope.views.html.page_run import PageRun
from meshscope.views.model import CellValue, Unit, ViewTable, figure_column, text_column
from meshscope.views.roofs import LABELS

MAX_DESCRIBED = 12  # marks that the description of a chart lists
NO_ROOFLINE = (
    "a point needs the FLOPs, bytes and time of a part, and the chip needs published peaks; "
    "compiled runs for TPUs and measured runs have them"
)
ROOFLINE_NOTE = "Hollow marks are predicted. FLOPs and bytes come from the shapes of the operations and are divided by compute time alone. Bytes prefetched ahead of a part, such as weights in decode, are not counted and shift its point to the right. Bytes that stay in VMEM are counted and can lift a point above the roofline."
BOUNDS_NOTE = "Lower bounds of each part: peak FLOP/s, peak HBM bandwidth, and the interconnect model. The largest bound is binding."
MEMORY_NOTE = "Dashed: HBM capacity of one device. Predictions do not include temporaries, which the compiler allocates."


def sizes_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """Counts of each payload size, and the achieved bandwidth."""
    return Section(
        id="sizes",
        title="Payload sizes",
        lead="How often each payload occurs in one step.",
        panels=tuple(Panel(title=run.title, blocks=tuple(_sizes(run, factory))) for run in runs),
    )


def _sizes(run: PageRun, factory: ChartFactory) -> Iterator[Block]:
    sizes = run.of_strongest("size_distribution")
    if isinstance(sizes, Unavailable):
        yield unknown(sizes.reason)
    elif counts := size_counts(sizes, Source(sizes["source"][0])):
        described = (
            f"{c.count} {c.kind} of {c.payload_bytes:,} bytes in {c.phase}"
            for c in counts[:MAX_DESCRIBED]
        )
        description = f"{'; '.join(described)}."
        data = charts.sizes_data(counts)
        yield factory.chart("sizes", "Payload sizes", data, description=description)
    else:
        yield unknown("no collective has a known size")
    yield run.table("size_summary", "Summary of payload sizes")
    yield run.table("bandwidth", "Achieved bandwidth", note=definition("bandwidth"))


def roofline_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """Each part below the roofline of the chip, its binding resource, MFU and MBU."""
    return Section(
        id="roofline",
        title="Roofline",
        lead="Achieved FLOP/s of each part of the model during compute, against the peaks of the chip.",
        panels=tuple(Panel(title=run.title, blocks=tuple(_roofline(run, factory))) for run in runs),
    )


def _roofline(run: PageRun, factory: ChartFactory) -> Iterator[Block]:
    roofline = roofline_of(run.inputs)
    if roofline is None:
        yield unknown(NO_ROOFLINE)
    else:
        described = (
            f"{p.part} in {p.phase} at {p.flops_per_s / roofline.peaks.flops_per_s:.0%} of peak FLOP/s"
            for p in roofline.points[:MAX_DESCRIBED]
        )
        yield factory.chart(
            "roofline",
            "Roofline of one device",
            charts.roofline_data(roofline),
            description=f"{'; '.join(described)}.",
            note=ROOFLINE_NOTE,
        )
    yield _bounds(run)
    yield run.table("mfu", "MFU", note=definition("mfu"))
    yield run.table("mbu", "MBU", note=definition("mbu"))


def _bounds(run: PageRun) -> Block:
    """The binding resource of each part, as `show --roofline` prints it."""
    chip = None if run.inputs.topology is None else run.inputs.topology.chip
    rows = [
        (time.phase.value, time.source.value, *_bound_cells(bound))
        for time in run.inputs.times
        for bound in (() if chip is None else roofline_bounds(time, chip))
    ]
    if not rows:
        return unknown("the binding resource: no step of the run is modeled")
    view = ViewTable(
        title="Binding resource",
        columns=(
            *map(text_column, ("phase", "source", "part")),
            *(
                figure_column(name, Unit.SECONDS)
                for name in ("compute bound", "HBM bound", "interconnect bound", "modeled")
            ),
            figure_column("bound / modeled", Unit.FRACTION),
            text_column("bound by"),
        ),
        rows=tuple(rows),
    )
    return page_table(run.html_id("bounds"), view, note=BOUNDS_NOTE)


def _bound_cells(bound: RooflineBound) -> tuple[CellValue, ...]:
    seconds = (bound.compute_s, bound.hbm_s, bound.interconnect_s, bound.taken_s)
    return (bound.part, *seconds, bound.roof_frac, LABELS[bound.binding])


def memory_section(runs: Sequence[PageRun], factory: ChartFactory) -> Section:
    """Weights, KV cache and temporaries of one device, against its HBM."""
    bars = [
        (run.with_letter(source.value), memory)
        for run in runs
        for source, memory in run.run.memory.items()
    ]
    blocks: list[Block] = []
    if bars:
        described = (f"{name} {format_gib(_known_bytes(memory))}" for name, memory in bars)
        blocks.append(
            factory.chart(
                "bars",
                "Memory of one device",
                charts.memory_data(bars),
                description=f"{'; '.join(described)}.",
                note=MEMORY_NOTE,
            )
        )
    blocks += [run.table("hbm", run.with_letter("memory").capitalize()) for run in runs]
    panel = Panel(title="", blocks=tuple(blocks))
    return Section(id="memory", title="Memory", lead="", panels=(panel,))


def _known_bytes(memory: Memory) -> int:
    return memory.total_bytes or memory.weights_bytes + memory.kv_cache_bytes
