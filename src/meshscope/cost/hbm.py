"""The HBM of one device: lanes of transfers that share its rate.

The transfers of one lane run one after the other, in the order in which they start; the lanes with a
transfer in progress divide the rate by their shares, and the HBM never rests while there is one. A
transfer is measured in seconds at the full rate, so the server knows neither bytes nor rates.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True, kw_only=True)
class Transfer:
    """Bytes on their way; `end_s` is None as long as other transfers may delay the end."""

    left_s: float
    end_s: float | None = None


@dataclass(slots=True, kw_only=True)
class HbmServer:
    """Transfers in progress, by lane; the share of a lane is 1 by default."""

    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    now_s: float = 0.0
    busy_s: float = 0.0
    lanes: defaultdict[str, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))

    def start(self, lane: str, seconds: float, *, at_s: float) -> Transfer:
        """Starts a transfer of `seconds` at the full rate; calls come in the order of `at_s`."""
        self.advance(at_s)
        transfer = Transfer(left_s=seconds)
        self.lanes[lane].append(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> float:
        """The end of a transfer if no other starts before."""
        while transfer.end_s is None:
            self._serve(inf)
        return transfer.end_s

    def shift(self, seconds: float) -> None:
        """Moves the clock; the transfers in progress keep what is left of them."""
        self.now_s += seconds

    def advance(self, to_s: float) -> None:
        """Serves the transfers in progress until `to_s`."""
        while self.now_s < to_s:
            self._serve(to_s - self.now_s)

    def _serve(self, at_most_s: float) -> None:
        """Serves the first transfer of each lane until one ends, or for `at_most_s`."""
        active = {name: lane for name, lane in self.lanes.items() if lane}
        total = sum(self.shares.get(name, 1.0) for name in active)
        needed_s = {
            name: lane[0].left_s * total / self.shares.get(name, 1.0)
            for name, lane in active.items()
        }
        served_s = min([at_most_s, *needed_s.values()])
        self.now_s += served_s
        self.busy_s += served_s if active else 0.0
        for name, lane in active.items():
            if needed_s[name] <= served_s:
                lane.popleft().end_s = self.now_s
            else:
                lane[0].left_s -= served_s * self.shares.get(name, 1.0) / total
