"""The requests of a load as a server serves them: when each is sent, has its first token, and is done."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from meshscope.serving.load import Load
from meshscope.serving.running import ServedSequence
from meshscope.serving.step_costs import FloatArray


@dataclass(slots=True, kw_only=True)
class ServedRequests:
    """Times of the [n] requests of a load, NaN where they have not come, over all engines of a server.

    `arrival_s` is when a client sends them. `weighted_gaps` are times between tokens, each with the number of
    sequences that share it.
    """

    load: Load
    n_tokens: int = 0
    arrival_s: FloatArray = field(init=False)
    first_token_s: FloatArray = field(init=False)
    finish_s: FloatArray = field(init=False)
    finished: Callable[[int, float], None] | None = None  # called with a request and its end
    _gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    _runs: "array[int]" = field(
        default_factory=lambda: array("q")
    )  # sequences, and gaps that they share

    def __post_init__(self) -> None:
        """No token has come."""
        self.arrival_s = self.load.arrival_s.copy()
        self.first_token_s, self.finish_s = np.full((2, self.load.n_requests), np.nan)

    @property
    def weighted_gaps(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """Times between two tokens of a request, and how many there are of each."""
        n_sequences, n_gaps = np.array(self._runs).reshape(-1, 2).T
        return np.frombuffer(self._gaps_s), np.repeat(n_sequences, n_gaps)

    def add_gaps(self, seconds: Sequence[float], n_sequences: int) -> None:
        """Adds times between tokens that this many sequences share."""
        if n_sequences:
            self._gaps_s.extend(seconds)
            self._runs.extend((n_sequences, len(seconds)))

    def finish(self, number: int, now_s: float) -> None:
        """Counts a request as done."""
        self.finish_s[number] = now_s
        if self.finished is not None:
            self.finished(number, now_s)


Inbox = list[tuple[float, int, ServedSequence]]  # arrival, number and sequence; a heap by time


def arriving(load: Load, delay_s: float = 0.0) -> Inbox:
    """The inbox with all requests of a load, each so long after it was sent."""
    columns = ((load.arrival_s + delay_s).tolist(), load.n_prompt.tolist(), load.n_output.tolist())
    return [
        (arrival_s, number, ServedSequence(number=number, n_target=n_prompt, n_left=n_output))
        for number, (arrival_s, n_prompt, n_output) in enumerate(zip(*columns, strict=True))
    ]


def inboxes(
    requests: ServedRequests,
    n_engines: int,
    max_concurrency: int | None = None,
    *,
    delay_s: float = 0.0,
) -> tuple[Inbox, ...]:
    """The inboxes of engines that requests take in turn; the turns of a conversation go to the same one.

    With a limit, a client has at most so many requests, or conversations, in flight over all engines. The
    others wait at the client, and are sent when one is done: their times count from then on. The engine has a request
    `delay_s` after it is sent.
    """
    every, load = arriving(requests.load, delay_s), requests.load
    first = [one for one in every if load.is_first(one[1])]
    limit = len(first) if max_concurrency is None else max_concurrency
    sent, waiting = first[:limit], deque(first[limit:])
    by_engine = tuple([one for one in sent if one[1] % n_engines == i] for i in range(n_engines))

    def send(number: int, now_s: float) -> None:
        following = load.following(number)
        if following is not None:
            arrival_s, sequence = now_s + load.pause_s(following), every[following][2]
        elif waiting:
            _, following, sequence = waiting.popleft()
            arrival_s = float(load.arrival_s[following])
        else:
            return
        sent_s = requests.arrival_s[following] = max(arrival_s, now_s)
        engine = load.conversation(following) % n_engines
        heappush(by_engine[engine], (float(sent_s) + delay_s, following, sequence))

    if waiting or len(first) < len(every):
        requests.finished = send
    return by_engine
