"""Ops of SparseCores beside those of the device's main core.

A SparseCore has a plane of its own, `/device:TPU:0 SparseCore 0`, with the lines `Sparse Core Modules`
and `Sparse Core Ops` (openxla/xprof, xprof/utils and convert/xplane_to_op_stats). The main core may
record the op that hands a collective over, or not; an execution counts once.
"""

import numpy as np
import polars as pl

from meshscope.readers.traces.covered_time import CoveredTime

_NS = 1e9
LINES_PER_CORE = 1_000  # streams of SparseCores are numbered behind those of the main core


def streams() -> pl.Expr:
    """The stream of each event: its line, with those of each SparseCore apart."""
    return (
        pl.col("line").cast(pl.Int64)
        + pl.col("core").cast(pl.Int64).fill_null(-1).add(1) * LINES_PER_CORE
    )


def counted_once(events: pl.DataFrame) -> pl.DataFrame:
    """The events without collectives that both cores recorded.

    If the main core's event says the bytes, it counts, with its time from start to end; else the
    SparseCore's. `events` has device, core, kind, payload_bytes, start_s and dur_s.
    """
    is_sparse = pl.col("core").is_not_null()
    is_collective = pl.col("kind").is_not_null()
    if events.filter(is_sparse & is_collective).is_empty():
        return events
    rows = events.with_row_index("row")
    dropped: list[int] = []
    for same in rows.filter(is_collective).partition_by("device", "kind"):
        sized = same.filter(~is_sparse, pl.col("payload_bytes").is_not_null())
        unsized = same.filter(~is_sparse, pl.col("payload_bytes").is_null())
        sparse = same.filter(is_sparse)
        repeated = sparse.filter(_during(sparse, sized))
        dropped += repeated["row"].to_list()
        counted = sparse.filter(~pl.col("row").is_in(repeated["row"].implode()))
        dropped += unsized.filter(_during(unsized, counted))["row"].to_list()
    return rows.filter(~pl.col("row").is_in(dropped)).drop("row")


def _during(events: pl.DataFrame, others: pl.DataFrame) -> pl.Series:
    """Whether each event is at the same time as one of the others."""
    covered = CoveredTime.of(*_bounds(others))
    return pl.Series(covered.within(*_bounds(events)) > 0)


def _bounds(events: pl.DataFrame) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ...]:
    start = events["start_s"]
    bounds = (start, start + events["dur_s"])
    return tuple((bound * _NS).round().cast(pl.Int64).to_numpy() for bound in bounds)
