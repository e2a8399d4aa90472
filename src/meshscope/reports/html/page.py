"""Renders a report as one HTML file with its style, scripts and data inside; a section without data is left out."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshscope import __version__
from meshscope.analysis.join import Agreement
from meshscope.reports.charts.spec import CONFIG, Chart
from meshscope.reports.html.blocks import Block, flattened
from meshscope.reports.html.bytes import roofline_blocks, size_blocks, traffic_blocks
from meshscope.reports.html.collectives import (
    collective_blocks,
    condition_blocks,
    inserted_blocks,
    source_blocks,
)
from meshscope.reports.html.hero import hero_blocks
from meshscope.reports.html.page_run import PageRun, page_runs
from meshscope.reports.html.ranking import comparison_blocks, page_rankings
from meshscope.reports.html.times import (
    cost_blocks,
    interval_blocks,
    speculation_blocks,
    timeline_blocks,
)
from meshscope.reports.plain import short
from meshscope.reports.ranking import headline
from meshscope.store.run import RunRecord

COST = "One step of each phase on one device. Communication is exposed while the device computes nothing; communication hidden behind compute costs no time."
SPECULATION = "A draft proposes tokens, and the model verifies them in one decode step. The verification and the draft have run folders of their own."
COLLECTIVES = "Per step on one device; equal layers share a line. Payload is the full array of one operation, wire the bytes that one device sends for it."
SOURCES = (
    "Counts, arrays, groups and bytes must match exactly; times must agree within their intervals."
)
TIMELINE = "One device. Lanes: compute by part of the model, collectives by mesh axis, copies between memories. Drag to pan; zoom with the buttons, with + and -, or with Ctrl and the mouse wheel."
TRAFFIC = "Bytes from device to device, and the same bytes on the links between chips, as routed by the interconnect model."
INTERVALS = "When each mesh axis has traffic in a step, how long it is idle, and what repeats."
ROOFLINE = (
    "Achieved FLOP/s of each part of the model during compute, against the peaks of the chip."
)
SIZES = "How often each payload occurs in one step, and the bandwidth that it achieves."
INSERTED = "Who inserted each collective, its opcode, and the algorithm that the compiler chose."


@dataclass(frozen=True, slots=True, kw_only=True)
class _SectionKind:
    """A section of every run: what makes its blocks, and whether it is open at first."""

    name: str
    title: str
    lead: str
    blocks: Callable[[PageRun], Iterator[Block]]
    is_open: bool = False


KINDS = (
    _SectionKind(name="cost", title="Step time", lead=COST, blocks=cost_blocks, is_open=True),
    _SectionKind(
        name="speculation",
        title="Speculative decoding",
        lead=SPECULATION,
        blocks=speculation_blocks,
        is_open=True,
    ),
    _SectionKind(
        name="timeline", title="Timeline", lead=TIMELINE, blocks=timeline_blocks, is_open=True
    ),
    _SectionKind(
        name="collectives",
        title="Collectives",
        lead=COLLECTIVES,
        blocks=collective_blocks,
        is_open=True,
    ),
    _SectionKind(
        name="sources", title="Agreement of sources and totals", lead=SOURCES, blocks=source_blocks
    ),
    _SectionKind(name="roofline", title="Roofline", lead=ROOFLINE, blocks=roofline_blocks),
    _SectionKind(
        name="traffic", title="Traffic between devices", lead=TRAFFIC, blocks=traffic_blocks
    ),
    _SectionKind(
        name="intervals", title="Traffic intervals", lead=INTERVALS, blocks=interval_blocks
    ),
    _SectionKind(name="sizes", title="Payload sizes and bandwidth", lead=SIZES, blocks=size_blocks),
    _SectionKind(
        name="inserted", title="Compiler decisions", lead=INSERTED, blocks=inserted_blocks
    ),
    _SectionKind(
        name="conditions", title="Conditions and versions", lead="", blocks=condition_blocks
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]
    is_open: bool


def _is_contradicted(run: PageRun) -> bool:
    """Whether the sources of the run disagree on collectives or times."""
    return any(
        a.agreement is Agreement.DIFFERENT or a.is_time_within is False
        for a in run.answer.agreements
    )


def sections(run: PageRun) -> tuple[Section, ...]:
    """The sections of a run that have something to show."""
    every = (
        Section(
            id=run.html_id(kind.name),
            title=kind.title,
            lead=kind.lead,
            blocks=tuple(kind.blocks(run)),
            is_open=kind.is_open or (kind.name == "sources" and _is_contradicted(run)),
        )
        for kind in KINDS
    )
    return tuple(section for section in every if section.blocks)


MAX_PAGES = 24  # runs with a page of their own, the best ones
MAX_TITLE = 200  # characters
TEMPLATE, STYLE = "page.html.j2", "page.css"
SCRIPTS = ("vega.js", "page.js")

# Characters that could end the script element, open a tag or entity, or break a line in JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunPage:
    """The part of a page about one run."""

    id: str
    name: str
    title: str
    request: str
    hero: tuple[Block, ...]
    sections: tuple[Section, ...]

    @property
    def blocks(self) -> Iterator[Block]:
        """All blocks in the order of the page."""
        yield from flattened(self.hero)
        for section in self.sections:
            yield from flattened(section.blocks)


def page_html(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or of several runs ranked and compared."""
    shown_runs = page_runs(runs)
    groups = page_rankings(shown_runs)
    ordered = [run for ranking in groups for run in ranking.runs]
    pages = [_run_page(run) for run in ordered[:MAX_PAGES]]
    if len(runs) == 1:
        return _rendered(pages[0].title, lead=pages[0].request, pages=pages)
    n_hidden = len(ordered) - len(pages)
    return _rendered(
        headline(groups),
        comparison=tuple(comparison_blocks(groups)),
        pages=pages,
        n_hidden=n_hidden,
    )


def blocks_html(title: str, blocks: Sequence[Block], *, lead: str = "") -> str:
    """A page of these blocks, for results that are no runs."""
    return _rendered(short(title, MAX_TITLE), lead=lead, comparison=blocks)


def _rendered(
    title: str,
    *,
    lead: str = "",
    comparison: Sequence[Block] = (),
    pages: Sequence[_RunPage] = (),
    n_hidden: int = 0,
) -> str:
    """One HTML file."""
    blocks = [*flattened(comparison), *(block for page in pages for block in page.blocks)]
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
        next_number=count().__next__,
        style=Markup(style),  # noqa: S704  our own file
        scripts=[Markup(script) for script in scripts],  # noqa: S704  our own files
        style_hash=_hash(style),
        script_hashes=list(map(_hash, scripts)),
        data=Markup(_json(_document(blocks))),  # noqa: S704  escaped by _json
        footer=f"Made by meshscope {__version__}. This file makes no network requests.",
    )


def _run_page(run: PageRun) -> _RunPage:
    return _RunPage(
        id=run.html_id("run"),
        name=run.name,
        title=short(run.answer.title, MAX_TITLE),
        request=short(run.answer.request, MAX_TITLE),
        hero=tuple(hero_blocks(run)),
        sections=sections(run),
    )


def _document(blocks: Iterable[Block]) -> dict[str, Any]:
    """The data of all charts in the order of the page."""
    return {
        "config": CONFIG,
        "charts": [
            {
                "kind": c.kind,
                "title": c.title,
                "description": f"{c.description.rstrip(' .')}.",
                "is_zoomed": c.is_zoomed,
                "spec": c.spec,
            }
            for c in blocks
            if isinstance(c, Chart)
        ],
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
    return files("meshscope.reports.html").joinpath(name).read_text(encoding="utf-8")
