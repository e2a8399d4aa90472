"""Charts as SVG, PNG and PDF files, drawn by vl-convert (the extra `plots`)."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import vl_convert

from meshscope.analysis.catalog import NO_MEMORY, NO_STEP, Unavailable
from meshscope.analysis.roofline import roofline_of
from meshscope.events.enums import Source
from meshscope.plans.memory import Memory
from meshscope.reports.charts import spec, traffic
from meshscope.reports.charts.cost import cost_charts, roofline_chart
from meshscope.reports.charts.spec import Bar, Chart
from meshscope.reports.charts.timeline import burst_charts, step_charts
from meshscope.reports.html.run import PageRun
from meshscope.reports.model import Unit, plain
from meshscope.reports.summary import memory_segments
from meshscope.store.run import RunRecord
from meshscope.units import format_gib

NO_ROOFLINE = "no part has FLOPs and a time, or the chip has no published peaks"
NO_TIMELINE = "the run keeps no timeline; compiled and measured runs have one"
PNG_SCALE = 2.0
NOTE_CHARS = 100  # characters a line, about the width of a chart

Missing = tuple[str, str]  # the name of a chart, and why there is none


def chart_svg(chart: Chart) -> str:
    """The chart as SVG in the light theme, with its note below the title."""
    config = {**spec.look()["config"], "font": "sans-serif", "background": "#ffffff", "padding": 12}
    title: Any = {
        "text": chart.title,
        "subtitle": wrap(chart.note, NOTE_CHARS),
        "subtitleColor": "var(--soft)",
    }
    if "title" in chart.spec:  # the report's title says what the axes are
        axes = chart.spec["title"]["text"]["expr"]
        title["text"] = {"expr": f"[{json.dumps(chart.title)}, {axes}]"}
    whole = {**chart.spec, "title": title, "$schema": spec.SCHEMA, "config": config}
    text = re.sub(
        r"var\(--(\w+)\)", lambda name: spec.look()["palette"][name[1]], json.dumps(whole)
    )
    return vl_convert.vegalite_to_svg(text)


def write_pictures(run: RunRecord, folder: Path) -> tuple[int, list[Missing]]:
    """Writes NAME.png and NAME.svg of every chart of a run.

    Returns the number of charts, and those that are missing with the reason.
    """
    every = list(_charts(PageRun(name="run", run=run)))
    charts = [one for one in every if isinstance(one, Chart)]
    for chart in charts:
        stem, svg = folder / plain(chart.name).replace(" ", "-"), chart_svg(chart)
        stem.with_name(f"{stem.name}.svg").write_text(svg, encoding="utf-8")
        image = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
        stem.with_name(f"{stem.name}.png").write_bytes(image)
    return len(charts), [one for one in every if not isinstance(one, Chart)]


def _charts(run: PageRun) -> Iterator[Chart | Missing]:
    volume, sizes = run.metrics["volume"], run.metrics["size_distribution"]
    bars = [(bar.source.value, bar) for bar in run.costs]
    yield from list(cost_charts(bars)) or [("cost", NO_STEP)]
    of_phases = {}
    if not isinstance(volume, Unavailable):
        of_phases = traffic.volume_segments(volume, run.source)
    if of_phases:
        yield traffic.volume_chart(of_phases.items(), "volume")
    else:
        yield "volume", _reason(run, "volume")
    counts = None if isinstance(sizes, Unavailable) else traffic.size_counts(sizes, run.source)
    if counts is None or counts.is_empty():
        yield "sizes", _reason(run, "size_distribution")
    else:
        for (phase,), of_phase in counts.group_by("phase", maintain_order=True):
            title = f"Payload sizes in one {phase} step"
            yield replace(traffic.size_chart(of_phase), name=f"sizes-{phase}", title=title)
    yield from _traffic(run)
    steps = step_charts(run.run.path, run.inputs)
    yield from filter(None, chain(*steps)) if steps else [("timeline", NO_TIMELINE)]
    bursts = burst_charts(run.inputs, run.source)
    yield from bursts or [("intervals", _reason(run, "traffic_intervals"))]
    roofline = roofline_of(run.inputs)
    yield ("roofline", NO_ROOFLINE) if roofline is None else roofline_chart(roofline)
    yield _memory(run.run.memory)


def _traffic(run: PageRun) -> Iterator[Chart | Missing]:
    every = traffic.matrices(run.inputs, run.source)
    for phase, matrices in groupby(every, key=lambda one: one.phase):
        chart = traffic.matrix_chart([next(matrices)])  # of all axes
        yield replace(chart, title=f"Traffic matrix of one {phase} step")
    if not every:
        yield "matrix", _reason(run, "traffic_matrix")
    links, topology = run.metrics["link_traffic"], run.inputs.topology
    if isinstance(links, Unavailable):
        yield "torus", links.reason
    elif topology is None:
        yield "torus", "the run has no slice"
    elif topology.n_chips > traffic.MAX_CHIPS:
        yield "torus", f"the slice has more than {traffic.MAX_CHIPS:,} chips"
    else:
        for torus in traffic.tori(links, topology, run.source):
            title = f"Link loads in one {torus.phase} step"
            yield replace(traffic.torus_chart([torus], topology.name), title=title)


def _reason(run: PageRun, metric: str) -> str:
    """Why a metric has nothing to draw."""
    result = run.metrics[metric]
    unknown = "the devices, bytes or times of the collectives are unknown"
    return result.reason if isinstance(result, Unavailable) else unknown


def _memory(memories: Mapping[Source, Memory]) -> Chart | Missing:
    if not memories:
        return "memory", NO_MEMORY
    bars = [
        Bar(source.value, segments, format_gib(sum(n for _, n in segments)))
        for source, memory in memories.items()
        for segments in [memory_segments(memory)]
    ]
    limit = next(iter(memories.values())).hbm_bytes
    has_limit = "" if limit is None else f", dashed: HBM of {format_gib(limit)}"
    title = f"Memory of one device{has_limit}"
    return spec.bars_chart("memory", title, bars, Unit.MEMORY_BYTES, limit=limit)
