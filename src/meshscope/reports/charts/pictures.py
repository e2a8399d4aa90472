"""Charts as SVG, PNG and PDF files, drawn by vl-convert (the extra `plots`)."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import vl_convert

from meshscope.analysis.catalog import (
    NO_COLLECTIVES,
    NO_MEMORY,
    NO_STEP,
    MetricInputs,
    Result,
    Unavailable,
    metric_inputs,
    metrics_of,
)
from meshscope.analysis.roofline import roofline_of
from meshscope.events.enums import Phase, Source
from meshscope.plans.memory import Memory
from meshscope.reports.charts.cost import (
    CostBar,
    cost_bars,
    cost_chart,
    scaling_chart,
    strongest_costs,
)
from meshscope.reports.charts.points import roofline_chart
from meshscope.reports.charts.spec import (
    CONFIG,
    PALETTE,
    SCHEMA,
    SOFT,
    BarRow,
    Chart,
    name_of,
    stacked_bars,
)
from meshscope.reports.charts.timeline import (
    axis_bursts,
    burst_chart,
    layer_chart,
    step_chart,
    step_timelines,
)
from meshscope.reports.charts.traffic import (
    MAX_CHIPS,
    TrafficMatrix,
    matrices,
    matrix_chart,
    size_chart,
    size_counts,
    tori,
    torus_chart,
    volume_chart,
    volume_segments,
)
from meshscope.reports.conditions import distinct_labels
from meshscope.reports.model import Unit, plain
from meshscope.reports.summary import memory_segments
from meshscope.store.run import RunRecord
from meshscope.units import format_gib

NO_ROOFLINE = "no part has FLOPs and a time, or the chip has no published peaks"
NO_SCALING = "the runs use the same number of devices, or have no step times"
NO_TIMELINE = "the run keeps no timeline; compiled and measured runs have one"
PNG_SCALE = 2.0
NOTE_CHARS = 100  # characters a line, about the width of a chart

Missing = tuple[str, str]  # the name of a chart, and why there is none


def write_picture(chart: Chart, path: Path, *, to: str) -> None:
    """Writes a chart in the format `to`, png, svg or pdf: the same bytes at every run."""
    svg = chart_svg(chart)
    match to:
        case "svg":
            path.write_text(svg, encoding="utf-8")
        case "pdf":
            path.write_bytes(vl_convert.svg_to_pdf(svg))
        case _:
            path.write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))


def write_stacked(charts: Sequence[Chart], title: str, path: Path, *, to: str) -> None:
    """Writes charts one below the other, with their titles, below a title of all."""
    inner = ("layer", "width", "height")
    panels = [{"title": one.title, **{key: one.spec[key] for key in inner}} for one in charts]
    spec = {"vconcat": panels, "resolve": {"scale": {"color": "independent"}}}
    every = Chart(kind="stack", title=title, description="", spec=spec)
    write_picture(every, path, to=to)


def chart_svg(chart: Chart) -> str:
    """The chart as SVG in the light theme, with its note below the title."""
    config = {**CONFIG, "font": "sans-serif", "background": "#ffffff", "padding": 12}
    title: Any = {
        "text": chart.title,
        "subtitle": wrap(chart.note, NOTE_CHARS),
        "subtitleColor": SOFT,
    }
    if "title" in chart.spec:  # the report's title says what the axes are
        axes = chart.spec["title"]["text"]["expr"]
        title["text"] = {"expr": f"[{json.dumps(chart.title)}, {axes}]"}
    spec = {**chart.spec, "title": title, "$schema": SCHEMA, "config": config}
    text = re.sub(r"var\(--(\w+)\)", lambda name: PALETTE[name[1]], json.dumps(spec))
    return vl_convert.vegalite_to_svg(text)


def write_pictures(runs: Sequence[RunRecord], folder: Path) -> tuple[int, list[Missing]]:
    """Writes NAME.png and NAME.svg of every chart of a run, or of several runs side by side.

    Returns the number of charts, and those that are missing with the reason.
    """
    shown = [_ShownRun.of(run) for run in runs]
    every = list(_of_one(shown[0]) if len(shown) == 1 else _of_several(shown))
    charts = [one for one in every if isinstance(one, Chart)]
    for chart in charts:
        stem, svg = folder / plain(chart.name).replace(" ", "-"), chart_svg(chart)
        stem.with_name(f"{stem.name}.svg").write_text(svg, encoding="utf-8")
        image = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
        stem.with_name(f"{stem.name}.png").write_bytes(image)
    return len(charts), [one for one in every if not isinstance(one, Chart)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownRun:
    """A run with its metrics; `source` is its strongest one."""

    run: RunRecord
    source: Source
    inputs: MetricInputs
    metrics: Mapping[str, Result]

    @classmethod
    def of(cls, run: RunRecord) -> "_ShownRun":
        inputs = metric_inputs(run)
        return cls(run=run, source=run.manifest.source, inputs=inputs, metrics=metrics_of(inputs))

    def reason(self, metric: str) -> str:
        """Why a metric has nothing to draw."""
        result = self.metrics[metric]
        unknown = "the devices, bytes or times of the collectives are unknown"
        return result.reason if isinstance(result, Unavailable) else unknown

    def volume(self) -> dict[str, list[tuple[str, float]]]:
        """The bytes that a device sends in each phase; none if they are unknown."""
        volume = self.metrics["volume"]
        return {} if isinstance(volume, Unavailable) else volume_segments(volume, self.source)


def _of_one(run: _ShownRun) -> Iterator[Chart | Missing]:
    yield from _cost([(bar.source.value, bar) for bar in cost_bars(run.inputs)])
    if isinstance(run.metrics["volume"], Unavailable):
        yield "volume", run.reason("volume")
    else:
        yield volume_chart(run.volume().items(), "volume")
    yield from _sizes(run)
    yield from _matrices(run)
    yield from _torus(run)
    timelines = step_timelines(run.run.path, run.inputs)
    for timeline in timelines:
        yield from filter(None, (step_chart(timeline), layer_chart(timeline)))
    if not timelines:
        yield "timeline", NO_TIMELINE
    phases_with_bursts = axis_bursts(run.inputs, run.source)
    yield from map(burst_chart, phases_with_bursts)
    if not phases_with_bursts:
        yield "intervals", run.reason("traffic_intervals")
    roofline = roofline_of(run.inputs)
    yield ("roofline", NO_ROOFLINE) if roofline is None else roofline_chart(roofline)
    yield _memory([(source.value, memory) for source, memory in run.run.memory.items()])


def _of_several(runs: Sequence[_ShownRun]) -> Iterator[Chart | Missing]:
    labels = distinct_labels([run.run for run in runs])
    named = list(zip(labels, runs, strict=True))
    costs = [(label, run, strongest_costs(cost_bars(run.inputs))) for label, run in named]
    yield from _cost([(label, bar) for label, _, bars in costs for bar in bars.values()])
    scalings: list[Chart] = []
    for phase in Phase:
        points = sorted(
            (run.inputs.n_devices, bars[phase].step_s, label)
            for label, run, bars in costs
            if run.inputs.n_devices and phase in bars
        )
        if len({n for n, *_ in points}) > 1:
            scalings.append(scaling_chart(phase, points))
    yield from scalings or [("scaling", NO_SCALING)]
    volumes = [(label, run.volume()) for label, run in named]
    if not any(by_phase for _, by_phase in volumes):
        yield "volume", NO_COLLECTIVES
    for phase in dict.fromkeys(phase for _, by_phase in volumes for phase in by_phase):
        rows = [(label, by_phase.get(phase, [])) for label, by_phase in volumes]
        yield volume_chart(rows, f"volume-{phase}", f", {phase}")
    memories = [
        (label, run.run.memory.get(run.source) or run.run.memory.get(Source.COMPILED))
        for label, run in named
    ]
    yield _memory([(label, memory) for label, memory in memories if memory is not None])


def _cost(named: Sequence[tuple[str, CostBar]]) -> Iterator[Chart | Missing]:
    charts = [cost_chart(phase, named) for phase in Phase]
    yield from [chart for chart in charts if chart is not None] or [("cost", NO_STEP)]


def _sizes(run: _ShownRun) -> Iterator[Chart | Missing]:
    distribution = run.metrics["size_distribution"]
    if isinstance(distribution, Unavailable):
        yield "sizes", distribution.reason
        return
    counts = size_counts(distribution, run.source)
    for (phase,), of_phase in counts.group_by("phase", maintain_order=True):
        chart = size_chart(of_phase)
        yield replace(chart, name=f"sizes-{phase}", title=f"Payload sizes in one {phase} step")
    if counts.is_empty():
        yield "sizes", run.reason("size_distribution")


def _matrices(run: _ShownRun) -> Iterator[Chart | Missing]:
    by_phase: dict[str, TrafficMatrix] = {}
    for matrix in matrices(run.inputs, run.source):  # the matrix of all axes comes first
        by_phase.setdefault(matrix.phase, matrix)
    for phase, matrix in by_phase.items():
        yield replace(matrix_chart([matrix]), title=f"Traffic matrix of one {phase} step")
    if not by_phase:
        yield "matrix", run.reason("traffic_matrix")


def _torus(run: _ShownRun) -> Iterator[Chart | Missing]:
    links, topology = run.metrics["link_traffic"], run.inputs.topology
    if isinstance(links, Unavailable):
        yield "torus", links.reason
    elif topology is None:
        yield "torus", "the run has no slice"
    elif topology.n_chips > MAX_CHIPS:
        yield "torus", f"the slice has more than {MAX_CHIPS:,} chips"
    else:
        for torus in tori(links, topology, run.source):
            title = f"Link loads in one {torus.phase} step"
            yield replace(torus_chart([torus], topology.name), title=title)


def _memory(memories: Sequence[tuple[str, Memory]]) -> Chart | Missing:
    if not memories:
        return "memory", NO_MEMORY
    rows = [
        BarRow(
            name=name_of(label), segments=segments, end_text=format_gib(sum(n for _, n in segments))
        )
        for label, memory in memories
        for segments in [list(memory_segments(memory))]
    ]
    sizes = {memory.hbm_bytes for _, memory in memories}
    limit = sizes.pop() if len(sizes) == 1 else None
    has_limit = "" if limit is None else f", dashed: HBM of {format_gib(limit)}"
    return Chart(
        kind="bars",
        name="memory",
        title=f"Memory of one device{has_limit}",
        description="; ".join(f"{row.name} {row.end_text}" for row in rows),
        spec=stacked_bars(rows, Unit.MEMORY_BYTES, limit=limit),
    )
