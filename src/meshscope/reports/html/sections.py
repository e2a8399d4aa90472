"""The sections of a run below the top of its page: what each shows, or nothing."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import polars as pl
import yaml

from meshscope.analysis.catalog import METRICS, Unavailable
from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.join import Agreement
from meshscope.analysis.request import ASSUMPTION
from meshscope.analysis.roofline import RESOURCES, roofline_bounds, roofline_of
from meshscope.analysis.totals import grouped, unattributed
from meshscope.analysis.volume import volume
from meshscope.events.enums import Phase, Source
from meshscope.reports.charts import traffic
from meshscope.reports.charts.cost import (
    Breakdown,
    cost_charts,
    request_breakdown,
    roofline_chart,
    waterfall_chart,
)
from meshscope.reports.charts.timeline import burst_charts, step_charts
from meshscope.reports.collectives import Footnotes, TableLine, collectives_view, line_identity
from meshscope.reports.conditions import condition_lines
from meshscope.reports.html.blocks import (
    Block,
    basis_text,
    columns,
    descriptions,
    fold,
    page_table,
    paragraph,
)
from meshscope.reports.html.run import PageRun
from meshscope.reports.metrics import metric_table
from meshscope.reports.model import CellValue, column, joined, short, table
from meshscope.reports.speculation import speculation_table
from meshscope.reports.summary import memory_table, totals_table
from meshscope.reports.text import phase_lines, phases_of
from meshscope.reports.times import step_notes
from meshscope.reports.trace import is_trace
from meshscope.reports.words import counted, phase_label
from meshscope.units import NANOSECOND_S, format_bytes

AGREEMENT_CLASSES = {
    Agreement.EQUAL: " is-equal",
    Agreement.SAME_MEANING: "",
    Agreement.DIFFERENT: " is-different",
}
MAX_FINDINGS = 8
MAX_REMARK, MAX_CONDITION = 400, 600  # characters
SMALL_FRAC = 0.001  # of the whole; smaller differences have no row
N_BUSIEST = 5  # links per phase in the table
MIN_SIZES = 4  # payload sizes of a phase from which they are drawn
BOUNDS_NOTE = "Lower bounds of each part: its FLOPs, HBM bytes and wire bytes at peak rates. The largest bound is binding."

Steps = Mapping[Phase, Breakdown]


def _cost(run: PageRun) -> Iterator[Block]:
    """The steps, where their times come from, what limits them, and the figures of the bars."""
    if not run.costs:
        return
    yield from columns(cost_charts([(bar.source.value, bar) for bar in run.costs]))
    facts = [f"Modeled times: {ASSUMPTION}."] if run.inputs.times else []
    if run.timed.basis is not None:
        order = "; largest share first" if "+" in run.timed.basis else ""
        facts.append(f"Basis: {basis_text(run.timed.basis)}{order}.")
    notes = step_notes(run.inputs.times)
    facts += [f"{steps[0].upper()}{steps[1:]}: {short(note, 600)}." for steps, note in notes]
    tables = run.tables("step_time", "Step time", is_defined=True)
    tables += run.tables("part_costs", "Cost of each part of the model", is_defined=True)
    if run.inputs.measured is not None:
        tables += run.tables("latency", "Timed requests")
        tables += run.tables("device_idle", "Load of devices")
    yield from fold("Basis, step time and cost of each part", [*map(paragraph, facts), *tables])


def waterfall_blocks(
    named: Sequence[tuple[str, Steps]], *, n_decode_steps: int | None, table_id: str
) -> Iterator[Block]:
    """The steps of the first name against the others'; nothing without a phase that all have."""
    names, steps = [name for name, _ in named], [of_side for _, of_side in named]
    shared = [phase for phase in Phase if all(phase in of_side for of_side in steps)]
    if len(named) < 2 or not shared:
        return
    spans = {f"{phase} step": [of_side[phase] for of_side in steps] for phase in shared}
    has_same = all(len(of_side) == len(shared) for of_side in steps)
    if n_decode_steps is not None and has_same and len(shared) > 1:
        requests = [request_breakdown(of_side, n_decode_steps) for of_side in steps]
        spans = {"request": requests, **spans}
    yield waterfall_chart(names, spans)
    # Seconds of the first side, and what the others take beyond it, by part and axis.
    span, breakdowns = next(iter(spans.items()))
    first, *others = ({**breakdown, "total": sum(breakdown.values())} for breakdown in breakdowns)
    rows = list[tuple[Any, ...]]()
    for part in (*dict.fromkeys(part for breakdown in breakdowns for part in breakdown), "total"):
        changes = (other.get(part, 0.0) - first.get(part, 0.0) for other in others)
        # A nanosecond is the rounding error of the sums.
        rounded = (s if abs(s) >= NANOSECOND_S else 0.0 for s in changes)
        rows.append((part, first.get(part, 0.0), *rounded))
    least_s = SMALL_FRAC * first["total"]
    view = table(
        ("part or axis", f"{names[0]}_s", *(f"{name} minus {names[0]}_s" for name in names[1:])),
        (row for row in rows if row[0] == "total" or max(map(abs, row[1:])) >= least_s),
        title=f"Time of one {span} and its differences",
    )
    yield from fold("Differences as a table", [page_table(table_id, view)])


def _speculation(run: PageRun) -> Iterator[Block]:
    view = speculation_table(run.run)
    if view is not None:
        yield page_table(run.html_id("speculative-step"), view)


def _timeline(run: PageRun) -> Iterator[Block]:
    charts = step_charts(run.run.path, run.inputs)
    steps, layers = [step for step, _ in charts], [layer for _, layer in charts if layer]
    yield from layers or steps
    if layers:
        yield from fold("Whole steps", steps)
    if run.inputs.sampled:
        yield paragraph(f"The trace is long; shown here: {joined(run.inputs.sampled)}.")
    if is_trace(run.run):
        overlap = run.tables("overlap", "Mean step of each device", is_defined=True)
        exposed = run.tables("exposed_by", "Exposed time of each axis", is_defined=True)
        yield from fold("Overlap of communication and compute", [*overlap, *exposed])


def _collectives(run: PageRun) -> Iterator[Block]:
    comparison = compare_sources(run.run)
    lines: list[TableLine] = []
    sides: Sequence[str] = ()
    for phase in phases_of(run.run):
        sides, of_phase = phase_lines(run.run, phase, comparison)
        lines += of_phase
    if not lines:
        return
    footnotes = Footnotes()
    marks = [footnotes.marks(short(text, MAX_REMARK) for text in line.remarks) for line in lines]
    view = collectives_view(lines, sides=sides, remarks=marks)
    # With the size, as traces of GPUs tell sizes without shapes.
    durations = {
        (line_identity(group.row, group.layers), group.row.payload_bytes): group.row
        for group in grouped(run.run.rows_of(run.source))
    }
    keys = ((line_identity(line.row, line.layers), line.row.payload_bytes) for line in lines)
    timed_rows = (durations.get(key) for key in keys)
    times = [(None, None) if row is None else (row.dur_s, row.exposed_s) for row in timed_rows]
    kept = [i for i in range(2) if any(pair[i] is not None for pair in times)]
    rows: list[tuple[CellValue, ...]] = [
        (phase_label(line.row.phase), *row, *(pair[i] for i in kept))
        for line, row, pair in zip(lines, view.rows, times, strict=True)
    ]
    seconds = (column(("duration_s", "exposed_s")[i]) for i in kept)
    every = (column("phase"), *view.columns, *seconds)
    timed = replace(view, title="Collectives", columns=every, rows=tuple(rows))
    yield page_table(run.html_id("rows"), timed, footnotes=footnotes.texts)


def _sources(run: PageRun) -> Iterator[Block]:
    for agreement in run.answer.agreements:
        head, *findings = agreement.collectives.split("; ")
        style = AGREEMENT_CLASSES[agreement.agreement]
        yield paragraph(f"{head[0].upper()}{head[1:]}.", f"verdict{style}")
        yield from (paragraph(short(finding, MAX_REMARK)) for finding in findings)
        style = " is-different" if agreement.is_time_within is False else " is-equal"
        for sentence in agreement.time_sentences:
            yield paragraph(f"Time: {short(sentence, MAX_REMARK)}.", f"verdict{style}")
    yield from waterfall_blocks(
        [
            (source.value, of_source)
            for source in run.run.sources
            if (of_source := {b.phase: b.breakdown for b in run.costs if b.source is source})
        ],
        n_decode_steps=run.n_decode_steps,
        table_id=run.html_id("differences"),
    )
    if run.run.rows:
        yield page_table(run.html_id("totals"), totals_table(run.run))
    if run.run.memory:
        view = replace(memory_table(run.run.memory), title="Memory of one device")
        yield page_table(run.html_id("memory"), view)
    if run.inputs.measured is not None:
        for finding in run.inputs.measured.findings[:MAX_FINDINGS]:
            yield paragraph(f"Profile: {short(finding, MAX_REMARK)}", "note warn")
        yield from run.tables("waiting", "Waiting and transfer time, measured")


def _roofline(run: PageRun) -> Iterator[Block]:
    roofline = roofline_of(run.inputs)
    if roofline is not None:
        yield roofline_chart(roofline)
    chip, dtype = run.run.manifest.experiment.chip, run.run.manifest.experiment.weight_dtype
    rows = [
        (
            *(t.phase.value, t.source.value, b.part, RESOURCES[b.binding]),
            *(b.compute_s, b.hbm_s, b.interconnect_s, b.taken_s, b.roof_frac),
        )
        for t in run.inputs.times
        for b in (() if chip is None else roofline_bounds(t, chip, dtype))
    ]
    if rows:
        bounds = ("compute bound_s", "HBM bound_s", "link bound_s", "modeled_s")
        names = ("phase", "source", "part", "bound by", *bounds, "bound / modeled_frac")
        view = table(names, rows, title="Binding resource")
        yield page_table(run.html_id("bounds"), view, note=BOUNDS_NOTE)
    yield from run.tables("mfu", "MFU", is_defined=True)
    yield from run.tables("mbu", "MBU", is_defined=True)


def _traffic(run: PageRun) -> Iterator[Block]:
    """Bytes from device to device and over the links of the torus; equal ones in a sentence each."""
    every = traffic.matrices(run.inputs, run.source)
    sentences: list[str] = []
    for matrix in every:  # a sentence if all devices send the same bytes to equally many others
        n_targets = Counter(sender for sender, *_ in matrix.cells)
        is_whole = len(n_targets) == matrix.n_devices and matrix.fold == 1
        sizes, counts = {n_bytes for *_, n_bytes in matrix.cells}, set(n_targets.values())
        if is_whole and len(sizes) == len(counts) == 1:
            n, sent = counts.pop(), format_bytes(sizes.pop())
            targets = f"each of {n} devices" if n > 1 else "the next device of its ring"
            axis = short(matrix.axis, 40)
            sentences.append(
                f"In a {matrix.phase} step every device sends {sent} to {targets} (over {axis})."
            )
    if every and len(sentences) == len(every):
        yield paragraph(" ".join(sentences), "say")
        yield from _torus(run)
    else:
        yield from columns([*([traffic.matrix_chart(every)] if every else []), *_torus(run)])


def _torus(run: PageRun) -> Iterator[Block]:
    links, topology = run.of_strongest("link_traffic"), run.inputs.topology
    if links is None or links.is_empty() or topology is None:
        return
    by_phase = traffic.tori(links, topology, Source(links["source"][0]))
    are_even = all(len({link.load_bytes for link in torus.links}) == 1 for torus in by_phase)
    if are_even:
        loads = (
            f"In a {torus.phase} step {counted(len(torus.links), 'link direction')} carry traffic, "
            f"{format_bytes(torus.links[0].load_bytes)} each."
            for torus in by_phase
        )
        yield paragraph(" ".join(loads), "say")
    if topology.n_chips <= traffic.MAX_CHIPS:
        yield traffic.torus_chart(by_phase, topology.name)
    if not are_even:
        names = ("phase", "from device", "to device", "load_bytes", "time at peak_s")
        rows = list[tuple[CellValue, ...]]()
        for torus in by_phase:
            for link in sorted(torus.links, key=lambda link: -link.load_bytes)[:N_BUSIEST]:
                ends = (torus.chips[link.slice_index, at] for at in (link.source, link.target))
                rows.append((torus.phase, *ends, link.load_bytes, link.link_s))
        yield page_table(run.html_id("links"), table(names, rows, title="Busiest links"))


def _intervals(run: PageRun) -> Iterator[Block]:
    """Bursts of each axis, the gaps between them, windows between axes, and the period.

    Nothing if the plan has one axis: the timeline shows its traffic.
    """
    if bursts := burst_charts(run.inputs, run.source, min_axes=2):
        yield from sorted(bursts, key=lambda one: one.name, reverse=True)
        yield from run.tables("traffic_intervals", "Bursts and gaps", is_defined=True)
        yield from run.tables("axis_windows", "Windows between axes")
        yield from run.tables("period", "Period of a step")


def _sizes(run: PageRun) -> Iterator[Block]:
    sizes = run.of_strongest("size_distribution")
    if sizes is not None and not sizes.is_empty():
        counts = traffic.size_counts(sizes, Source(sizes["source"][0]))
        if max(Counter(counts["phase"]).values(), default=0) >= MIN_SIZES:
            yield traffic.size_chart(counts)
    yield from run.tables("bandwidth", "Achieved bandwidth", is_defined=True)


def _inserted(run: PageRun) -> Iterator[Block]:
    events = run.inputs.events.filter(pl.col("source") != Source.PREDICTED.value)
    compiled = events.filter(pl.col("source") == Source.COMPILED.value)
    fields = ("inserted_by", "kind", "opcode", "algorithm", "is_async")
    by_inserter = volume(compiled if len(compiled) else events, fields)
    if by_inserter.is_empty():
        return
    partitioner = by_inserter.filter(pl.col("inserted_by") == "partitioner")
    count = counted(int(partitioner["count"].sum()), "collective")
    sent = format_bytes(float(partitioner["wire_bytes"].sum()))
    yield paragraph(
        f"The partitioner inserted {count} per step over all phases, {sent} on the wire."
        if len(partitioner)
        else "The partitioner inserted no collectives: all of them are written in the program."
    )
    per_step = by_inserter.select(pl.exclude("source", "n_unsized", "^request_.*$"))
    view = metric_table("volume", per_step, title="By inserter, opcode and algorithm")
    yield page_table(run.html_id("inserters"), view)


# Metrics whose figures are in the answer, in a chart, or in the table of collectives.
_IN_OTHER_FORM = {*("volume", "volume_by_layer", "traffic_matrix", "hbm")}


def _metrics(run: PageRun) -> Iterator[Block]:
    """A table of each metric that no section above has shown."""
    for metric in METRICS:
        if metric.name not in run.shown | _IN_OTHER_FORM:
            yield from run.tables(metric.name, metric.title, is_defined=True)


def _conditions(run: PageRun) -> Iterator[Block]:
    manifest = run.run.manifest
    facts = {"created": manifest.created, "command": " ".join(manifest.command)}
    pairs = (*condition_lines(run.run), *facts.items())
    yield from descriptions((name, short(value, MAX_CONDITION)) for name, value in pairs)
    lost = unattributed(run.run.rows_of(run.source))
    if lost.count:
        reasons = "; ".join(f"{n} x {short(text, 200)}" for text, n in lost.reasons[:MAX_FINDINGS])
        text = f"Unattributed: {counted(lost.count, 'collective')}. {reasons}"
        yield paragraph(text, "note warn")
    titles: dict[str, list[str]] = {}
    for metric in METRICS:
        result = run.metrics[metric.name]
        if isinstance(result, Unavailable):
            titles.setdefault(result.reason, []).append(metric.title)
    for reason, names in titles.items():
        yield paragraph(f"Unknown: {', '.join(names)}: {short(reason, 600)}.", "unknown")


SECTIONS = (
    *(_cost, _speculation, _timeline, _collectives, _sources, _roofline, _traffic, _intervals),
    *(_sizes, _inserted, _metrics, _conditions),
)


@cache
def _heads() -> Mapping[str, Mapping[str, Any]]:
    folder = files("meshscope.reports.html")
    return yaml.safe_load(folder.joinpath("sections.yaml").read_text(encoding="utf-8"))


def sections(run: PageRun) -> Iterator[dict[str, Any]]:
    """The sections of a run that have something to show."""
    is_contradicted = any(
        a.agreement is Agreement.DIFFERENT or a.is_time_within is False
        for a in run.answer.agreements
    )
    for (name, head), blocks_of in zip(_heads().items(), SECTIONS, strict=True):
        shown = list(blocks_of(run))
        if shown:
            is_open = head["is_open"] or (name == "sources" and is_contradicted)
            yield {**head, "id": run.html_id(name), "blocks": shown, "is_open": is_open}
