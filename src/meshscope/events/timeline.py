"""Timelines: folded spans of a modeled step, executions of a trace, and slices in columns, grouped by track.

A modeled step is stored folded: a row per span, with `repeats` and `periods_s` of the loops around it, outermost
first, and the `layers` of successive repetitions. `EXECUTIONS` has a row of numbers for each op that a device executed,
some 40 bytes each, and `DISTINCT_OPS` a row of facts for each distinct op. A `Timeline` is for the trace writers.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.events.measured import StepLabel
from meshscope.events.schema import schema_of

MAX_CHARACTERS = 2_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without control characters, cut after MAX_CHARACTERS with a note of its length."""
    is_short = len(text) <= MAX_CHARACTERS
    cut = text if is_short else f"{text[:MAX_CHARACTERS]}... [{len(text):,} characters]"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", cut)


EXECUTIONS = Path("trace") / "executions.parquet"
DISTINCT_OPS = Path("trace") / "distinct_ops.parquet"
STEP_CLASSES = tuple(label.value for label in StepLabel)

EXECUTIONS_SCHEMA, DISTINCT_OPS_SCHEMA = schema_of("executions"), schema_of("distinct_ops")

TIMELINE = "timeline.parquet"  # in a run folder
FOLDED_SCHEMA = schema_of("folded")

ARGUMENT = "arg."  # prefix of the columns that hold arguments of slices
# An id and the position of the device among those shown: s (first), t or f (last), as in Chrome's
# trace event format.
FLOWS = pl.List(pl.Struct({"id": pl.UInt64, "position": pl.String}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The slices of one lane of a device, or of one line of a profile.

    `slices` has kind, start_ps, dur_ps, optionally `flows` (FLOWS), then the arguments of single
    slices, in columns that start with ARGUMENT. `kinds` has kind, name, then the arguments that
    all slices of a kind share; consecutive tracks may share the same `kinds` object.
    """

    pid: int
    process: str
    tid: int
    thread: str
    kinds: pl.DataFrame
    slices: pl.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A value over time: `samples` are (time in ns, value from then on)."""

    name: str
    unit: str
    samples: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a trace file shows; `tracks` may be a generator, so a timeline is written once."""

    tracks: Iterable[Track]
    counters: tuple[Counter, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


def lanes_of(slices: pl.DataFrame) -> list[pl.DataFrame]:
    """The slices on as few lanes as they need, none of which overlaps another one of its lane."""
    bounds = slices.select("start_ps", end_ps=pl.col("start_ps") + pl.col("dur_ps"))
    ordered = bounds.with_row_index("row").sort("start_ps", "end_ps", maintain_order=True)
    reached = pl.col("end_ps").cum_max().shift(1).fill_null(0)
    if not ordered.select((pl.col("start_ps") < reached).any()).item():
        return [slices]
    ends: list[int] = []  # of the last slice of each lane
    rows: list[list[int]] = []
    for row, start, end in ordered.iter_rows():
        lane = next((i for i, last in enumerate(ends) if last <= start), len(rows))
        if lane == len(rows):
            ends.append(end)
            rows.append([])
        ends[lane] = end
        rows[lane].append(row)
    return [slices[sorted(of_lane)] for of_lane in rows]


def repetition_starts(start_s: float, repeats: Iterable[tuple[int, float]]) -> NDArray[np.float64]:
    """Start of every repetition in s; `repeats` are (times, period in s), outermost loop first."""
    starts = np.array([start_s], np.float64)
    for times, period_s in reversed(list(repeats)):
        starts = np.add.outer(np.arange(times) * period_s, starts).ravel()
    return starts


def unfolded(folded: pl.DataFrame) -> pl.DataFrame:
    """The spans with every repetition as its own row, sorted by start within source and phase."""
    starts = [
        repetition_starts(start_s, zip(repeats, periods_s, strict=True))
        for start_s, repeats, periods_s in folded.select(
            "start_s", "repeats", "periods_s"
        ).iter_rows()
    ]
    spans = np.repeat(np.arange(len(starts)), [len(of_span) for of_span in starts])
    repetition = pl.Series(np.concatenate([np.empty(0, int), *(range(len(s)) for s in starts)]))
    rows = folded.drop("repeats", "periods_s")[spans]
    n_layers = pl.col("layers").list.len().cast(pl.Int64)
    turn = pl.when(n_layers > 0).then(pl.lit(repetition) % n_layers)
    start_s = np.concatenate([np.empty(0), *starts])
    return (
        rows.with_columns(
            pl.Series("start_s", start_s).fill_nan(None),
            pl.col("layers").list.get(turn, null_on_oob=True).alias("layer"),
        )
        .drop("layers")
        .sort("source", "phase", "start_s", maintain_order=True)
    )
