"""Charts as SVG, PNG and PDF files, drawn by vl-convert (the extra `plots`)."""

import json
import re
from collections.abc import Iterator, Sequence
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
from meshscope.reports.charts import cost, spec, traffic
from meshscope.reports.charts.cost import roofline_chart
from meshscope.reports.charts.spec import Bar, Chart
from meshscope.reports.charts.timeline import burst_charts, step_charts
from meshscope.reports.conditions import distinct_labels
from meshscope.reports.html.run import PageRun
from meshscope.reports.model import Unit, joined, plain
from meshscope.reports.summary import memory_segments
from meshscope.store.run import RunRecord
from meshscope.units import format_gib

NO_ROOFLINE = "no part has FLOPs and a time, or the chip has no published peaks"
NO_SCALING = "the runs use the same number of devices, or have no step times"
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


def write_pictures(runs: Sequence[RunRecord], folder: Path) -> tuple[int, list[Missing]]:
    """Writes NAME.png and NAME.svg of every chart of a run, or of several runs side by side.

    Returns the number of charts, and those that are missing with the reason.
    """
    named = zip(distinct_labels(runs), runs, strict=True)
    shown = [PageRun(name=name, run=run) for name, run in named]
    every = list(_of_one(shown[0]) if len(shown) == 1 else _of_several(shown))
    charts = [one for one in every if isinstance(one, Chart)]
    for chart in charts:
        stem, svg = folder / plain(chart.name).replace(" ", "-"), chart_svg(chart)
        stem.with_name(f"{stem.name}.svg").write_text(svg, encoding="utf-8")
        image = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
        stem.with_name(f"{stem.name}.png").write_bytes(image)
    return len(charts), [one for one in every if not isinstance(one, Chart)]


def _of_one(run: PageRun) -> Iterator[Chart | Missing]:
    volume, sizes = run.metrics["volume"], run.metrics["size_distribution"]
    yield from _cost([(bar.source.value, bar) for bar in run.costs])
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
    yield _memory([(source.value, memory) for source, memory in run.run.memory.items()])


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


def _of_several(runs: Sequence[PageRun]) -> Iterator[Chart | Missing]:
    yield from _cost([(run.name, bar) for run in runs for bar in run.strongest_costs.values()])
    scalings = cost.scaling_charts(((run.name, run.inputs, run.strongest_costs) for run in runs), 2)
    yield from list(scalings) or [("scaling", NO_SCALING)]
    volumes = {
        run.name: {}
        if isinstance(volume, Unavailable)
        else traffic.volume_segments(volume, run.source)
        for run in runs
        for volume in [run.metrics["volume"]]
    }
    if not any(volumes.values()):
        yield "volume", joined(list(dict.fromkeys(_reason(run, "volume") for run in runs)))
    for phase in dict.fromkeys(phase for by_phase in volumes.values() for phase in by_phase):
        rows = [(name, by_phase.get(phase, [])) for name, by_phase in volumes.items()]
        yield traffic.volume_chart(rows, f"volume-{phase}", f", {phase}")
    memories = (
        (run.name, run.run.memory.get(run.source) or run.run.memory.get(Source.COMPILED))
        for run in runs
    )
    yield _memory([(name, memory) for name, memory in memories if memory is not None])


def _cost(named: Sequence[tuple[str, cost.CostBar]]) -> Iterator[Chart | Missing]:
    yield from list(cost.cost_charts(named)) or [("cost", NO_STEP)]


def _memory(memories: Sequence[tuple[str, Memory]]) -> Chart | Missing:
    if not memories:
        return "memory", NO_MEMORY
    bars = [
        Bar(label, segments, format_gib(sum(n for _, n in segments)))
        for label, memory in memories
        for segments in [memory_segments(memory)]
    ]
    sizes = {memory.hbm_bytes for _, memory in memories}
    limit = sizes.pop() if len(sizes) == 1 else None
    has_limit = "" if limit is None else f", dashed: HBM of {format_gib(limit)}"
    title = f"Memory of one device{has_limit}"
    return spec.bars_chart("memory", title, bars, Unit.MEMORY_BYTES, limit=limit)
