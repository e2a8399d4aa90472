"""What a step and a request cost: bars, large figures, and each part of the model."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshscope.analysis.request import ASSUMPTION
from meshscope.events.enums import Phase, Source
from meshscope.units import format_seconds
from meshscope.views.charts.cost import CostBar
from meshscope.views.html import charts
from meshscope.views.html.blocks import (
    Block,
    Panel,
    Paragraph,
    Section,
    Tile,
    Tiles,
    basis_words,
    shown,
    unknown,
)
from meshscope.views.html.drawing import Charts, between, definition
from meshscope.views.html.side import PageRun
from meshscope.views.times import time_document

WHISKER = "The line at the end of a bar is between what the step is taken to lie."


def cost_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """Bars of a step, large figures of a request, and a table of parts, of every run."""
    panels: list[Panel] = []
    if len(runs) == 1:
        panels.append(Panel(title="", blocks=tuple(_latency(runs[0]))))
    panels.append(Panel(title="", blocks=tuple(_cost_charts(runs, new))))
    panels += [Panel(title=run.title, blocks=tuple(_cost_blocks(run))) for run in runs if run.costs]
    return Section(
        id="cost",
        title="What it costs",
        lead="One step of each phase on one device. Exposed is communication during which the device computes nothing; what is hidden behind compute costs no time.",
        panels=tuple(panels),
    )


def _cost_charts(runs: Sequence[PageRun], new: Charts) -> Iterator[Block]:
    for phase in Phase:
        bars = [(r, bar) for r in runs for bar in r.costs if bar.phase is phase]
        if bars:
            data = charts.cost_data([(_bar_name(r, bar), bar) for r, bar in bars])
            yield new.new(
                "bars",
                f"Time of one {phase} step",
                data,
                about="; ".join(f"{_bar_name(r, b)} {_interval(b)}" for r, b in bars) + ".",
                note=WHISKER if any(bar.low_s is not None for _, bar in bars) else "",
            )
    for run in runs:
        if not run.costs:
            yield unknown(
                run.named("no step has a duration: nothing was timed and no time was modelled")
            )


def _bar_name(run: PageRun, bar: CostBar) -> str:
    plan = "" if run.is_alone else shown(run.run.manifest.experiment.plan or "", 24)
    return " ".join(
        filter(None, (run.named(plan).strip() if not run.is_alone else "", bar.source.value))
    )


def _interval(bar: CostBar) -> str:
    if bar.low_s is None or bar.high_s is None:
        return format_seconds(bar.step_s)
    return f"{format_seconds(bar.step_s)} ({format_seconds(bar.low_s)} to {format_seconds(bar.high_s)})"


def _cost_blocks(run: PageRun) -> Iterator[Block]:
    if run.subject.times:
        yield Paragraph(text=f"Modelled time is that of {ASSUMPTION}.")
        for time in run.subject.times:
            for note in time.notes:
                yield Paragraph(text=f"{time.phase}: {shown(note, 600)}")
    yield run.table("step_time", "Time of a step", note=definition("step_time"))
    yield run.table("part_costs", "Cost of each part of the model", note=definition("part_costs"))
    if run.subject.measured is not None:
        yield run.table("latency", "Timed requests")
        yield run.table("device_idle", "Load of devices")


def _latency(run: PageRun) -> Iterator[Block]:
    """TTFT, TPOT and end to end as large figures, measured where a request was timed."""
    latency = run.subject.latency
    if latency is not None:
        named = (("TTFT", latency.ttft), ("TPOT", latency.tpot), ("end to end", latency.e2e))
        yield Tiles(
            tiles=tuple(
                Tile(
                    name=name,
                    value=format_seconds(spread.mean_s),
                    note=f"measured, mean of {spread.n}; p99 {format_seconds(spread.p99_s)}",
                )
                for name, spread in named
                if spread is not None
            )
        )
        return
    document = modelled(run)
    if document is None:
        return
    named_keys = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s"))
    mark = " extrapolated," if document["is_extrapolated"] else ""
    yield Tiles(
        tiles=tuple(
            Tile(
                name=name,
                value=format_seconds(document[key]),
                note=f"{between(*document['intervals'].get(key, (None, None)))};{mark} {modelled_source(run)}",
            )
            for name, key in named_keys
            if document[key] is not None
        )
    )
    yield Paragraph(text=f"Basis: {basis_words(document['basis'])}, the larger part first.")


def modelled(run: PageRun) -> dict[str, Any] | None:
    """The modelled times of the strongest source that has some."""
    source = modelled_source(run)
    return None if source is None else time_document(run.run, source)


def modelled_source(run: PageRun) -> Source | None:
    """Times of a request as `show --json` has them; None where no step was modelled."""
    return next((s for s in reversed(Source) if run.run.times_of(s)), None)
