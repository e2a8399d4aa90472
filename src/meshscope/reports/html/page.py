"""Renders a report as one HTML file with its style, scripts and data inside; a section without data is left out."""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshscope import __version__
from meshscope.reports.charts.spec import Chart, look
from meshscope.reports.html.blocks import Block
from meshscope.reports.html.ranking import comparison_blocks, page_rankings
from meshscope.reports.html.run import top_blocks
from meshscope.reports.html.sections import sections
from meshscope.reports.model import short
from meshscope.reports.ranking import headline
from meshscope.serialize import picked
from meshscope.store.run import RunRecord

MAX_PAGES = 24  # runs with a page of their own, the best ones
MAX_TITLE = 200  # characters
TEMPLATE, STYLE = "page.html.j2", "page.css"
SCRIPTS = ("vega.js", "page.js")

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

    style, scripts = _text(STYLE), [_text(name) for name in SCRIPTS]
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
    """The hash by which the Content-Security-Policy allows this script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _text(name: str) -> str:
    return files("meshscope.reports.html").joinpath(name).read_text(encoding="utf-8")
