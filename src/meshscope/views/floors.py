"""The floor of every step and what the step takes beyond it, as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from meshscope.analysis.floor import MIN_FRAC, StepFloor, step_floor
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime
from meshscope.serialize import to_plain
from meshscope.spec.hardware.chips import Chip
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds
from meshscope.views.model import CellValue
from meshscope.views.roofs import LABELS

MAX_CAUSES = 4


def floor_document(run: RunRecord, source: Source, chip: Chip | None) -> dict[str, Any]:
    """The floor of each phase of one source under `floor`; empty if no step has one."""
    floors = {t.phase.value: to_plain(f) for t, f in _floors(run.times_of(source), chip)}
    return {"floor": floors} if floors else {}


def floor_lines(times: Sequence[StepTime], chip: Chip | None) -> Iterator[Text]:
    """One line for each modeled step: how far it is from its floor, and what takes the rest."""
    for time, floor in _floors(times, chip):
        ratio = time.step.value_s / floor.floor_s
        head = f"{time.phase}, {time.source}: {ratio:.2f} x its {LABELS[floor.binding]} floor"
        causes = [cause for cause in floor.causes if cause.seconds > 0][:MAX_CAUSES]
        beyond = ", ".join(f"{c.cause} {format_seconds(c.seconds)}" for c in causes)
        text = f"{head}; beyond it: {beyond}" if beyond else head
        overlapped_s = -sum(cause.seconds for cause in floor.causes if cause.seconds < 0)
        if overlapped_s >= MIN_FRAC * time.step.value_s:
            text += f"; {format_seconds(overlapped_s)} of the floor overlaps other work"
        yield Text(text)


def floor_rows(
    times: Sequence[StepTime], chip: Chip | None
) -> Iterator[tuple[str, list[CellValue]]]:
    """The bounds of each step by resource, as rows of the table of steps."""
    floors = {id(time): floor for time, floor in _floors(times, chip)}
    if not floors:
        return
    of_times = [floors.get(id(time)) for time in times]
    yield "HBM bytes / rate", [None if f is None else f.hbm_s for f in of_times]
    yield "FLOPs / peak", [None if f is None else f.compute_s for f in of_times]
    yield "wire bytes / link rate", [None if f is None else f.link_s for f in of_times]


def _floors(times: Sequence[StepTime], chip: Chip | None) -> Iterator[tuple[StepTime, StepFloor]]:
    for time in times:
        floor = None if chip is None else step_floor(time, chip)
        if floor is not None and floor.floor_s > 0:
            yield time, floor
