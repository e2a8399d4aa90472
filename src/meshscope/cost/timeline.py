"""The timeline of a compiled step as a table: what ran when on one device, loops folded.

A row is a span of a lane: `core` (compute, by part), `collective`, `copy`. Where a loop repeats it,
`repeats` and `periods_s` tell how often and how far apart, outermost loop first; `start_s` is the
first time. `expanded` writes the repetitions out.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.cost.machine import ON_LINKS, Span
from meshscope.cost.steps import TimedStep
from meshscope.events.enums import Phase, Source

TIMELINE = "timeline.parquet"

SCHEMA: dict[str, Any] = {
    "source": pl.String,
    "phase": pl.String,
    "lane": pl.String,
    "part": pl.String,
    "kind": pl.String,
    "axis": pl.String,
    "start_s": pl.Float64,
    "dur_s": pl.Float64,
    "repeats": pl.List(pl.Int64),
    "periods_s": pl.List(pl.Float64),
    "time_basis": pl.String,
    "hlo_name": pl.String,
}


def timeline_table(steps: Iterable[TimedStep]) -> pl.DataFrame:
    """One row a span of these steps; each step starts at 0."""
    records = [_record(step, span) for step in steps for span in step.walked.spans]
    return pl.DataFrame(records, schema=SCHEMA, orient="row")


def write_timeline(folder: Path, steps: Iterable[TimedStep]) -> None:
    """Writes `timeline.parquet` into the folder of a run."""
    timeline_table(steps).write_parquet(folder / TIMELINE)


def expanded_table(folded: pl.DataFrame) -> pl.DataFrame:
    """The timeline with every repetition as a row of its own, in the order of phase and start."""
    rows = [row for record in folded.iter_rows(named=True) for row in _unfolded(record)]
    return pl.DataFrame(rows, schema=SCHEMA).sort(
        "phase", "start_s", "lane", descending=[True, False, False]
    )


def _unfolded(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    starts = [float(record["start_s"])]
    folds = zip(record["repeats"], record["periods_s"], strict=True)
    for times, period_s in reversed(list(folds)):
        starts = [start + k * period_s for k in range(times) for start in starts]
    for start in starts:
        yield {**record, "start_s": start, "repeats": [], "periods_s": []}


def _record(step: TimedStep, span: Span) -> tuple[Any, ...]:
    is_collective = span.task.lane == ON_LINKS
    kind, axis, part, basis = _of_collective(step, span) if is_collective else _of_core(span)
    return (
        Source.COMPILED.value,
        Phase(step.time.phase).value,
        span.task.lane,
        part,
        kind,
        axis,
        span.start_s,
        span.dur_s,
        [times for times, _ in span.repeats],
        [period for _, period in span.repeats],
        basis,
        span.task.name,
    )


def _of_collective(step: TimedStep, span: Span) -> tuple[str | None, ...]:
    first = step.walked.collectives[span.task.name].operations[0]
    part = None if first.scope.part is None else first.scope.part.value
    return first.kind.value, step.axes[span.task.name], part, "interconnect_model"


def _of_core(span: Span) -> tuple[str | None, ...]:
    part, basis = span.task.key[2], span.task.key[3]
    return None, None, None if part is None else str(part), str(basis)
