"""Timelines: folded spans of a modeled step, and executions of a trace.

A modeled step is stored folded: a row per span, with `repeats` and `periods_s` of the loops around it, outermost
first, and the `layers` of successive repetitions. `EXECUTIONS` has a row of numbers for each op that a device executed,
some 40 bytes each, and `DISTINCT_OPS` a row of facts for each distinct op.
"""

import re
from collections.abc import Iterable
from pathlib import Path

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
