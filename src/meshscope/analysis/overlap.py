"""Communication against compute in time: overlap, exposed, idle, and their ratio, by union of spans.

Functions take a timeline: rows of the event table with `start_s` and `dur_s`, one for each execution,
where rows without kind are compute (their `opcode` says otherwise where they are copies or idle).
"""

from collections.abc import Iterator

import numpy as np
import polars as pl

from meshscope.analysis.spans import Spans, common, length, seconds, spans_of, union
from meshscope.analysis.volume import WHERE

# Rows without kind that are no compute: spans that name others, transfers, and nothing at all.
NO_COMPUTE = frozenset(
    {"idle", "while", "call", "conditional", "copy", "copy-start", "copy-done", "async-start"}
    | {"async-update", "async-done", "send", "send-done", "recv", "recv-done", "infeed", "outfeed"}
)
PLACE = (*WHERE, "device")

_TIMES = ("step_s", "collective_s", "compute_s", "hidden_s", "exposed_s", "idle_s")


def timed(events: pl.DataFrame) -> pl.DataFrame:
    """The rows that have a start and a duration."""
    return events.filter(pl.col("start_s").is_not_null(), pl.col("dur_s").is_not_null())


def is_compute() -> pl.Expr:
    """Whether a row of a timeline is compute."""
    opcode = pl.col("opcode").fill_null("")
    return pl.col("kind").is_null() & ~opcode.is_in(sorted(NO_COMPUTE))


def overlap(timeline: pl.DataFrame) -> pl.DataFrame:
    """Seconds of each device's step in collectives, compute, both, collectives alone, and neither.

    `hidden_s` is the time in which collectives and compute run together, `exposed_s` that in which only
    collectives do, synchronous ones included, `idle_s` that in which neither does, between the first
    start and the last end of any device's row in the phase. `overlap_frac` is hidden over collective
    time, `collective_compute_ratio` collective over compute time; null where the divisor is 0.
    Everything is a union over the rows of one device: two collectives at once count once.
    exposed + hidden = collective; hidden + exposed + compute alone + idle = step. Of several recorded steps
    (`step` of the timeline) the figures are means.

    Source: exposed communication by union of intervals as TraceLens and nsys-jax define it; summing
    durations instead overstates it (marin-community/marin issue 8053: 3.17 s became 1.02 s).
    """
    rows = [_overlap_row(own, step) for own, step in _by_device(timeline)]
    names = (*PLACE, "time_basis")
    types = {name: timeline.schema[name] for name in names} | dict.fromkeys(_TIMES, pl.Float64)
    steps = pl.DataFrame(rows, schema=types, orient="row")
    table = steps.group_by(PLACE, maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n_steps_seen"),
        pl.col("time_basis").first(),
        *(pl.col(name).mean() for name in _TIMES),
    )
    return table.sort("device", maintain_order=True).with_columns(
        _ratio("hidden_s", "collective_s").alias("overlap_frac"),
        _ratio("collective_s", "compute_s").alias("collective_compute_ratio"),
        _ratio("idle_s", "step_s").alias("idle_frac"),
    )


def _by_device(timeline: pl.DataFrame) -> Iterator[tuple[pl.DataFrame, tuple[int, int]]]:
    """Rows of each device in a step, with the step's bounds over all devices, in picoseconds."""
    steps = [*WHERE, *(["step"] if "step" in timeline.columns else [])]
    for of_phase in timed(timeline).partition_by(steps, maintain_order=True):
        every = spans_of(of_phase)
        if not len(every):
            continue
        bounds = int(every[0, 0]), int(every[-1, 1])
        for own in of_phase.partition_by("device", maintain_order=True):
            yield own, bounds


def _overlap_row(own: pl.DataFrame, step: tuple[int, int]) -> tuple[object, ...]:
    collective = spans_of(own.filter(pl.col("kind").is_not_null()))
    compute = spans_of(own.filter(is_compute()))
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
    named = own.row(0, named=True)
    bases = "+".join(sorted(own["time_basis"].drop_nulls().unique()))
    return (*(named[key] for key in PLACE), bases or None, *map(seconds, lengths))


def _ratio(above: str, below: str) -> pl.Expr:
    return pl.when(pl.col(below) > 0).then(pl.col(above) / pl.col(below))


def exposed_by(timeline: pl.DataFrame, column: str = "axis") -> pl.DataFrame:
    """Exposed seconds of each device's step by axis (or another column), which sum to the whole.

    Time in which collectives of several axes are exposed together is shared among them equally.

    Source: `overlap`; that shares are equal is our choice, so that the parts sum to the whole.
    """
    found: list[tuple[object, ...]] = []
    for own, _ in _by_device(timeline):
        compute = spans_of(own.filter(is_compute()))
        rows = own.filter(pl.col("kind").is_not_null())
        named = own.row(0, named=True)
        parts = {key[0]: spans_of(part) for key, part in rows.group_by(column, maintain_order=True)}
        for value, exposed_ps in _shared_ps(list(parts.values()), compute, list(parts)):
            found.append((*(named[key] for key in PLACE), value, seconds(exposed_ps)))
    types = {name: timeline.schema[name] for name in (*PLACE, column)}
    table = pl.DataFrame(found, schema={**types, "exposed_s": pl.Float64}, orient="row")
    n_steps = pl.col("step").n_unique() if "step" in timeline.columns else pl.lit(1)
    counts = timed(timeline).group_by(PLACE).agg(n_steps.alias("n_steps_seen"))
    sums = table.group_by([*PLACE, column], maintain_order=True).agg(pl.col("exposed_s").sum())
    joined = sums.join(counts, on=PLACE, how="left", nulls_equal=True, maintain_order="left")
    mean = (pl.col("exposed_s") / pl.col("n_steps_seen")).alias("exposed_s")
    return joined.select(*PLACE, column, mean)


def _shared_ps(
    parts: list[Spans], compute: Spans, values: list[object]
) -> Iterator[tuple[object, float]]:
    """Each part's length outside compute; where k parts run at once, each has 1/k of it."""
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
    """Whether the spans hold each elementary interval, by its start."""
    if not len(spans):
        return np.zeros(len(starts), np.bool_)
    place = np.searchsorted(spans[:, 0], starts, side="right") - 1
    return (place >= 0) & (spans[np.maximum(place, 0), 1] > starts)
