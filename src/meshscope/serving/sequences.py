"""Requests on their way through a server, and when their tokens came."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from meshscope.serving.load import Load

FloatArray = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class ServedSequence:
    """A request in an engine; `n_present` positions are in its cache, `n_blocks` are its blocks.

    `prefill_engine` is the engine that computed the prompt, while its keys and values are still there.
    """

    number: int
    n_target: int  # positions to compute before the next token
    n_left: int  # output tokens to come
    n_present: int = 0
    n_blocks: int = 0
    last_token_s: float | None = None
    prefill_engine: int | None = None


@dataclass(slots=True, kw_only=True)
class ServedRequests:
    """Times of the [n] requests of a load, NaN where they have not come, over all engines of a server.

    `arrival_s` is when a client sends them. `gaps` are times between tokens, each with the number of sequences
    that share them.
    """

    load: Load
    n_tokens: int = 0
    arrival_s: FloatArray = field(init=False)
    first_token_s: FloatArray = field(init=False)
    finish_s: FloatArray = field(init=False)
    gaps: list[tuple[FloatArray, int]] = field(default_factory=list)
    finished: Callable[[float], None] | None = None  # called with the time when a request is done

    def __post_init__(self) -> None:
        """No token has come."""
        self.arrival_s = self.load.arrival_s.copy()
        self.first_token_s, self.finish_s = np.full((2, self.load.n_requests), np.nan)

    @property
    def n_output(self) -> NDArray[np.int64]:
        """[n] output tokens."""
        return self.load.n_output

    @property
    def weighted_gaps(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """Times between two tokens of a request, and how many there are of each."""
        seconds = np.concatenate([np.empty(0), *(seconds for seconds, _ in self.gaps)])
        counts = [np.empty(0, int), *(np.full(len(seconds), n) for seconds, n in self.gaps)]
        return seconds, np.concatenate(counts)

    def add_gaps(self, seconds: FloatArray, n_sequences: int) -> None:
        """Adds times between tokens that this many sequences share."""
        if n_sequences and len(seconds):
            self.gaps.append((seconds, n_sequences))

    def add_token(self, sequence: ServedSequence, now_s: float) -> None:
        """Adds a token after a prefill: the first one, or the next of a preempted sequence."""
        if sequence.last_token_s is None:
            self.first_token_s[sequence.number] = now_s
        else:
            self.add_gaps(np.array([now_s - sequence.last_token_s]), 1)
        self.count(sequence, now_s)

    def count(self, sequence: ServedSequence, now_s: float, n: int = 1) -> None:
        """Counts the tokens of a sequence up to now, whose gaps are added separately."""
        sequence.last_token_s = now_s
        sequence.n_left -= n
        self.n_tokens += n
        if not sequence.n_left:
            self.finish_s[sequence.number] = now_s
            if self.finished is not None:
                self.finished(now_s)


Inbox = list[tuple[float, int, ServedSequence]]  # arrival, number and sequence; a heap by time


def arriving(load: Load) -> Inbox:
    """The inbox with all requests of a load."""
    columns = (load.arrival_s.tolist(), load.n_prompt.tolist(), load.n_output.tolist())
    return [
        (arrival_s, number, ServedSequence(number=number, n_target=n_prompt, n_left=n_output))
        for number, (arrival_s, n_prompt, n_output) in enumerate(zip(*columns, strict=True))
    ]


def inboxes(
    requests: ServedRequests, n_engines: int, max_concurrency: int | None = None
) -> tuple[Inbox, ...]:
    """The inboxes of engines that requests take in turn.

    With a limit, a client has at most so many requests in flight over all engines. The others wait at the
    client, and are sent when one is done: their times count from then on.
    """
    every = arriving(requests.load)
    limit = len(every) if max_concurrency is None else max_concurrency
    sent, waiting = every[:limit], deque(every[limit:])
    by_engine = tuple([one for one in sent if one[1] % n_engines == i] for i in range(n_engines))

    def send(now_s: float) -> None:
        if waiting:
            arrival_s, number, sequence = waiting.popleft()
            sent_s = requests.arrival_s[number] = max(arrival_s, now_s)
            heappush(by_engine[number % n_engines], (float(sent_s), number, sequence))

    if waiting:
        requests.finished = send
    return by_engine
