"""Vectorized interval queries: containment, innermost interval at a time, covered time.

Times are integers in any one unit; an interval is [start, end).
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def contains_another(start: Ints, end: Ints, *, line: NDArray[Any], outer: Bools) -> Bools:
    """Whether each interval [n] contains another interval of its line.

    If two intervals are equal, the one marked `outer` (a container by name) contains the other,
    else the first one does. Intervals that only overlap do not contain each other. Empty
    intervals neither contain nor are contained, because they add nothing to a sum.
    """
    order = np.lexsort((~outer, -end, start, line))
    rank_of_end = np.unique(end, return_inverse=True)[1].astype(np.int64)
    rank_of_line = np.unique(line, return_inverse=True)[1].astype(np.int64)
    key = (rank_of_line * (len(end) + 1) + rank_of_end)[order]  # lines in sequence
    never = np.iinfo(np.int64).max
    lasting = np.where((end > start)[order], key, never)
    earliest_end_after = np.full(len(end), never)
    earliest_end_after[:-1] = np.minimum.accumulate(lasting[::-1])[::-1][1:]
    contains = np.zeros(len(end), np.bool_)
    contains[order] = earliest_end_after <= key
    return contains


def innermost(start: Ints, end: Ints, *, at: Ints) -> Ints:
    """For each time in `at` [m], the index of the innermost interval [n] around it, or -1.

    The innermost interval starts last; of several with that start it is the shortest. Takes
    n log2(n) numbers of memory, so it is for steps, modules and annotations, not for ops.
    """
    order = np.lexsort((-end, start))
    latest_end = [end[order]]  # level k at i: the latest end of the 2^k intervals that end at i
    while (width := 1 << (len(latest_end) - 1)) < len(end):
        above = latest_end[-1].copy()
        above[width:] = np.maximum(above[width:], latest_end[-1][:-width])
        latest_end.append(above)
    place = np.searchsorted(start[order], at, side="right") - 1
    for level in reversed(range(len(latest_end))):
        within = place >= 0
        ended = np.zeros(len(at), np.bool_)
        ended[within] = latest_end[level][place[within]] <= at[within]
        place = np.where(ended, np.maximum(place - (1 << level), -1), place)
    index = np.full(len(at), -1, np.int64)
    index[place >= 0] = order[place[place >= 0]]
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTime:
    """The union of intervals: disjoint `starts` and `ends` [n], and the length before each start."""

    starts: Ints
    ends: Ints
    before: Ints

    @classmethod
    def of(cls, start: Ints, end: Ints) -> Self:
        """The union of [start, end)."""
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        lasting = end > start
        start, end = start[lasting], end[lasting]
        if not len(start):
            return cls(starts=start, ends=end, before=start)
        reached = np.maximum.accumulate(end)
        first = np.flatnonzero(np.append(True, start[1:] > reached[:-1]))
        starts, ends = start[first], reached[np.append(first[1:], len(start)) - 1]
        before = np.concatenate([[0], np.cumsum(ends - starts)[:-1]])
        return cls(starts=starts, ends=ends, before=before)

    def total(self) -> int:
        """The covered length."""
        return int((self.ends - self.starts).sum())

    def within(self, start: Ints, end: Ints) -> Ints:
        """The covered length of each [start, end)."""
        return self._until(end) - self._until(start)

    def _until(self, at: Ints) -> Ints:
        if not len(self.starts):
            return np.zeros(len(at), np.int64)
        place = np.searchsorted(self.starts, at, side="right") - 1
        inside = np.clip(at - self.starts[place], 0, self.ends[place] - self.starts[place])
        return np.where(place < 0, 0, self.before[place] + inside)
