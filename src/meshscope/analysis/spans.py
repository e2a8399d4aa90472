"""Sets of time as sorted, disjoint spans in whole picoseconds: union, common part, difference, length.

Integers, so that parts sum to the whole exactly. An array of spans is [n, 2]: start and end.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

PS_PER_S = 1e12
Spans = NDArray[np.int64]


def spans_of(frame: pl.DataFrame) -> Spans:
    """The union of the rows' spans from `start_s` to `start_s + dur_s`."""
    start = frame["start_s"].to_numpy()
    bounds = np.stack([start, start + frame["dur_s"].to_numpy()], axis=1)
    return union(np.rint(bounds * PS_PER_S).astype(np.int64))


def union(spans: Spans, *, max_gap: int = 0) -> Spans:
    """The spans merged where they overlap, adjoin, or lie at most `max_gap` apart; empty ones go."""
    lasting = spans[spans[:, 1] > spans[:, 0]]
    if not len(lasting):
        return np.empty((0, 2), np.int64)
    ordered = lasting[np.argsort(lasting[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.flatnonzero(np.append(True, ordered[1:, 0] - reached[:-1] > max_gap))
    ends = np.append(begins[1:], len(ordered)) - 1
    return np.stack([ordered[begins, 0], reached[ends]], axis=1)


def common(left: Spans, right: Spans) -> Spans:
    """What lies in both of two sets of disjoint, sorted spans."""
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
    """Their length together, in picoseconds."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def seconds(length_ps: float) -> float:
    """Picoseconds as seconds."""
    return float(length_ps) / PS_PER_S
