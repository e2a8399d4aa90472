"""Charts as SVG, PNG and PDF files, drawn by vl-convert (the extra `plots`)."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

import vl_convert

from meshscope.reports.charts import spec
from meshscope.reports.charts.cost import front_chart
from meshscope.reports.charts.spec import Chart
from meshscope.reports.html.blocks import Block
from meshscope.reports.html.run import PageRun
from meshscope.reports.html.sections import sections
from meshscope.reports.model import plain
from meshscope.serving.search import PlanSearch
from meshscope.store.run import RunRecord

PNG_SCALE = 2.0
MAX_FIGURES = 3  # below the text of a run in a notebook
NOTE_CHARS = 100  # characters a line, about the width of a chart


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
    text = json.dumps({**chart.spec, "title": title, "$schema": spec.SCHEMA, "config": config})
    palette = spec.look()["palette"]
    return vl_convert.vegalite_to_svg(re.sub(r"var\(--(\w+)\)", lambda n: palette[n[1]], text))


def write_pictures(run: RunRecord, folder: Path) -> int:
    """Writes NAME.png and NAME.svg of every chart in the report of a run; returns their number."""
    charts = list(_run_charts(run))
    for chart in charts:
        stem, svg = folder / re.sub(r"[, ]+", "-", plain(chart.name)), chart_svg(chart)
        stem.with_name(f"{stem.name}.svg").write_text(svg, encoding="utf-8")
        image = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
        stem.with_name(f"{stem.name}.png").write_bytes(image)
    return len(charts)


def run_figures(run: RunRecord) -> str:
    """The first charts in the report of a run, as HTML for notebooks."""
    return figures(_run_charts(run))


def plan_figures(search: PlanSearch) -> str:
    """The front of a search, as HTML for notebooks; none without a choice."""
    near = () if search.closest is None else (search.closest, *search.fastest)
    shown = search.front or near
    others = tuple(choice for choice in search.best if choice not in search.front)
    return figures([front_chart(search, shown, others)] if shown else [])


def figures(charts: Iterable[Chart]) -> str:
    """The first charts as pictures in HTML, whose texts cannot be markup; charts of one title count once."""
    kept: dict[str, Chart] = {}
    for chart in charts:
        kept.setdefault(chart.title, chart)
        if len(kept) == MAX_FIGURES:
            break
    return "".join(
        f'<p><img src="data:image/svg+xml;base64,{b64encode(chart_svg(one).encode()).decode("ascii")}" '
        f'alt="{escape(f"{one.title}. {one.description}")}" style="max-width: 100%"></p>'
        for one in kept.values()
    )


def _run_charts(run: RunRecord) -> Iterator[Chart]:
    for section in sections(PageRun(name="run", run=run)):
        for chart in _charts(section["blocks"]):
            yield from _views(chart)


def _charts(blocks: Iterable[Block]) -> Iterator[Chart]:
    for block in blocks:
        yield from [block] if isinstance(block, Chart) else _charts(block.get("blocks", ()))


def _views(chart: Chart) -> Iterator[Chart]:
    """The chart for each phase or matrix that a reader can choose, and for one layer and the whole step."""
    params: dict[str, Any] = {one["name"]: one for one in chart.spec.get("params", ())}

    def with_values(**values: Any) -> dict[str, Any]:
        return {**chart.spec, "params": [{"name": n, "value": v} for n, v in values.items()]}

    if "shown" in params:
        shown = params["shown"]
        for one in shown["bind"]["options"] if "bind" in shown else [shown["value"]]:
            title, name = f"{chart.title}: {one}", f"{chart.name}-{one}"
            yield replace(chart, name=name, title=title, spec=with_values(shown=one))
        return
    low, high, last = (params[n]["value"] if n in params else 0 for n in ("low", "high", "last"))
    if high - low < last:
        yield replace(chart, name=f"{chart.name}-layer")
        yield replace(chart, spec=with_values(low=0.0, high=last, last=last))
    else:
        yield chart
