"""The roofline bounds and the floor of every step, and what it takes beyond them, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.roofline import (
    RESOURCES,
    RooflineBound,
    StepFloor,
    roofline_bounds,
    step_floor,
    why_sentence,
    why_sentences,
)
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime
from meshscope.hardware.chips import Chip
from meshscope.reports.model import CellValue, Figure, Unit, ViewTable, figure_column, text_column
from meshscope.reports.tables import bullets, rich_table
from meshscope.serialize import to_plain
from meshscope.store.run import RunRecord

MAX_FACTOR = 100  # a larger lead over the next bound is written `>100`


def roofline_document(run: RunRecord, source: Source, chip: Chip | None) -> dict[str, Any]:
    """The bounds of each phase of one source under `roofline`; empty if no step is modeled."""
    times = run.times_of(source)
    if chip is None or not times:
        return {}
    dtype = run.manifest.experiment.weight_dtype
    bounds = {t.phase.value: [asdict(b) for b in roofline_bounds(t, chip, dtype)] for t in times}
    return {"roofline": bounds}


def roofline_lines(run: RunRecord, chip: Chip | None) -> Iterator[RenderableType]:
    """What binds each step in a sentence, then a table for each modeled step."""
    dtype = run.manifest.experiment.weight_dtype
    times = run.times
    bounds = [] if chip is None else [(t, roofline_bounds(t, chip, dtype)) for t in times]
    if chip is None or not any(rows for _, rows in bounds):
        yield Text("no roofline: no step of this run is modeled", style="yellow")
        return
    yield bullets(why_sentences(run).values())
    yield Text("")
    for time, rows in bounds:
        yield rich_table(roofline_table(time, rows))
        yield Text("")
    yield Text(
        "bounds of one device: FLOPs, HBM bytes and wire bytes at the peaks of "
        f"{chip.name}: {chip.source}",
        style="dim",
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
    yield RESOURCES[bound.binding]
    factor = bound.factor
    yield "" if factor is None else f"{factor:.1f}" if factor < MAX_FACTOR else f">{MAX_FACTOR}"


def floor_document(run: RunRecord, source: Source, chip: Chip | None) -> dict[str, Any]:
    """The floor of each phase of one source under `floor`; empty if no step has one."""
    of_times = _floors(run.times_of(source), chip, run.manifest.experiment.weight_dtype)
    floors = {t.phase.value: to_plain(f) for t, f in of_times}
    return {"floor": floors} if floors else {}


def floor_lines(
    times: Sequence[StepTime], chip: Chip | None, weight_dtype: str | None = None
) -> Iterator[Text]:
    """One line for each modeled step: how far it is from its floor, and all that takes the rest."""
    for time, floor in _floors(times, chip, weight_dtype):
        sentence = why_sentence(time, chip, weight_dtype, max_causes=len(floor.causes))
        yield Text(f"{time.source} {sentence}")


def floor_rows(
    times: Sequence[StepTime], chip: Chip | None, weight_dtype: str | None = None
) -> Iterator[tuple[str, list[CellValue]]]:
    """The bounds of each step by resource, as rows of the table of steps."""
    floors = {id(time): floor for time, floor in _floors(times, chip, weight_dtype)}
    if not floors:
        return
    of_times = [floors.get(id(time)) for time in times]
    yield "HBM bytes / rate", [None if f is None else f.hbm_s for f in of_times]
    yield "FLOPs / peak", [None if f is None else f.compute_s for f in of_times]
    yield "wire bytes / link rate", [None if f is None else f.link_s for f in of_times]


def _floors(
    times: Sequence[StepTime], chip: Chip | None, weight_dtype: str | None
) -> Iterator[tuple[StepTime, StepFloor]]:
    for time in times:
        floor = None if chip is None else step_floor(time, chip, weight_dtype)
        if floor is not None and floor.floor_s > 0:
            yield time, floor
