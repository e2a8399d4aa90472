"""Modeled step times as tables, and overlap of communication with compute, exposed and idle time, as unions of intervals.

Integers make parts sum exactly to the whole. A span array has shape [n, 2]: start and end.

The functions take a timeline: rows of the event table with `start_s` and `dur_s`, one for each
execution. A row without `kind` is compute unless its `opcode` is in NO_COMPUTE. In a modeled pipeline, the
rows of a stage and those without stage are what one device of this stage does.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.analysis.request import basis_of, modeled_request_time
from meshscope.analysis.volume import WHERE
from meshscope.events.enums import Part, Source
from meshscope.events.step_time import StepTime

PS_PER_S = 1e12
Spans = NDArray[np.int64]


def spans_of(frame: pl.DataFrame) -> Spans:
    """The union of the intervals [start_s, start_s + dur_s) of the rows."""
    start = frame["start_s"].to_numpy()
    bounds = np.stack([start, start + frame["dur_s"].to_numpy()], axis=1)
    return union(np.rint(bounds * PS_PER_S).astype(np.int64))


def union(spans: Spans, *, max_gap: int = 0) -> Spans:
    """Merges spans that overlap, adjoin or have a gap of at most `max_gap`; drops empty spans."""
    lasting = spans[spans[:, 1] > spans[:, 0]]
    if not len(lasting):
        return np.empty((0, 2), np.int64)
    ordered = lasting[np.argsort(lasting[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.flatnonzero(np.append(True, ordered[1:, 0] - reached[:-1] > max_gap))
    ends = np.append(begins[1:], len(ordered)) - 1
    return np.stack([ordered[begins, 0], reached[ends]], axis=1)


def common(left: Spans, right: Spans) -> Spans:
    """The intersection of two sets of spans."""
    if not len(left) or not len(right):
        return np.empty((0, 2), np.int64)
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    last = np.searchsorted(right[:, 0], left[:, 1], side="left")
    n = np.maximum(last - first, 0)
    ours = np.repeat(np.arange(len(left)), n)
    theirs = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n) + np.repeat(first, n)
    starts = np.maximum(left[ours, 0], right[theirs, 0])
    return np.stack([starts, np.minimum(left[ours, 1], right[theirs, 1])], axis=1)


def length(spans: Spans) -> int:
    """Total length in picoseconds."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def seconds(length_ps: float) -> float:
    """Converts picoseconds to seconds."""
    return float(length_ps) / PS_PER_S


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


_WHERE = dict.fromkeys(("source", "phase"), pl.String)
_PARTS = (
    *("compute_s", "collective_s", "exposed_s", "idle_s", "bubble_s"),
    *("unestimated_frac", "is_extrapolated"),
)


def step_time(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled seconds of one step on one device: compute, exposed communication, idle time and bubble.

    step = compute + exposed + idle; the pipeline bubble is part of idle. Figures of a pipeline are means over
    its stages. `low_s` and `high_s` bound the
    estimated step time. `collective_s` is the sum of all collectives, hidden or not. `exposed_frac` =
    exposed / step, `overlap_frac` = 1 - exposed / collective, `collective_compute_ratio` = collective /
    compute. `unestimated_frac` is the fraction of the step without a compiler estimate.

    Source: simulation of the compiled schedule (`meshscope.cost`) or its closed form. Exposed
    communication is a union of intervals, including synchronous collectives, as in `overlap`.
    """
    rows = [
        {
            **{name: getattr(time, name) for name in _PARTS},
            "source": time.source.value,
            "phase": time.phase.value,
            "step_s": time.step.value_s,
            "low_s": time.step.low_s,
            "high_s": time.step.high_s,
            "time_basis": basis_of([time]),
        }
        for time in times
    ]
    schema = _WHERE | dict.fromkeys(("step_s", "low_s", "high_s", *_PARTS), pl.Float64)
    schema |= {"is_extrapolated": pl.Boolean, "time_basis": pl.String}
    hidden = (pl.col("collective_s") - pl.col("exposed_s")).clip(lower_bound=0)
    return pl.DataFrame(rows, schema=schema).with_columns(
        ratio("exposed_s", "step_s").alias("exposed_frac"),
        ratio(hidden, "collective_s").alias("overlap_frac"),
        ratio("collective_s", "compute_s").alias("collective_compute_ratio"),
    )


def exposed_by_axis(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled exposed seconds of one step by the axis of the collective that the core waits for.

    The axes sum to the exposed time of the step.

    Source: simulation of the compiled schedule or its closed form, as `step_time`.
    """
    rows = [
        (time.source.value, time.phase.value, axis, seconds)
        for time in times
        for axis, seconds in time.exposed_by_axis_s.items()
    ]
    schema = {**_WHERE, "axis": pl.String, "exposed_s": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def part_costs(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled cost of each part of the model in one step.

    Seconds of compute, of all collectives and of exposed communication; FLOPs, HBM bytes and wire bytes.

    Source: simulation of the compiled schedule, as `step_time`; FLOPs and HBM bytes follow from the shapes
    of the operations.
    """
    names = ("compute_s", "collective_s", "exposed_s", "flops", "hbm_bytes", "wire_bytes")
    rows = [
        (time.source.value, time.phase.value, part.part, *(getattr(part, n) for n in names))
        for time in times
        for part in time.parts
    ]
    schema = {**_WHERE, "part": pl.String, **dict.fromkeys(names, pl.Float64)}
    return pl.DataFrame(rows, schema=schema, orient="row")


def modeled_latency(times: Iterable[StepTime], *, n_decode_steps: int | None) -> pl.DataFrame:
    """Modeled TTFT, TPOT and end-to-end time of a request, with their bounds.

    `ttft` = prefill step, `tpot` = decode step, `e2e` = prefill step + all decode steps. Device time only,
    without host, queueing and tokenization; all sequences start together, and all decode steps take the
    same time. `latency` is the measured counterpart.

    Source: the steps of `step_time`; TTFT and TPOT as defined by `latency`.
    """
    steps = list(times)
    rows = [
        (source.value, name, seconds.value_s, seconds.low_s, seconds.high_s, request.basis)
        for source in Source
        if (source_times := [time for time in steps if time.source is source])
        for request in [modeled_request_time(source_times, n_decode_steps=n_decode_steps)]
        for name, seconds in (("ttft", request.ttft), ("tpot", request.tpot), ("e2e", request.e2e))
        if seconds is not None
    ]
    schema = dict.fromkeys(("source", "latency"), pl.String)
    schema |= dict.fromkeys(("mean_s", "low_s", "high_s"), pl.Float64)
    return pl.DataFrame(rows, schema={**schema, "time_basis": pl.String}, orient="row")
