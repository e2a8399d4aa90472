"""Renders the page: one file with its style, its script and its data inside."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshscope import __version__
from meshscope.store.run import RunRecord
from meshscope.views.html.blocks import Chart, Section, shown
from meshscope.views.html.drawing import Charts
from meshscope.views.html.headline import headline
from meshscope.views.html.sections import sections
from meshscope.views.html.side import page_runs

TEMPLATE, STYLE, SCRIPT = "page.html.j2", "page.css", "charts.js"

# What would end a script, open a tag or an entity, or break a line in JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page_html(runs: Sequence[RunRecord]) -> str:
    """The page of these runs, side by side where there are several."""
    shown_runs = page_runs(runs)
    found = sections(shown_runs, Charts())
    style, script = _text(STYLE), _text(SCRIPT)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    name = ", ".join(run.short for run in shown_runs[:4])
    return environment.from_string(_text(TEMPLATE)).render(
        title=f"meshscope: {shown(name, 120)}",
        version=__version__,
        headline=headline(shown_runs),
        sections=found,
        style=Markup(style),  # noqa: S704  our own file
        script=Markup(script),  # noqa: S704  our own file
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=Markup(_json(_document(found))),  # noqa: S704  escaped by _json
        footer=f"Made by meshscope {__version__}. This file asks no host for anything.",
    )


def _document(found: Sequence[Section]) -> dict[str, Any]:
    """The data of all charts, by their numbers."""
    every = [b for s in found for p in s.panels for b in p.blocks if isinstance(b, Chart)]
    every.sort(key=lambda chart: chart.number)
    return {
        "charts": [
            {"kind": c.kind, "title": c.title, "description": c.description, "data": c.data}
            for c in every
        ]
    }


def _json(document: Any) -> str:
    """JSON that no HTML parser reads as anything else."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _hash(text: str) -> str:
    """As a Content-Security-Policy names what may run."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _text(name: str) -> str:
    return files("meshscope.views.html").joinpath(name).read_text(encoding="utf-8")
