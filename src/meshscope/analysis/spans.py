"""Sets of time intervals as sorted, disjoint spans in integer picoseconds: union, intersection, length.

Integers make parts sum exactly to the whole. A span array has shape [n, 2]: start and end.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

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
