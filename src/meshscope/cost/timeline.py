"""Stores the simulated step of a compiled run as a folded timeline of one device.

Lanes are `core` (compute, by part), `collective` and `copy`; each step starts at 0.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.cost.machine import LINK_LANE, Span
from meshscope.cost.steps import TimedStep
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE


def timeline_table(steps: Iterable[TimedStep]) -> pl.DataFrame:
    """One row per span, by FOLDED_SCHEMA."""
    records = [_record(step, span) for step in steps for span in step.simulated.spans]
    return pl.DataFrame(records, schema=FOLDED_SCHEMA, orient="row")


def write_timeline(folder: Path, steps: Iterable[TimedStep]) -> None:
    """Writes `timeline.parquet` into a run folder."""
    timeline_table(steps).write_parquet(folder / TIMELINE)


def _record(step: TimedStep, span: Span) -> tuple[Any, ...]:
    is_collective = span.task.lane == LINK_LANE
    kind, axis, part, basis = _collective(step, span) if is_collective else _compute(span)
    return (
        Source.COMPILED.value,
        Phase(step.time.phase).value,
        span.task.lane,
        part,
        kind,
        axis,
        step.start_s + span.start_s,
        span.dur_s,
        [times for times, _ in (*step.repeats, *span.repeats)],
        [period for _, period in (*step.repeats, *span.repeats)],
        basis,
        step.row_names.get(span.task.name, span.task.name),
    )


def _collective(step: TimedStep, span: Span) -> tuple[str | None, ...]:
    """Kind, axis, part and time basis of a collective."""
    first = step.simulated.collectives[span.task.name].operations[0]
    part = None if first.scope.part is None else first.scope.part.value
    return first.kind.value, step.axes[span.task.name], part, "interconnect_model"


def _compute(span: Span) -> tuple[str | None, ...]:
    """Kind, axis, part and time basis of compute or of a copy."""
    part, basis = span.task.key[2], span.task.key[3]
    return None, None, None if part is None else str(part), str(basis)
