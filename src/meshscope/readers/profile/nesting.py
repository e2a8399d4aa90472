"""Intervals on lines: which hold others, and which holds a given time. Arrays in, arrays out.

Times are integers in any one unit; an interval is [start, end). All of it is vectorised.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def holds_another(start: Ints, end: Ints, *, line: NDArray[Any], outer: Bools) -> Bools:
    """Whether each interval [n] contains another one of its line that lasts.

    Of two equal intervals one contains the other: the one marked `outer` (its name says that it
    is a container), else the first. Intervals that merely overlap contain nothing. An interval
    without length neither holds nor is held: it adds nothing to a sum.
    """
    order = np.lexsort((~outer, -end, start, line))
    rank_of_end = np.unique(end, return_inverse=True)[1].astype(np.int64)
    rank_of_line = np.unique(line, return_inverse=True)[1].astype(np.int64)
    key = (rank_of_line * (len(end) + 1) + rank_of_end)[order]  # lines follow each other
    lasting = np.where((end > start)[order], key, np.iinfo(np.int64).max)
    earliest_end_behind = np.full(len(end), np.iinfo(np.int64).max)
    earliest_end_behind[:-1] = np.minimum.accumulate(lasting[::-1])[::-1][1:]
    holds = np.zeros(len(end), np.bool_)
    holds[order] = earliest_end_behind <= key
    return holds


def innermost(start: Ints, end: Ints, *, at: Ints) -> Ints:
    """For each time of `at` [m], which interval [n] holds it; -1 where none does.

    Where several do, the one that started last; of those that started together, the shortest.
    Needs n log2(n) numbers of memory: meant for steps, modules and annotations.
    """
    order = np.lexsort((-end, start))
    latest_end = _latest_ends(end[order])
    place = np.searchsorted(start[order], at, side="right") - 1
    for level in reversed(range(len(latest_end))):
        within = place >= 0
        ended = np.zeros(len(at), np.bool_)
        ended[within] = latest_end[level][place[within]] <= at[within]
        place = np.where(ended, np.maximum(place - (1 << level), -1), place)
    found = np.full(len(at), -1, np.int64)
    found[place >= 0] = order[place[place >= 0]]
    return found


def _latest_ends(end: Ints) -> list[Ints]:
    """Level k at i: the latest end among the 2^k intervals up to and with i."""
    levels = [end]
    while (width := 1 << (len(levels) - 1)) < len(end):
        below = levels[-1]
        above = below.copy()
        above[width:] = np.maximum(below[width:], below[:-width])
        levels.append(above)
    return levels


def covered_length(start: Ints, end: Ints) -> int:
    """Length of the union of the intervals, in their unit."""
    lasting = end > start
    order = np.argsort(start[lasting], kind="stable")
    starts, ends = start[lasting][order], end[lasting][order]
    if not len(starts):
        return 0
    reached = np.maximum.accumulate(ends)
    gaps = np.maximum(starts[1:] - reached[:-1], 0)
    return int(reached[-1] - starts[0] - gaps.sum())
