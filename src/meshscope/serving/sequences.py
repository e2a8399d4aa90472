"""Requests on their way through a server, and when their tokens came."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappush

import numpy as np
from numpy.typing import NDArray

from meshscope.serving.load import Load


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedRequests:
    """Times of [n] requests, NaN where they have not come.

    `gaps_s` are times between tokens of one request, `n_gaps` how many each.
    """

    arrival_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    n_output: NDArray[np.int64]
    gaps_s: NDArray[np.float64]
    n_gaps: NDArray[np.int64]
    n_tokens: int


@dataclass(slots=True, kw_only=True)
class TokenLog:
    """Collects the times of tokens, over all engines of a server."""

    load: Load
    n_tokens: int = 0
    sent_s: NDArray[np.float64] = field(init=False)
    first_token_s: NDArray[np.float64] = field(init=False)
    finish_s: NDArray[np.float64] = field(init=False)
    gaps: list[tuple[NDArray[np.float64], int]] = field(default_factory=list)
    finished: Callable[[float], None] | None = None  # called with the time when a request is done

    def __post_init__(self) -> None:
        """No token has come."""
        self.sent_s = self.load.arrival_s.copy()
        self.first_token_s = np.full(self.load.n_requests, np.nan)
        self.finish_s = np.full(self.load.n_requests, np.nan)

    def add_gaps(self, seconds: NDArray[np.float64], n_sequences: int) -> None:
        """Adds times between tokens that this many sequences share."""
        if n_sequences and len(seconds):
            self.gaps.append((seconds, n_sequences))

    def add_token(self, sequence: ServedSequence, now_s: float) -> None:
        """Adds a token behind a prefill: the first one, or the next of a preempted sequence."""
        if sequence.last_token_s is None:
            self.first_token_s[sequence.number] = now_s
        else:
            self.add_gaps(np.array([now_s - sequence.last_token_s]), 1)
        self.count(sequence, now_s)

    def count(self, sequence: ServedSequence, now_s: float, n: int = 1) -> None:
        """Counts the tokens of a sequence up to now, whose gaps are added apart."""
        sequence.last_token_s = now_s
        sequence.n_left -= n
        self.n_tokens += n
        if not sequence.n_left:
            self.finish_s[sequence.number] = now_s
            if self.finished is not None:
                self.finished(now_s)

    def requests(self) -> ServedRequests:
        """What has been collected."""
        seconds = [np.empty(0), *(seconds for seconds, _ in self.gaps)]
        counts = [np.empty(0, int), *(np.full(len(seconds), n) for seconds, n in self.gaps)]
        return ServedRequests(
            arrival_s=self.sent_s,
            first_token_s=self.first_token_s,
            finish_s=self.finish_s,
            n_output=self.load.n_output,
            gaps_s=np.concatenate(seconds),
            n_gaps=np.concatenate(counts),
            n_tokens=self.n_tokens,
        )


def arriving(load: Load, numbers: Iterable[int]) -> Iterator[tuple[float, int, ServedSequence]]:
    """Arrival, number and sequence of these requests."""
    for number in numbers:
        sequence = ServedSequence(
            number=number,
            n_target=int(load.n_prompt[number]),
            n_left=int(load.n_output[number]),
        )
        yield float(load.arrival_s[number]), number, sequence


Inbox = list[tuple[float, int, ServedSequence]]  # a heap by time


def inboxes(log: TokenLog, n_engines: int, max_concurrency: int | None = None) -> tuple[Inbox, ...]:
    """The inboxes of engines that requests take in turn.

    With a limit, a client has at most so many requests in flight over all engines. The others wait at the
    client, and are sent when one is done: their times count from then on.
    """
    load = log.load
    every = list(arriving(load, range(load.n_requests)))
    limit = len(every) if max_concurrency is None else max_concurrency
    sent, waiting = every[:limit], deque(every[limit:])
    by_engine = tuple([one for one in sent if one[1] % n_engines == i] for i in range(n_engines))

    def send(now_s: float) -> None:
        if waiting:
            arrival_s, number, sequence = waiting.popleft()
            log.sent_s[number] = max(arrival_s, now_s)
            heappush(by_engine[number % n_engines], (float(log.sent_s[number]), number, sequence))

    if waiting:
        log.finished = send
    return by_engine
