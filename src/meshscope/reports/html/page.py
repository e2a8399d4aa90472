"""Renders a report as one HTML file with its style, scripts and data inside; a section without data is left out.

Several runs are ranked by the request, with what the others take beyond the best.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshscope import __version__
from meshscope.files import own_text
from meshscope.reports.answer import FitState
from meshscope.reports.charts.cost import cost_charts, loads_chart
from meshscope.reports.charts.spec import Chart, look
from meshscope.reports.conditions import distinct_labels
from meshscope.reports.html.blocks import Block, columns, fold, lines, page_table, paragraph
from meshscope.reports.html.run import MAX_NAME, PageRun, suggestions, top_blocks, warnings
from meshscope.reports.html.sections import difference_blocks, sections
from meshscope.reports.loads import load_lines, measurement_lines
from meshscope.reports.model import joined, short
from meshscope.reports.ranking import (
    EQUAL,
    OTHER_WORK,
    Ranking,
    headline,
    ranking_table,
    rankings,
)
from meshscope.serialize import picked
from meshscope.serving.loads import LoadTable
from meshscope.serving.suggestions import suggestions_of
from meshscope.store.run import RunRecord

MAX_PAGES = 24  # runs with a page of their own, the best ones
MAX_TITLE = 200  # characters
TEMPLATE, STYLE = "page.html.j2", "page.css"
SCRIPTS = ("vega.js", "page.js")
ADDITIONS = {"explorer"}  # blocks with a script and a style of this name

# Characters that could end the script element, open a tag or entity, or break a line in JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page_html(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or of several runs ranked and compared."""
    groups = page_rankings(runs)
    ordered = [run for ranking in groups for run in ranking.runs]
    pages: list[dict[str, Any]] = [
        {
            "id": run.html_id("run"),
            "name": run.name,
            "title": short(run.answer.title, MAX_TITLE),
            "request": short(run.answer.request, MAX_TITLE),
            "top": list(top_blocks(run)),
            "sections": list(sections(run)),
        }
        for run in ordered[:MAX_PAGES]
    ]
    if len(runs) == 1:
        return _rendered(pages[0]["title"], lead=pages[0]["request"], pages=pages)
    return _rendered(
        headline(groups),
        comparison=list(comparison_blocks(groups)),
        pages=pages,
        n_hidden=len(ordered) - len(pages),
    )


def blocks_html(title: str, blocks: Iterable[Block], *, lead: str = "") -> str:
    """A page of these blocks, for results that are no runs."""
    return _rendered(short(title, MAX_TITLE), lead=lead, comparison=list(blocks))


def loads_html(table: LoadTable, prices: Mapping[str, float] | None = None) -> str:
    """The page of plans under several loads: the plot of throughput against latency, and the text of the command."""
    experiment = table.curves[0].placed.experiment
    headline = f"{table.winner.plan} serves {experiment.model.name} best on {experiment.topology.name} at most loads"
    said = [*load_lines(table, is_full=True, prices=prices), *measurement_lines(table)]
    return blocks_html(headline, [loads_chart(table), lines(said)])


def _rendered(
    title: str,
    *,
    lead: str = "",
    comparison: Sequence[Block] = (),
    pages: Sequence[dict[str, Any]] = (),
    n_hidden: int = 0,
) -> str:
    charts: list[Chart] = []

    def number(chart: Chart) -> int:
        charts.append(chart)
        return len(charts) - 1

    kinds = {block["block"] for block in comparison if isinstance(block, dict)}
    names = sorted(kinds & ADDITIONS)
    style = "".join(_text(name) for name in (STYLE, *(f"{name}.css" for name in names)))
    scripts = [_text(name) for name in (*SCRIPTS, *(f"{name}.js" for name in names))]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text(TEMPLATE)).render(
        title=f"meshscope: {title}",
        version=__version__,
        headline=title,
        lead=lead,
        comparison=comparison,
        pages=pages,
        n_hidden=n_hidden,
        number=number,
        style=Markup(style),  # noqa: S704  our own file
        scripts=[Markup(script) for script in scripts],  # noqa: S704  our own files
        style_hash=_hash(style),
        script_hashes=list(map(_hash, scripts)),
        data=lambda: Markup(_data(charts)),  # noqa: S704  escaped by _data
        footer=f"Made by meshscope {__version__}. This file makes no network requests.",
    )


def _data(charts: Sequence[Chart]) -> str:
    """All charts in the order of the page, as JSON that is safe inside an HTML script element."""
    document = {
        "config": look()["config"],
        "charts": [
            {
                **picked(chart, "kind", "title"),
                "description": f"{chart.description.rstrip(' .')}.",
                **picked(chart, "is_zoomed", "spec"),
            }
            for chart in charts
        ],
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _text(name: str) -> str:
    return own_text(f"reports/html/{name}")


MAX_COMPARED = 24  # runs in a chart
RANKED = "Ranked by the end-to-end time of the request. Runs that do not fit are struck out."
PRECISION = "The runs differ in precision, so their outputs differ."


def page_rankings(runs: Sequence[RunRecord]) -> list[Ranking[PageRun]]:
    """The runs grouped by their work; a run of other work has its name among all runs."""

    def labels(group: Sequence[RunRecord]) -> list[str]:
        return [short(label, MAX_NAME) for label in distinct_labels(group)]

    every = [
        PageRun(number=number, name=name or f"run {number}", run=run)
        for number, (run, name) in enumerate(zip(runs, labels(runs), strict=True), start=1)
    ]
    return [
        replace(group, names={run: run.name for run in group.runs}) if group.work is None else group
        for group in rankings(every, lambda group: labels([run.run for run in group]))
    ]


def _timed(ranking: Ranking[PageRun]) -> tuple[PageRun, ...]:
    """The first runs with a time, those that do not fit last; charts compare no more."""
    timed = (*ranking.ranked, *(run for run in ranking.rest if run.request_s is not None))
    return timed[:MAX_COMPARED]


def comparison_blocks(groups: Sequence[Ranking[PageRun]]) -> Iterator[Block]:
    """A table and charts for each group of runs with the same work; the charts of later groups are folded."""
    are_several = sum(ranking.work is not None for ranking in groups) > 1
    for number, ranking in enumerate(groups, start=1):
        yield paragraph(ranking.work or OTHER_WORK, "heading")
        if are_several and ranking.work is not None:
            yield paragraph(f"{ranking.sentence}.", "lead")
        for run in ranking.runs:
            for text, style in warnings(run):
                if "bad" in style and run.fits is not FitState.NO:
                    yield paragraph(f"{run.name}: {text}", style)
        best = ranking.best if len(ranking.ranked) > 1 else ranking.ranked[:1]
        classes = ["out" if run.fits is FitState.NO else "" for run in ranking.runs]
        classes = ["best" if r in best else c for r, c in zip(ranking.runs, classes, strict=True)]
        view = ranking_table(ranking, notes=_notes(ranking))
        yield page_table(f"runs-{number}", replace(view, title="Runs"), row_classes=classes)
        if number == 1 and ranking.ranked:
            fastest = ranking.ranked[0]
            steps = ((ranking.names[fastest], one) for one in suggestions_of(fastest.run))
            yield from suggestions(steps)
        if ranking.work is not None and len(_timed(ranking)) > 1:
            drawn = _charts(ranking, number)
            yield from drawn if number == 1 else fold("Step times and their differences", drawn)


def _charts(ranking: Ranking[PageRun], number: int) -> Iterator[Block]:
    named = [(ranking.names[run], run) for run in _timed(ranking)]
    bars = [(name, bar) for name, run in named for bar in run.strongest_costs.values()]
    yield from columns(cost_charts(bars))
    yield from difference_blocks(
        [(name, run.breakdowns) for name, run in named],
        n_decode_steps=named[0][1].n_decode_steps,
        table_id=f"differences-{number}",
    )


def _notes(ranking: Ranking[PageRun]) -> Iterator[str]:
    if ranking.work is None:
        return
    yield RANKED
    if len(ranking.best) > 1:
        yield EQUAL
    workloads = [run.run.manifest.experiment.workload for run in ranking.runs]
    if len({w and (w.weight_dtype, w.activation_dtype, w.cache_dtype) for w in workloads}) > 1:
        yield PRECISION
    sources = sorted({run.timed.source for run in _timed(ranking)})
    if len(sources) > 1:
        yield f"Times come from different sources ({joined(sources)}), whose errors differ."
