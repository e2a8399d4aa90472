"""Renders a report as one HTML file with its style, script and data inside."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshscope import __version__
from meshscope.store.run import RunRecord
from meshscope.views.html.blocks import Chart
from meshscope.views.html.headline import headline
from meshscope.views.html.page_run import page_runs
from meshscope.views.html.sections import Section, sections
from meshscope.views.plain import short

TEMPLATE, STYLE, SCRIPT = "page.html.j2", "page.css", "charts.js"

# Characters that could end the script element, open a tag or entity, or break a line in JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page_html(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or of several runs side by side."""
    shown_runs = page_runs(runs)
    all_sections = sections(shown_runs)
    style, script = _text(STYLE), _text(SCRIPT)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    name = ", ".join(run.label for run in shown_runs[:4])
    return environment.from_string(_text(TEMPLATE)).render(
        title=f"meshscope: {short(name, 120)}",
        version=__version__,
        headline=headline(shown_runs),
        sections=all_sections,
        next_number=count().__next__,
        style=Markup(style),  # noqa: S704  our own file
        script=Markup(script),  # noqa: S704  our own file
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=Markup(_json(_document(all_sections))),  # noqa: S704  escaped by _json
        footer=f"Made by meshscope {__version__}. This file makes no network requests.",
    )


def _document(all_sections: Sequence[Section]) -> dict[str, Any]:
    """The data of all charts in the order of the page."""
    blocks = (b for section in all_sections for _, panel in section.panels for b in panel)
    all_charts = [block for block in blocks if isinstance(block, Chart)]
    return {
        "charts": [
            {
                "kind": c.kind,
                "title": c.title,
                "description": f"{c.description.rstrip(' .')}.",
                "data": c.data,
            }
            for c in all_charts
        ]
    }


def _json(document: Any) -> str:
    """JSON that is safe inside an HTML script element."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _hash(text: str) -> str:
    """The hash by which the Content-Security-Policy allows this script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


@cache
def _text(name: str) -> str:
    return files("meshscope.views.html").joinpath(name).read_text(encoding="utf-8")
