"""The timeline of one step on one device, and which stretch of it is one layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.intervals import bursts, placed
from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.analysis.overlap import is_compute, timed
from meshscope.analysis.timeline import COPY, last_step, read_table
from meshscope.events.enums import Source
from meshscope.events.timeline import TIMELINE

MAX_SPANS = 6_000  # of one phase that are drawn one by one; beyond, the shortest are left out
MAX_BURSTS = 1_000
COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """Something that ran on a lane; `repeats` are (times, period in seconds), the outermost loop first."""

    lane: str
    label: str
    start_s: float
    dur_s: float
    repeats: tuple[tuple[int, float], ...] = ()

    @property
    def n(self) -> int:
        """How often it ran in the step."""
        times = 1
        for n, _ in self.repeats:
            times *= n
        return times

    @property
    def end_s(self) -> float:
        """When its last repetition ended."""
        return self.start_s + sum((n - 1) * period for n, period in self.repeats) + self.dur_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """The spans of one step of a phase; `layer` is the stretch of one layer, null where none stands out.

    `n_left_out` spans are too short to be drawn among so many.
    """

    source: str
    phase: str
    end_s: float
    spans: tuple[TimeSpan, ...]
    layer: tuple[str, float, float] | None
    n_left_out: int


def step_timelines(folder: Path | None, subject: MetricInputs) -> tuple[StepTimeline, ...]:
    """A step of each phase, modelled and measured, as far as the run folder keeps them.

    Of a measured run, the last profiled step on the first device.
    """
    found = [*_folded(folder), *_measured(subject)]
    return tuple(
        _timeline(part, str(source), str(phase), subject)
        for rows in found
        for (source, phase), part in rows.group_by("source", "phase", maintain_order=True)
    )


def _folded(folder: Path | None) -> Iterator[pl.DataFrame]:
    path = None if folder is None else folder / TIMELINE
    if path is not None and path.is_file():
        yield read_table(path).filter(pl.col("start_s").is_not_null())


def _measured(subject: MetricInputs) -> Iterator[pl.DataFrame]:
    """Single executions in the form of folded ones, from the start of the step."""
    if subject.timeline is None:
        return
    is_measured = pl.col("source") == Source.MEASURED.value
    steps = last_step(timed(subject.timeline.filter(is_measured)))
    own = steps.filter(pl.col("device").eq_missing(pl.col("device").min().over("phase")))
    if own.is_empty():
        return
    is_collective = pl.col("kind").is_not_null()
    lane = pl.when(is_collective).then(pl.lit(COLLECTIVE)).when(is_compute()).then(pl.lit("core"))
    yield own.filter(is_collective | is_compute() | (pl.col("opcode") == COPY)).with_columns(
        lane.otherwise(pl.lit(COPY)).alias("lane"),
        pl.col("start_s") - pl.col("start_s").min().over("phase"),
        pl.lit([], pl.List(pl.Int64)).alias("repeats"),
        pl.lit([], pl.List(pl.Float64)).alias("periods_s"),
    )


def _timeline(rows: pl.DataFrame, source: str, phase: str, subject: MetricInputs) -> StepTimeline:
    every = [_span(row) for row in rows.iter_rows(named=True)]
    kept = sorted(every, key=lambda span: -span.dur_s)[:MAX_SPANS]
    spans = sorted(kept, key=lambda span: span.start_s)
    return StepTimeline(
        source=source,
        phase=phase,
        end_s=max((span.end_s for span in every), default=0.0),
        spans=tuple(spans),
        layer=_layer_in_loop(spans) or _layer_between_collectives(subject, source, phase),
        n_left_out=sum(span.n for span in every) - sum(span.n for span in kept),
    )


def _span(row: dict[str, Any]) -> TimeSpan:
    is_collective = row["lane"] == COLLECTIVE
    what = row["kind"] if is_collective else row["part"] or "between parts"
    lane = f"{row['axis'] or 'no axis'}" if is_collective else str(row["lane"])
    names = (what, row["part"] if is_collective else None, row["hlo_name"])
    return TimeSpan(
        lane=lane,
        label=", ".join(str(name) for name in names if name),
        start_s=row["start_s"],
        dur_s=row["dur_s"],
        repeats=tuple(zip(row["repeats"], row["periods_s"], strict=True)),
    )


def _layer_in_loop(spans: list[TimeSpan]) -> tuple[str, float, float] | None:
    """The second turn of the loop that takes the longest, which is the one over layers."""
    looped = [span for span in spans if span.repeats and span.repeats[0][0] > 1]
    if not looped:
        return None
    longest = max(looped, key=lambda span: span.repeats[0][0] * span.repeats[0][1])
    times, period_s = longest.repeats[0]
    same = [span.start_s for span in looped if span.repeats[0] == (times, period_s)]
    start_s = min(same) + period_s
    return f"the second of {times} turns of the loop over layers", start_s, start_s + period_s


def _layer_between_collectives(
    subject: MetricInputs, source: str, phase: str
) -> tuple[str, float, float] | None:
    """From the end of the last collective of a layer to that of the next one, in the middle of the model."""
    rows = subject.events.filter(
        pl.col("source") == source,
        pl.col("phase") == phase,
        pl.col("layer").is_not_null(),
        pl.col("start_s").is_not_null(),
        pl.col("dur_s").is_not_null(),
        pl.col("count") == 1,
    )
    ends = rows.group_by("layer").agg((pl.col("start_s") + pl.col("dur_s")).max()).sort("layer")
    by_layer = dict(ends.iter_rows())
    pairs = [layer for layer in by_layer if layer + 1 in by_layer]
    if not pairs:
        return None
    before = pairs[(len(pairs) - 1) // 2]
    return f"layer {before + 1}", by_layer[before], by_layer[before + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """When each axis has traffic in one step: (axis, begin, end, bytes), in seconds or in operations."""

    phase: str
    unit: str
    end: float
    bursts: tuple[tuple[str, float, float, float], ...]
    n_left_out: int


def axis_bursts(subject: MetricInputs, source: Source) -> tuple[Bursts, ...]:
    """The bursts of each axis, phase by phase, of the first device and, with a pipeline, of the first stage."""
    executions = _executions(subject, source)
    found = bursts(placed(executions)) if len(executions) else executions.clear()
    if found.is_empty():
        return ()
    is_first = [pl.col(c).is_null() | (pl.col(c) == pl.col(c).min()) for c in ("stage", "device")]
    # A profile counts from the start of the trace, a modelled step from its own.
    begin = pl.when(pl.col("device").is_null()).then(0.0)
    first = begin.otherwise(pl.col("begin").min().over("phase"))
    own = found.filter(*is_first).with_columns(pl.col("begin") - first, pl.col("end") - first)
    return tuple(
        Bursts(
            phase="unknown phase" if phase is None else str(phase),
            unit=str(unit),
            end=float(str(part["end"].max())),
            bursts=tuple(
                ("no axis" if axis is None else axis, begin, end, n_bytes)
                for axis, begin, end, n_bytes in part.head(MAX_BURSTS)
                .select("axis", "begin", "end", "wire_bytes")
                .iter_rows()
            ),
            n_left_out=max(0, len(part) - MAX_BURSTS),
        )
        for (phase, unit), part in own.group_by("phase", "unit", maintain_order=True)
    )


def _executions(subject: MetricInputs, source: Source) -> pl.DataFrame:
    """Single executions of collectives: of the timeline where a phase has one, else rows of the table."""
    is_own = (pl.col("source") == source.value) & pl.col("kind").is_not_null()
    rows = subject.events.filter(is_own)
    if subject.timeline is None:
        return rows
    single = last_step(timed(subject.timeline.filter(is_own))).drop("step")
    phases = single["phase"].unique().to_list()
    others = rows.filter(~pl.col("phase").is_in(phases) | pl.col("phase").is_null())
    return pl.concat([others, single])
