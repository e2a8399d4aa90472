"""The sections of a run below the top of its page: what each shows, or nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshscope.analysis.catalog import METRICS, Unavailable
from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.join import Agreement
from meshscope.analysis.request import ASSUMPTION
from meshscope.analysis.totals import grouped, unattributed
from meshscope.events.enums import Phase, Source
from meshscope.reports.charts import traffic
from meshscope.reports.charts.cost import Breakdown, cost_charts
from meshscope.reports.charts.spec import read_yaml
from meshscope.reports.charts.timeline import step_charts
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
from meshscope.reports.metrics import unavailable
from meshscope.reports.model import CellValue, column, joined, short, table
from meshscope.reports.speculation import speculation_table
from meshscope.reports.summary import memory_table, totals_table, unattributed_lines
from meshscope.reports.text import phase_lines, phases_of
from meshscope.reports.times import roofline_tables, step_notes
from meshscope.reports.words import phase_label
from meshscope.units import NANOSECOND_S

MAX_FINDINGS = 8
MAX_REMARK, MAX_CONDITION = 400, 600  # characters
SMALL_FRAC = 0.001  # of the whole; smaller differences have no row
BOUNDS_NOTE = "Lower bounds of each part: its FLOPs, HBM bytes and wire bytes at peak rates. The largest bound is binding."

Steps = Mapping[Phase, Breakdown]


def _cost(run: PageRun) -> Iterator[Block]:
    if not run.costs:
        return
    yield from columns(cost_charts([(bar.source.value, bar) for bar in run.costs]))
    facts = [f"Modeled times: {ASSUMPTION}."] if run.inputs.times else []
    if run.timed.basis is not None:
        order = "; largest share first" if "+" in run.timed.basis else ""
        facts.append(f"Basis: {basis_text(run.timed.basis)}{order}.")
    notes = step_notes(run.inputs.times)
    facts += [f"{steps[0].upper()}{steps[1:]}: {short(note, 600)}." for steps, note in notes]
    yield from fold("Basis of the times", map(paragraph, facts))


def difference_blocks(
    named: Sequence[tuple[str, Steps]], *, n_decode_steps: int | None, table_id: str
) -> Iterator[Block]:
    """What others take beyond the first name, by part and axis; nothing without a phase that all have."""
    names, steps = [name for name, _ in named], [of_side for _, of_side in named]
    shared = [phase for phase in Phase if all(phase in of_side for of_side in steps)]
    if len(named) < 2 or not shared:
        return
    span, breakdowns = f"{shared[0]} step", [of_side[shared[0]] for of_side in steps]
    has_same = all(len(of_side) == len(shared) for of_side in steps)
    if n_decode_steps is not None and has_same and len(shared) > 1:
        n_steps = {Phase.PREFILL: 1, Phase.DECODE: n_decode_steps}
        span = "request"
        breakdowns = [
            {
                f"{phase} {n}": s * n_steps[phase]
                for phase, step in of.items()
                for n, s in step.items()
            }
            for of in steps
        ]
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
    yield page_table(table_id, view)


def _speculation(run: PageRun) -> Iterator[Block]:
    view = speculation_table(run.run)
    if view is not None:
        yield page_table(run.html_id("speculative-step"), view)


def _timeline(run: PageRun) -> Iterator[Block]:
    yield from step_charts(run.run.path, run.inputs)
    if run.inputs.sampled:
        yield paragraph(f"The trace is long; shown here: {joined(run.inputs.sampled)}.")


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
    yield from difference_blocks(
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


def _roofline(run: PageRun) -> Iterator[Block]:
    for number, view in enumerate(roofline_tables(run.run)):
        titled = replace(view, title=f"Binding resource of {view.columns[0].label}")
        yield page_table(run.html_id(f"bounds{number}"), titled, note=BOUNDS_NOTE)


def _traffic(run: PageRun) -> Iterator[Block]:
    volume, links = run.metrics["volume"], run.of_strongest("link_traffic")
    if not isinstance(volume, Unavailable):
        yield from filter(None, [traffic.volume_chart(volume, run.source)])
    charts = [traffic.matrix_chart(run.inputs, run.source)]
    topology = run.inputs.experiment.topology
    if links is not None and len(links) and topology is not None:
        source = Source(links["source"][0])
        charts.append(traffic.torus_chart(links, topology, source))
    yield from columns(filter(None, charts))


def _sizes(run: PageRun) -> Iterator[Block]:
    sizes = run.of_strongest("size_distribution")
    if sizes is not None and not sizes.is_empty():
        yield from filter(None, [traffic.size_chart(sizes, Source(sizes["source"][0]))])


# Metrics whose figures are in the answer, in a chart, or in the table of collectives.
_IN_OTHER_FORM = {*("volume", "volume_by_layer", "traffic_matrix", "hbm")}


def _metrics(run: PageRun) -> Iterator[Block]:
    for metric in METRICS:
        if metric.name not in run.shown | _IN_OTHER_FORM:
            yield from run.tables(metric.name)


def _conditions(run: PageRun) -> Iterator[Block]:
    manifest = run.run.manifest
    facts = {"created": manifest.created, "command": " ".join(manifest.command)}
    pairs = (*condition_lines(run.run), *facts.items())
    yield from descriptions((name, short(value, MAX_CONDITION)) for name, value in pairs)
    lost = unattributed(run.run.rows_of(run.source))
    if lost.count:
        said = " ".join(line.plain for line in unattributed_lines(lost))
        yield paragraph(short(said, MAX_CONDITION), "note warn")
    for reason, names in unavailable(run.metrics).items():
        yield paragraph(f"Unknown: {', '.join(names)}: {short(reason, 600)}.", "unknown")


SECTIONS = (
    *(_cost, _speculation, _timeline, _collectives, _sources, _roofline, _traffic),
    *(_sizes, _metrics, _conditions),
)


def sections(run: PageRun) -> Iterator[dict[str, Any]]:
    """The sections of a run that have something to show."""
    heads: dict[str, dict[str, Any]] = read_yaml("html/sections.yaml")
    is_contradicted = any(
        a.agreement is Agreement.DIFFERENT or a.is_time_within is False
        for a in run.answer.agreements
    )
    for (name, head), blocks_of in zip(heads.items(), SECTIONS, strict=True):
        tables = [one for name in head.get("metrics", ()) for one in run.tables(name)]
        shown = [*blocks_of(run), *(fold("Tables", tables) if head["is_open"] else tables)]
        if shown:
            is_open = head["is_open"] or (name == "sources" and is_contradicted)
            yield {**head, "id": run.html_id(name), "blocks": shown, "is_open": is_open}
