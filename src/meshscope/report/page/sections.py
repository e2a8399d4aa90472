"""The sections of the page, from what was asked to the versions; none disappears, it says what it lacks."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import polars as pl

from meshscope.figures.cost import CostBar
from meshscope.figures.roofline import roof_of
from meshscope.figures.sizes import size_counts
from meshscope.figures.timeline import StepTimeline, axis_bursts, step_timelines
from meshscope.figures.traffic import Torus, matrices, tori
from meshscope.metrics.catalogue import METRICS
from meshscope.metrics.registry import Unknown
from meshscope.metrics.request_time import ASSUMPTION
from meshscope.metrics.roofs import Roofs, roofs_of
from meshscope.metrics.unattributed import unattributed
from meshscope.report.conditions import condition_lines
from meshscope.report.explanation import explanation_of, sentences
from meshscope.report.page import charts
from meshscope.report.page.blocks import (
    Block,
    Cell,
    Chart,
    Facts,
    Panel,
    Section,
    Tile,
    Tiles,
    Words,
    cell,
    figure,
    shown,
    table_of_rows,
    text_cell,
    unknown,
)
from meshscope.report.page.collectives import collectives_block, inserted_blocks, source_blocks
from meshscope.report.page.headline import strongest_costs
from meshscope.report.page.side import PageRun
from meshscope.report.roofs import WORDS
from meshscope.report.side import Side
from meshscope.report.times import time_document
from meshscope.table.kinds import Phase, Source
from meshscope.units import format_gib, format_seconds

ASKED = (
    "model",
    "slice",
    "plan",
    "request",
)  # conditions that stand at the top; the others at the end
N_BUSIEST = 5  # links of each phase that are listed
WHISKER = "The line at the end of a bar is between what the step is taken to lie."
NO_TIMELINE = (
    "the run keeps no timeline. Compiled and measured runs have one; a prediction has none"
)
NO_ROOF = (
    "a point needs FLOPs and bytes of a part with its time, and published peaks of the chip; "
    "compiled runs for TPUs and measured ones have them"
)


class Charts:
    """Numbers the charts of a page in the order in which they are made."""

    def __init__(self) -> None:
        """No chart yet."""
        self._numbers = count()

    def new(
        self, kind: str, title: str, data: dict[str, Any], *, about: str, note: str = ""
    ) -> Chart:
        """A chart of this kind; `about` says in words what it shows."""
        return Chart(
            number=next(self._numbers),
            kind=kind,
            title=title,
            description=about,
            data=data,
            note=note,
        )


def sections(runs: Sequence[PageRun], new: Charts) -> tuple[Section, ...]:
    """All sections, in the order of the page."""
    return (
        _asked(runs),
        *_cost_and_plans(runs, new),
        _collectives(runs),
        _traffic(runs, new),
        _timeline(runs, new),
        _intervals(runs, new),
        _sizes(runs, new),
        _roofline(runs, new),
        _memory(runs, new),
        _sources(runs),
        _inserted(runs),
        _conditions(runs),
    )


def _cost_and_plans(runs: Sequence[PageRun], new: Charts) -> tuple[Section, Section]:
    """Several runs are told apart first."""
    if len(runs) > 1:
        plans = _scaling(runs, new)
        return plans, _cost(runs, new)
    return _cost(runs, new), _scaling(runs, new)


def _asked(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="asked",
        title="What was asked",
        lead="",
        panels=tuple(Panel(title=run.title, blocks=(_facts(run, is_asked=True),)) for run in runs),
        is_paired=len(runs) > 1,
    )


def _facts(run: PageRun, *, is_asked: bool) -> Facts:
    lines = [
        (name, shown(value, 600))
        for name, value in condition_lines(run.run)
        if (name in ASKED) == is_asked
    ]
    made = [
        ("made", shown(run.run.manifest.created)),
        ("by", shown(" ".join(run.run.manifest.command), 600)),
    ]
    return Facts(facts=tuple(lines if is_asked else [*lines, *made]))


def _cost(runs: Sequence[PageRun], new: Charts) -> Section:
    panels: list[Panel] = []
    if len(runs) == 1:
        panels.append(Panel(title="", blocks=tuple(_latency(runs[0]))))
    panels.append(Panel(title="", blocks=tuple(_cost_charts(runs, new))))
    panels += [Panel(title=run.title, blocks=tuple(_cost_blocks(run))) for run in runs if run.costs]
    return Section(
        id="cost",
        title="What it costs",
        lead="One step of each phase on one device. Exposed is communication during which the device computes nothing; what is hidden behind compute costs no time.",
        panels=tuple(panels),
    )


def _cost_charts(runs: Sequence[PageRun], new: Charts) -> Iterator[Block]:
    for phase in Phase:
        bars = [(r, bar) for r in runs for bar in r.costs if bar.phase is phase]
        if bars:
            data = charts.cost_data([(_bar_name(r, bar), bar) for r, bar in bars])
            yield new.new(
                "bars",
                f"Time of one {phase} step",
                data,
                about="; ".join(f"{_bar_name(r, b)} {_interval(b)}" for r, b in bars) + ".",
                note=WHISKER if any(bar.low_s is not None for _, bar in bars) else "",
            )
    for run in runs:
        if not run.costs:
            yield unknown(
                run.named("no step has a duration: nothing was timed and no time was modelled")
            )


def _bar_name(run: PageRun, bar: CostBar) -> str:
    plan = "" if run.is_alone else shown(run.run.manifest.experiment.get("plan", ""), 24)
    return " ".join(
        filter(None, (run.named(plan).strip() if not run.is_alone else "", bar.source.value))
    )


def _interval(bar: CostBar) -> str:
    if bar.low_s is None or bar.high_s is None:
        return format_seconds(bar.step_s)
    return f"{format_seconds(bar.step_s)} ({format_seconds(bar.low_s)} to {format_seconds(bar.high_s)})"


def _cost_blocks(run: PageRun) -> Iterator[Block]:
    if run.subject.times:
        yield Words(text=f"Modelled time is that of {ASSUMPTION}.")
        for time in run.subject.times:
            for note in time.notes:
                yield Words(text=f"{time.phase}: {shown(note, 600)}")
    yield run.table("step_time", "Time of a step", note=_definition("step_time"))
    yield run.table("part_costs", "Cost of each part of the model", note=_definition("part_costs"))
    if run.subject.measured is not None:
        yield run.table("latency", "Timed requests")
        yield run.table("device_idle", "Load of devices")


def _latency(run: PageRun) -> Iterator[Block]:
    """TTFT, TPOT and end to end as large figures, measured where a request was timed."""
    latency = run.subject.latency
    if latency is not None:
        named = (("TTFT", latency.ttft), ("TPOT", latency.tpot), ("end to end", latency.e2e))
        yield Tiles(
            tiles=tuple(
                Tile(
                    name=name,
                    value=format_seconds(spread.mean_s),
                    note=f"measured, mean of {spread.n}; p99 {format_seconds(spread.p99_s)}",
                )
                for name, spread in named
                if spread is not None
            )
        )
        return
    document = _modelled(run)
    if document is None:
        return
    named_keys = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s"))
    mark = " extrapolated," if document["is_extrapolated"] else ""
    yield Tiles(
        tiles=tuple(
            Tile(
                name=name,
                value=format_seconds(document[key]),
                note=f"{_between(*document['intervals'].get(key, (None, None)))};{mark} {_modelled_source(run)}",
            )
            for name, key in named_keys
            if document[key] is not None
        )
    )
    yield Words(
        text=f"Basis: {document['basis'].replace('+', ', ').replace('_', ' ')}, the larger part first."
    )


def _between(low_s: float | None, high_s: float | None) -> str:
    if low_s is None or high_s is None:
        return "interval not known"
    return f"{format_seconds(low_s)} to {format_seconds(high_s)}"


def _definition(name: str) -> str:
    """The first paragraph of a metric's definition."""
    found = next(metric for metric in METRICS if metric.name == name)
    return found.definition.partition("\n\n")[0].replace("`", "")


def _scaling(runs: Sequence[PageRun], new: Charts) -> Section:
    blocks: list[Block] = []
    if len(runs) > 1:
        blocks += [_plans(runs), _requests(runs)]
        blocks += _scaling_chart(runs, new)
        blocks += [block for run in runs[1:] for block in _why(runs[0], run)]
    else:
        blocks.append(
            Words(
                text="There is one run. Give `meshscope report` several, and they stand side by side.",
                class_name="unknown",
            )
        )
    return Section(
        id="plans",
        title="Plans side by side",
        lead="",
        panels=(Panel(title="", blocks=tuple(blocks)),),
    )


def _plans(runs: Sequence[PageRun]) -> Block:
    names = ("run", "model", "plan", "slice", "devices", "source", "prefill step", "decode step")
    more = ("sent, prefill", "sent, decode", "memory", "fits")
    return table_of_rows("plans-table", "Plans", (*names, *more), map(_plan_row, runs))


def _plan_row(run: PageRun) -> list[Cell]:
    asked = run.run.manifest.experiment
    costs = strongest_costs(run)
    memory = run.run.memory.get(run.source)
    total_bytes = None if memory is None else memory.total_bytes
    return [
        Cell(text=run.letter),
        Cell(text=shown((asked.get("model") or {}).get("name", "not known"), 80)),
        Cell(text=shown(asked.get("plan", "not known"), 40)),
        Cell(text=shown(asked.get("topology", "not known"), 40)),
        cell("n_devices", asked.get("n_devices")),
        Cell(text=run.source.value),
        *(cell("step_s", costs[p].step_s if p in costs else None) for p in Phase),
        *(cell("wire_bytes", _sent(run, phase)) for phase in Phase),
        Cell(text="not known")
        if total_bytes is None
        else figure(format_gib(total_bytes), total_bytes),
        cell("fits", None if memory is None else memory.fits),
    ]


def _why(first: PageRun, other: PageRun) -> Iterator[Block]:
    """What makes the difference between the first run and another, in sentences."""
    left, right = (Side(name=r.letter, run=r.run, source=r.source) for r in (first, other))
    yield Words(text=f"{other.letter} against {first.letter}", class_name="heading")
    for sentence in sentences(explanation_of(left, right)):
        yield Words(text=shown(sentence, 800), class_name="say")


def _requests(runs: Sequence[PageRun]) -> Block:
    """TTFT, TPOT and end to end of every run, with interval and basis."""
    names = ("TTFT", "between", "TPOT", "between", "end to end", "between", "basis")
    rows = [[Cell(text=run.letter), *_request_cells(run)] for run in runs]
    return table_of_rows("requests-table", "Time of a request", ("run", *names), rows)


def _request_cells(run: PageRun) -> list[Cell]:
    latency = run.subject.latency
    if latency is not None:
        spreads = (latency.ttft, latency.tpot, latency.e2e)
        cells = [
            c
            for spread in spreads
            for c in (
                cell("mean_s", None if spread is None else spread.mean_s),
                Cell(text="-"),
            )
        ]
        return [*cells, Cell(text="measured")]
    document = _modelled(run)
    if document is None:
        return [Cell(text="-")] * 6 + [Cell(text="not known")]
    cells = []
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        between = document["intervals"].get(key, (None, None))
        cells += [cell(key, document[key]), Cell(text=_between(*between))]
    return [*cells, text_cell(document["basis"].replace("+", ", ").replace("_", " "))]


def _modelled(run: PageRun) -> dict[str, Any] | None:
    """The modelled times of the strongest source that has some."""
    source = _modelled_source(run)
    return None if source is None else time_document(run.run, source)


def _modelled_source(run: PageRun) -> Source | None:
    return next((s for s in reversed(Source) if run.run.times_of(s)), None)


def _sent(run: PageRun, phase: Phase) -> float | None:
    """Wire bytes of one step of the phase, by the metric."""
    found = run.of_strongest("volume")
    if isinstance(found, Unknown):
        return None
    own = found.filter(pl.col("phase") == phase.value)["wire_bytes"]
    return float(own.sum()) if len(own) else None


def _scaling_chart(runs: Sequence[PageRun], new: Charts) -> Iterator[Block]:
    lines: list[dict[str, Any]] = []
    for phase in Phase:
        points = [
            [run.letter, run.subject.n_devices, costs[phase].step_s]
            for run in runs
            if run.subject.n_devices and phase in (costs := strongest_costs(run))
        ]
        if len({n for _, n, _ in points}) > 1:
            ordered = sorted(points, key=lambda point: (point[1], point[2]))
            lines.append({"name": f"{phase} step", "points": ordered})
    for line in lines:
        yield new.new(
            "scaling",
            f"{str(line['name']).capitalize()} against devices",
            {"unit": "s", "lines": [line]},
            about="; ".join(
                f"{a} on {n} devices {format_seconds(s)}" for a, n, s in line["points"]
            ),
            note="The line joins the fastest run of each size. Dashed: the time of the smallest divided by as many devices more.",
        )
    if not lines:
        yield unknown(
            "step times against devices: the runs use equally many devices, or have no times"
        )


def _collectives(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="collectives",
        title="The collectives",
        lead="Of one step on one device, layers of a kind on one line. Payload is the whole array of one operation, wire what one device sends for it.",
        panels=tuple(Panel(title=run.title, blocks=(collectives_block(run),)) for run in runs),
    )


def _traffic(runs: Sequence[PageRun], new: Charts) -> Section:
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
    if isinstance(found, Unknown) or topology is None:
        yield unknown(f"link loads: {found.reason if isinstance(found, Unknown) else 'no slice'}")
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


def _timeline(runs: Sequence[PageRun], new: Charts) -> Section:
    return Section(
        id="timeline",
        title="Timeline",
        lead="One device. Compute by part of the model, collectives by axis, copies between memories. Drag to move, zoom with the buttons, + and -, or ctrl and wheel.",
        panels=tuple(Panel(title=run.title, blocks=tuple(_timelines(run, new))) for run in runs),
    )


def _timelines(run: PageRun, new: Charts) -> Iterator[Block]:
    found = step_timelines(run.run.path, run.subject)
    if not found:
        yield unknown(NO_TIMELINE)
    for timeline in found:
        yield from _step_and_layer(timeline, new)


def _step_and_layer(timeline: StepTimeline, new: Charts) -> Iterator[Block]:
    left_out = (
        f" {timeline.n_left_out:,} of the shortest spans are left out."
        if timeline.n_left_out
        else ""
    )
    yield new.new(
        "timeline",
        f"A {timeline.phase} step ({timeline.source})",
        charts.timeline_data(timeline),
        about=f"{sum(s.n for s in timeline.spans):,} spans in {format_seconds(timeline.end_s)}.{left_out}",
        note=left_out.strip(),
    )
    if timeline.layer is None:
        yield unknown(
            f"where a layer of {timeline.phase} begins and ends: no loop and no collective tells"
        )
        return
    name, start_s, end_s = timeline.layer
    yield new.new(
        "timeline",
        f"One layer of {timeline.phase}: {name}",
        charts.timeline_data(timeline, (start_s, end_s)),
        about=f"From {format_seconds(start_s)} to {format_seconds(end_s)} of the step.",
    )


def _intervals(runs: Sequence[PageRun], new: Charts) -> Section:
    return Section(
        id="intervals",
        title="Traffic intervals",
        lead="When each axis has traffic in a step, for how long it is silent, and what repeats.",
        panels=tuple(Panel(title=run.title, blocks=tuple(_bursts(run, new))) for run in runs),
    )


def _bursts(run: PageRun, new: Charts) -> Iterator[Block]:
    found = axis_bursts(run.subject, run.source)
    if not found:
        yield unknown("the run has no collectives")
        return
    for bursts in sorted(found, key=lambda b: b.phase, reverse=True):
        is_time = bursts.unit == "s"
        more = (
            f" The first {len(bursts.bursts):,} bursts; {bursts.n_left_out:,} more follow."
            if bursts.n_left_out
            else ""
        )
        order = (
            ""
            if is_time
            else "The place in the order of the schedule, not time: no time is known. "
        )
        yield new.new(
            "timeline",
            f"Bursts of each axis in a {bursts.phase} step",
            charts.bursts_data(bursts),
            about=f"{len(bursts.bursts)} bursts.{more}",
            note=f"{order}{more.strip()}",
        )
    yield run.table("traffic_intervals", "Bursts and gaps", note=_definition("traffic_intervals"))
    windows = run.metrics["axis_windows"]
    if isinstance(windows, pl.DataFrame) and windows.is_empty():
        yield unknown("windows between axes: traffic never changes from one axis to another")
    else:
        yield run.table("axis_windows", "Windows between axes")
    yield run.table("period", "What repeats in a step")


def _sizes(runs: Sequence[PageRun], new: Charts) -> Section:
    panels: list[Panel] = []
    for run in runs:
        found = run.of_strongest("size_distribution")
        counts = (
            () if isinstance(found, Unknown) else size_counts(found, Source(found["source"][0]))
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
                found.reason if isinstance(found, Unknown) else "no collective has a known size"
            )
            blocks.append(unknown(reason))
        blocks.append(run.table("size_summary", "Sizes in figures"))
        blocks.append(run.table("bandwidth", "Bandwidth reached", note=_definition("bandwidth")))
        panels.append(Panel(title=run.title, blocks=tuple(blocks)))
    return Section(
        id="sizes",
        title="Sizes",
        lead="How often each payload occurs in one step.",
        panels=tuple(panels),
    )


def _roofline(runs: Sequence[PageRun], new: Charts) -> Section:
    panels: list[Panel] = []
    for run in runs:
        roof = roof_of(run.subject)
        blocks: list[Block] = [unknown(NO_ROOF)]
        if roof is not None:
            parts = "; ".join(
                f"{p.part} in {p.phase} {p.flops_per_s / roof.flops_per_s:.0%} of the peak"
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
            run.table("mfu", "MFU", note=_definition("mfu")),
            run.table("mbu", "MBU", note=_definition("mbu")),
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
        for one in (() if chip is None else roofs_of(time, chip))
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


def _roof_cells(one: Roofs) -> list[Cell]:
    seconds = (one.compute_s, one.hbm_s, one.interconnect_s, one.taken_s)
    return [
        Cell(text=shown(one.part, 40)),
        *(cell("roof_s", value) for value in seconds),
        cell("roof_frac", one.roof_frac),
        Cell(text=WORDS[one.binding]),
    ]


def _memory(runs: Sequence[PageRun], new: Charts) -> Section:
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


def _conditions(runs: Sequence[PageRun]) -> Section:
    return Section(
        id="conditions",
        title="Conditions and versions",
        lead="",
        panels=tuple(
            Panel(title=run.title, blocks=(_facts(run, is_asked=False), *_not_known(run)))
            for run in runs
        ),
        is_paired=len(runs) > 1,
    )


def _not_known(run: PageRun) -> Iterator[Block]:
    """What the run cannot tell, by reason."""
    reasons: dict[str, list[str]] = {}
    for metric in METRICS:
        found = run.metrics[metric.name]
        if isinstance(found, Unknown):
            reasons.setdefault(found.reason, []).append(metric.title)
    lost = unattributed(run.run.rows_of(run.source))
    if lost.count:
        told = "; ".join(f"{n} x {shown(reason, 200)}" for reason, n in list(lost.reasons)[:8])
        yield Words(
            text=f"Not attributed: {lost.count} collectives. {told}", class_name="note warn"
        )
    for reason, titles in reasons.items():
        yield unknown(f"{', '.join(titles)}: {reason}")
