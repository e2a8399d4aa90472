"""Overlap of communication with compute, exposed and idle time, as unions of intervals.

The functions take a timeline: rows of the event table with `start_s` and `dur_s`, one for each
execution. A row without `kind` is compute unless its `opcode` is in NO_COMPUTE. In a modeled pipeline, the
rows of a stage and those without stage are what one device of this stage does.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from meshscope.analysis.spans import Spans, common, length, seconds, spans_of, union
from meshscope.analysis.volume import WHERE
from meshscope.events.enums import Part

# Opcodes of rows without kind that are not compute: containers, transfers and idle time.
NO_COMPUTE = frozenset(
    {"idle", "while", "call", "conditional", "copy", "copy-start", "copy-done", "async-start"}
    | {"async-update", "async-done", "send", "send-done", "recv", "recv-done", "infeed", "outfeed"}
)
PLACE = (*WHERE, "device")

_TIMES = ("step_s", "collective_s", "compute_s", "hidden_s", "exposed_s", "idle_s")


def timed(events: pl.DataFrame) -> pl.DataFrame:
    """The rows with a start and a duration."""
    return events.filter(pl.col("start_s").is_not_null(), pl.col("dur_s").is_not_null())


def is_compute() -> pl.Expr:
    """Whether a row of a timeline is compute."""
    opcode = pl.col("opcode").fill_null("")
    return pl.col("kind").is_null() & ~opcode.is_in(sorted(NO_COMPUTE))


def overlap(timeline: pl.DataFrame) -> pl.DataFrame:
    """Seconds of each device's step in collectives, in compute, in both, and in neither.

    `hidden_s` is the time with both collectives and compute, `exposed_s` the time with collectives only
    (asynchronous or not), `idle_s` the time with neither, between the first start and the last end on
    any device in the phase. All durations are unions of intervals on one device, so concurrent
    collectives count once: collective = exposed + hidden, and step = hidden + exposed + compute only +
    idle. `overlap_frac` = hidden / collective, `collective_compute_ratio` = collective / compute,
    `idle_frac` = idle / step; a ratio is null if its divisor is 0. Figures are means over the recorded steps,
    and over the stages of a modeled pipeline.

    Source: TraceLens and nsys-jax define exposed communication by union of intervals. A sum of durations
    overstates it (marin-community/marin issue 8053: 3.17 s became 1.02 s).
    """
    rows = [_overlap_row(*place) for place in _by_device(timeline)]
    names = (*PLACE, "time_basis")
    types: dict[str, Any] = {name: timeline.schema[name] for name in names}
    types |= {"n_stages": pl.Int64} | dict.fromkeys(_TIMES, pl.Float64)
    steps = pl.DataFrame(rows, schema=types, orient="row")
    table = steps.group_by(PLACE, maintain_order=True).agg(
        (pl.len() // pl.col("n_stages").first()).cast(pl.Int64).alias("n_steps_seen"),
        pl.col("time_basis").first(),
        *(pl.col(name).mean() for name in _TIMES),
    )
    return table.sort("device", maintain_order=True).with_columns(
        ratio("hidden_s", "collective_s").alias("overlap_frac"),
        ratio("collective_s", "compute_s").alias("collective_compute_ratio"),
        ratio("idle_s", "step_s").alias("idle_frac"),
    )


def _by_device(timeline: pl.DataFrame) -> Iterator[tuple[pl.DataFrame, tuple[int, int], int]]:
    """The rows of each device in a step, the bounds of the step over all devices in picoseconds, and stages.

    The third is the number of modeled stages, each of which has its rows.
    """
    steps = [*WHERE, *(["step"] if "step" in timeline.columns else [])]
    for of_phase in timed(timeline).partition_by(steps, maintain_order=True):
        spans = spans_of(of_phase)
        if not len(spans):
            continue
        bounds = int(spans[0, 0]), int(spans[-1, 1])
        for device_rows in of_phase.partition_by("device", maintain_order=True):
            of_stages = list(_by_stage(device_rows))
            for rows in of_stages:
                yield rows, bounds, len(of_stages)


def _by_stage(rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The rows of each modeled stage, with what it receives of the stage before."""
    last = rows["stage"].max() if rows["device"].null_count() else None
    if not isinstance(last, int):
        yield rows
        return
    for stage in range(last + 1):
        is_received = (pl.col("part") == Part.STAGE.value) & (pl.col("stage") == stage - 1)
        yield rows.filter(
            pl.col("stage").eq_missing(stage) | pl.col("stage").is_null() | is_received
        )


def _overlap_row(rows: pl.DataFrame, step: tuple[int, int], n_stages: int) -> tuple[object, ...]:
    collective = spans_of(rows.filter(pl.col("kind").is_not_null()))
    compute = spans_of(rows.filter(is_compute()))
    hidden_ps = length(common(collective, compute))
    busy_ps = length(union(np.concatenate([collective, compute])))
    step_ps = step[1] - step[0]
    lengths = (
        step_ps,
        length(collective),
        length(compute),
        hidden_ps,
        length(collective) - hidden_ps,
        step_ps - busy_ps,
    )
    named = rows.row(0, named=True)
    bases = "+".join(sorted(rows["time_basis"].drop_nulls().unique()))
    return (*(named[key] for key in PLACE), bases or None, n_stages, *map(seconds, lengths))


def ratio(above: str | pl.Expr, below: str) -> pl.Expr:
    """The quotient of two columns; null if the divisor is 0."""
    dividend = pl.col(above) if isinstance(above, str) else above
    return pl.when(pl.col(below) > 0).then(dividend / pl.col(below))


def exposed_by(timeline: pl.DataFrame, column: str = "axis") -> pl.DataFrame:
    """Exposed seconds of each device's step by axis (or another column); they sum to `exposed_s`.

    If collectives of several axes are exposed at the same time, each axis gets an equal share of it.

    Source: `overlap`; the equal shares are a convention, so that the parts sum to the whole.
    """
    shares: list[tuple[object, ...]] = []
    for rows, _, n_stages in _by_device(timeline):
        compute = spans_of(rows.filter(is_compute()))
        collectives = rows.filter(pl.col("kind").is_not_null())
        named = rows.row(0, named=True)
        groups = collectives.group_by(column, maintain_order=True)
        parts = {key[0]: spans_of(part) for key, part in groups}
        for value, exposed_ps in _shared_ps(list(parts.values()), compute, list(parts)):
            shares.append((*(named[key] for key in PLACE), value, seconds(exposed_ps) / n_stages))
    types = {name: timeline.schema[name] for name in (*PLACE, column)}
    table = pl.DataFrame(shares, schema={**types, "exposed_s": pl.Float64}, orient="row")
    n_steps = pl.col("step").n_unique() if "step" in timeline.columns else pl.lit(1)
    counts = timed(timeline).group_by(PLACE).agg(n_steps.alias("n_steps_seen"))
    sums = table.group_by([*PLACE, column], maintain_order=True).agg(pl.col("exposed_s").sum())
    joined = sums.join(counts, on=PLACE, how="left", nulls_equal=True, maintain_order="left")
    mean = (pl.col("exposed_s") / pl.col("n_steps_seen")).alias("exposed_s")
    return joined.select(*PLACE, column, mean)


def _shared_ps(
    parts: list[Spans], compute: Spans, values: list[object]
) -> Iterator[tuple[object, float]]:
    """Picoseconds of each part outside compute; k concurrent parts get 1/k each."""
    edges = np.unique(np.concatenate([compute.ravel(), *(part.ravel() for part in parts)]))
    if len(edges) < 2:
        return
    widths, middles = np.diff(edges), edges[:-1]
    covers = np.array([_covers(part, middles) for part in parts])
    n = covers.sum(axis=0)
    weight = np.where((n > 0) & ~_covers(compute, middles), widths / np.maximum(n, 1), 0.0)
    for value, cover in zip(values, covers, strict=True):
        yield value, float((weight * cover).sum())


def _covers(spans: Spans, starts: np.ndarray) -> np.ndarray:
    """Whether the spans cover each elementary interval, given by its start."""
    if not len(spans):
        return np.zeros(len(starts), np.bool_)
    index = np.searchsorted(spans[:, 0], starts, side="right") - 1
    return (index >= 0) & (spans[np.maximum(index, 0), 1] > starts)
