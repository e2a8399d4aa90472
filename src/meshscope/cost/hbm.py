"""The HBM of one device: a server whose rate all transfers in progress share equally.

A transfer is measured in seconds at the full rate, so the server knows neither bytes nor rates. It never
rests while a transfer is in progress: n equal transfers that start together end together, after n times
the seconds of one.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True, kw_only=True)
class Transfer:
    """Bytes on their way to or from HBM; `end_s` is None as long as later transfers may delay it."""

    end_s: float | None = None


@dataclass(slots=True)
class HbmServer:
    """Transfers in progress, ordered by their end.

    `served_s` is the service that each of them got since time 0, had it been there from the start: a
    transfer that starts at `served_s` ends when this has grown by its own seconds (processor sharing).
    """

    now_s: float = 0.0
    served_s: float = 0.0
    busy_s: float = 0.0
    _ends: list[tuple[float, int, Transfer]] = field(
        default_factory=list[tuple[float, int, Transfer]]
    )
    _n_started: int = 0

    def start(self, seconds: float, *, at_s: float) -> Transfer:
        """Starts a transfer of `seconds` at the full rate; calls come in the order of `at_s`."""
        self.advance(at_s)
        if seconds <= 0:
            return Transfer(end_s=at_s)
        transfer = Transfer()
        self._n_started += 1
        heappush(self._ends, (self.served_s + seconds, self._n_started, transfer))
        return transfer

    def finish(self, transfer: Transfer) -> float:
        """The end of a transfer if no other starts before."""
        while transfer.end_s is None:
            self._end_next()
        return transfer.end_s

    def advance(self, to_s: float) -> None:
        """Serves the transfers in progress until `to_s`; a time in the past changes nothing."""
        while self._ends and self._next_end_s() <= to_s:
            self._end_next()
        if to_s > self.now_s:
            self._serve(to_s - self.now_s)

    def shift(self, seconds: float) -> None:
        """Moves the clock; the transfers in progress keep what is left of them."""
        self.now_s += seconds

    def _next_end_s(self) -> float:
        return self.now_s + (self._ends[0][0] - self.served_s) * len(self._ends)

    def _end_next(self) -> None:
        end_s = self._next_end_s()
        self._serve(max(0.0, end_s - self.now_s))
        heappop(self._ends)[2].end_s = end_s

    def _serve(self, seconds: float) -> None:
        self.now_s += seconds
        if self._ends:
            self.served_s += seconds / len(self._ends)
            self.busy_s += seconds
