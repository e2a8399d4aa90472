"""The roofline bounds of every step and part, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.roofline import BindingResource, RooflineBound, roofline_bounds
from meshscope.analysis.why import why_sentences
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime
from meshscope.spec.hardware.chips import Chip
from meshscope.store.run import RunRecord
from meshscope.views.model import CellValue, Figure, Unit, ViewTable, figure_column, text_column
from meshscope.views.tables import bullets, rich_table

MAX_FACTOR = 100  # a larger lead over the next bound is written `>100`
LABELS = {
    BindingResource.COMPUTE: "compute",
    BindingResource.HBM: "HBM",
    BindingResource.INTERCONNECT: "links",
}


def roofline_document(run: RunRecord, source: Source, chip: Chip | None) -> dict[str, Any]:
    """The bounds of each phase of one source under `roofline`; empty if no step is modeled."""
    times = run.times_of(source)
    if chip is None or not times:
        return {}
    bounds = {t.phase.value: [asdict(b) for b in roofline_bounds(t, chip)] for t in times}
    return {"roofline": bounds}


def roofline_lines(run: RunRecord, chip: Chip | None) -> Iterator[RenderableType]:
    """What binds each step in a sentence, then a table for each modeled step."""
    bounds = [] if chip is None else [(time, roofline_bounds(time, chip)) for time in run.times]
    if chip is None or not any(rows for _, rows in bounds):
        yield Text("no roofline: no step of this run is modeled", style="yellow")
        return
    yield bullets(why_sentences(run).values())
    yield Text("")
    for time, rows in bounds:
        yield rich_table(roofline_table(time, rows))
        yield Text("")
    yield Text(
        f"peaks of one {chip.name}: {chip.source}; interconnect: collective time model", style="dim"
    )


def roofline_table(time: StepTime, bounds: list[RooflineBound]) -> ViewTable:
    """One row for the step and each of its parts."""
    seconds = ("compute\nbound", "HBM\nbound", "link\nbound", "modeled")
    return ViewTable(
        columns=(
            text_column(f"{time.phase}, {time.source}"),
            *(figure_column(label, Unit.SECONDS) for label in seconds),
            figure_column("bound /\nmodeled"),
            figure_column("bound by"),
            figure_column("over the\nnext bound"),
        ),
        rows=tuple(tuple(_cells(bound)) for bound in bounds),
    )


def _cells(bound: RooflineBound) -> Iterator[CellValue]:
    yield bound.part
    yield from (bound.compute_s, bound.hbm_s, bound.interconnect_s, bound.taken_s)
    frac = bound.roof_frac
    yield Figure(value=None, unit=Unit.FRACTION) if frac is None else f"{frac:.0%}"
    yield LABELS[bound.binding]
    factor = bound.factor
    yield "" if factor is None else f"{factor:.1f}" if factor < MAX_FACTOR else f">{MAX_FACTOR}"
