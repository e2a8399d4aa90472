"""How much of an interval a set of intervals covers, in integers."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from meshscope.readers.profile.nesting import Ints


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

    def within(self, start: Ints, end: Ints) -> Ints:
        """The covered length of each [start, end)."""
        return self._until(end) - self._until(start)

    def _until(self, at: Ints) -> Ints:
        if not len(self.starts):
            return np.zeros(len(at), np.int64)
        place = np.searchsorted(self.starts, at, side="right") - 1
        inside = np.clip(at - self.starts[place], 0, self.ends[place] - self.starts[place])
        return np.where(place < 0, 0, self.before[place] + inside)
