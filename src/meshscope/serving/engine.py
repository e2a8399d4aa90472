"""Continuous batching on one data-parallel rank, step by step.

A step decodes one token of every running sequence, and prefills as many prompt tokens as the budget of
the step leaves, in the order of arrival. A prompt is admitted when all of it fits in the cache. When a
decoding sequence needs a block and none is free, the latest one gives up its blocks, waits at the head of
the queue, and is computed again. Steps that only decode are taken together up to the next event.

In a disaggregated server, an engine either hands its sequences off after the first token and keeps
their blocks until they are fetched, or fetches sequences from such an engine.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import SpecError
from meshscope.serving.load import Load
from meshscope.serving.step_costs import CacheBlocks, FloatArray, StepCosts, past_of

MAX_STEPS_AT_ONCE = 4096  # decode steps between two events
MAX_STEPS = 20_000_000


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
    def weighted_gaps(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """Times between two tokens of a request, and how many there are of each."""
        seconds = np.concatenate([np.empty(0), *(seconds for seconds, _ in self.gaps)])
        counts = [np.empty(0, int), *(np.full(len(seconds), n) for seconds, n in self.gaps)]
        return seconds, np.concatenate(counts)

    def add_gaps(self, seconds: FloatArray, n_sequences: int) -> None:
        """Adds times between tokens that this many sequences share."""
        if n_sequences and len(seconds):
            self.gaps.append((seconds, n_sequences))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """Limits of a step, the share of prompts that is in the prefix cache, and time of the host.

    A sequence is admitted when its prompt and `reserved_frac` of its output fit with what the others
    still need. With `has_mixed_steps` false, decoding waits while there are prompts to compute.

    The host takes `host_s` for a step, and more for each sequence that decodes and each prompt token; with
    `hides_host`, steps that prefill hide it behind the device. A step takes the time of its
    bucket, powers of two from `token_bucket` and `sequence_bucket`; None pads nothing. `steps_together` says
    that data-parallel ranks wait for the longest of them in every step, and `shares_experts` that these ranks
    compute each other's tokens in layers of experts, so that the prompt tokens of one are the work of all.
    """

    max_sequences: int = 256
    max_step_tokens: int = 2048
    prefix_hit_frac: float = 0.0
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    host_token_s: float = 0.0
    hides_host: bool = False
    reserved_frac: float = 0.0
    has_mixed_steps: bool = True
    token_bucket: int | None = None
    sequence_bucket: int | None = None
    steps_together: bool = False
    shares_experts: bool = False

    def step_s(self, device_s: FloatArray, n_decoded: int, n_prompt: int) -> FloatArray:
        """Seconds of steps with the time of the host, added to the device's or hidden behind a prefill."""
        host_s = self.host_s + self.host_sequence_s * n_decoded + self.host_token_s * n_prompt
        is_hidden = self.hides_host and n_prompt
        return np.maximum(device_s, host_s) if is_hidden else device_s + host_s


def bucket(n: int, least: int | None) -> int:
    """The smallest compiled size that holds n: a power of two times the least; n itself without buckets."""
    if least is None or not n:
        return n
    return max(least, 1 << (n - 1).bit_length())


def check_longest(n_tokens: int, blocks: CacheBlocks) -> None:
    """SpecError if a sequence of this length exceeds the cache on its own."""
    if blocks.of(n_tokens) > blocks.n_blocks:
        raise SpecError(
            f"a request of {n_tokens:,} tokens needs {blocks.of(n_tokens):,} blocks of {blocks.block_tokens} "
            f"tokens, and the cache has {blocks.n_blocks:,}. Use more devices, a smaller --cache-dtype "
            "or shorter requests."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """Equal engines: their number, and the costs, cache and policy of each."""

    n_engines: int
    costs: StepCosts
    blocks: CacheBlocks
    policy: EnginePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The chunks of prompts that a step computes, and the numbers of their tokens and of decoded ones."""

    chunks: list[tuple[ServedSequence, int]]
    n_prompt: int
    n_decoded: int
    is_decoding: bool


@dataclass(slots=True, kw_only=True)
class BatchingEngine:
    """The state of an engine of a pool; `act` advances it to the end of its next step, or steps.

    `hand_off` takes sequences whose first token is there, and `fetch` returns when the cache of one that
    another engine prefilled is here. `releases` is a heap of times at which blocks become free.
    """

    pool: EnginePool
    requests: ServedRequests
    inbox: Inbox
    hand_off: Callable[[ServedSequence, float], None] | None = None
    fetch: Callable[[ServedSequence, float], float] | None = None
    now_s: float = 0.0
    busy_s: float = 0.0
    device_s: float = 0.0  # of the busy time
    n_steps: int = 0
    n_preemptions: int = 0
    n_free: int = field(init=False)
    waiting: deque[ServedSequence] = field(default_factory=deque[ServedSequence])
    filling: list[ServedSequence] = field(default_factory=list[ServedSequence])
    running: list[ServedSequence] = field(default_factory=list[ServedSequence])
    fetched: list[tuple[float, ServedSequence]] = field(default_factory=list)
    fresh: list[ServedSequence] = field(default_factory=list[ServedSequence])
    releases: list[tuple[float, int]] = field(default_factory=list)
    _samples: list[tuple[float, int, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """All blocks are free."""
        self.n_free = self.pool.blocks.n_blocks

    @property
    def samples(self) -> FloatArray:
        """[m, 6] the time, sequences admitted and waiting, used blocks, and tokens of a step from then on.

        Tokens are prompt and decoded tokens; the last sample before an idle stretch has none.
        """
        return np.array(self._samples, dtype=float).reshape(-1, 6)

    @property
    def next_s(self) -> float:
        """When the engine can act; inf if nothing is left, or while it waits for another engine."""
        if self.running or self.filling or self._can_admit(self._n_reserved()):
            return self.now_s
        return max(self.now_s, self._next_event_s())

    def act(self, now_s: float, horizon_s: Callable[[], float]) -> None:
        """One step at its `next_s`, or several that decode and begin before the horizon, when a sequence may arrive."""
        step = self.begin(now_s)
        if step.n_prompt + step.n_decoded:
            device_s = self.device_step_s(step, horizon_s())
            self.end(
                step, device_s, self.pool.policy.step_s(device_s, step.n_decoded, step.n_prompt)
            )

    def begin(self, now_s: float) -> "Step":
        """What the step at this time computes, with the blocks that it needs."""
        self.now_s = now_s
        self._receive()
        # Every running sequence has room for its next position; the latest is preempted if there is none.
        while self._n_new_blocks(1) > self.n_free:
            latest = self.running.pop()
            self._release(latest)
            latest.n_target, latest.n_present = latest.n_present, 0
            self.waiting.appendleft(latest)
            self.n_preemptions += 1
        self.fresh = [sequence for sequence in self.fresh if sequence.n_present]
        chunks = self._chunks()
        is_decoding = not chunks or self.pool.policy.has_mixed_steps
        step = Step(
            chunks=chunks,
            n_prompt=sum(n for _, n in chunks),
            n_decoded=is_decoding * len(self.running),
            is_decoding=is_decoding,
        )
        self._sample(step.n_prompt, step.n_decoded)
        return step

    def device_step_s(self, step: "Step", horizon_s: float) -> FloatArray:
        """Seconds of the device in a step that prefills, or in those that decode up to the next event."""
        policy = self.pool.policy
        if not step.chunks:
            return self._decode_s(horizon_s)
        past = past_of([(n, sequence.n_present) for sequence, n in step.chunks])
        context = self.mean_context if step.is_decoding else 0.0
        n_tokens = bucket(step.n_prompt + step.n_decoded, policy.token_bucket) - step.n_decoded
        return np.array([self.pool.costs.mixed_s(step.n_decoded, context, n_tokens, past)])

    def end(self, step: "Step", device_s: FloatArray, step_s: FloatArray) -> None:
        """Counts a step, or several that decode, with these times."""
        total_s = float(step_s.sum())
        self.now_s += total_s
        self.busy_s += total_s
        self.device_s += float(device_s.sum())
        self.n_steps += len(step_s)
        if step.is_decoding:
            self._decoded(step_s)
        else:
            self.fresh = self.running.copy()
        self._prefilled(step.chunks)
        if not (self.running or self.filling):
            self._sample(0, 0)
        if self.n_steps > MAX_STEPS:
            raise SpecError(f"more than {MAX_STEPS:,} steps. Use fewer --requests.")

    @property
    def n_admitted(self) -> int:
        """Sequences with blocks that this engine computes or fetches."""
        return len(self.running) + len(self.filling) + len(self.fetched)

    def _sample(self, n_prompt: int, n_decoded: int) -> None:
        used, n_waiting = self.pool.blocks.n_blocks - self.n_free, len(self.waiting)
        self._samples.append((self.now_s, self.n_admitted, n_waiting, used, n_prompt, n_decoded))

    def _next_event_s(self) -> float:
        """When the next cache, blocks, or sequence that need not wait for others arrive; inf if none do."""
        heaps = (self.releases, [] if self.waiting else self.inbox)
        heads = (heap[0][0] for heap in heaps if heap)
        return min((*heads, *(ready_s for ready_s, _ in self.fetched)), default=inf)

    def _receive(self) -> None:
        """Queues what has arrived, runs what has been fetched, frees what others have fetched."""
        while self.inbox and self.inbox[0][0] <= self.now_s:
            self.waiting.append(heappop(self.inbox)[2])
        while self.releases and self.releases[0][0] <= self.now_s:
            self.n_free += heappop(self.releases)[1]
        for ready_s, sequence in self.fetched:
            if ready_s <= self.now_s:
                sequence.n_present = sequence.n_target
                sequence.prefill_engine = None
                self.running.append(sequence)
                self.fresh.append(sequence)
        self.fetched = [one for one in self.fetched if one[0] > self.now_s]

    def _n_new_blocks(self, n_steps: int) -> int:
        blocks = self.pool.blocks
        return sum(max(blocks.of(s.n_present + n_steps) - s.n_blocks, 0) for s in self.running)

    def _release(self, sequence: ServedSequence) -> None:
        self.n_free += sequence.n_blocks
        sequence.n_blocks = 0

    def _can_admit(self, n_reserved: int) -> bool:
        if not self.waiting or self.n_admitted >= self.pool.policy.max_sequences:
            return False
        return self._n_whole(self.waiting[0], 0) + n_reserved <= self.n_free

    def _n_whole(self, sequence: ServedSequence, n_present: int) -> int:
        """Blocks that the sequence will need, as far as admission reserves them."""
        n_least = max(sequence.n_target, n_present) + 1
        n_later = int(self.pool.policy.reserved_frac * max(sequence.n_left - 1, 0))
        return self.pool.blocks.of(n_least + n_later)

    def _n_reserved(self) -> int:
        """Blocks that admitted sequences do not have and will need."""
        if not self.pool.policy.reserved_frac:
            return self._n_new_blocks(1)
        fetched = (sequence for _, sequence in self.fetched)
        admitted = (*self.running, *self.filling, *fetched)
        return sum(max(self._n_whole(s, s.n_present) - s.n_blocks, 0) for s in admitted)

    def _chunks(self) -> list[tuple[ServedSequence, int]]:
        budget = self.pool.policy.max_step_tokens
        if self.pool.policy.has_mixed_steps:
            budget -= len(self.running)
        chunks: list[tuple[ServedSequence, int]] = []
        for sequence in self.filling:
            n_tokens = min(budget, sequence.n_target - sequence.n_present)
            if n_tokens > 0:
                chunks.append((sequence, n_tokens))
                budget -= n_tokens
        n_reserved = self._n_reserved() if self.waiting else 0
        while budget > 0 and self._can_admit(n_reserved):
            head = self.waiting[0]
            n_reserved += self._n_whole(head, 0) - self.pool.blocks.of(head.n_target + 1)
            sequence = self._admitted()
            if sequence is not None:
                n_tokens = min(budget, sequence.n_target - sequence.n_present)
                chunks.append((sequence, n_tokens))
                budget -= n_tokens
        return chunks

    def _admitted(self) -> ServedSequence | None:
        """The first waiting sequence with its blocks; None if its cache is fetched, not computed."""
        sequence = self.waiting.popleft()
        sequence.n_blocks = self.pool.blocks.of(sequence.n_target + 1)
        self.n_free -= sequence.n_blocks
        if self.fetch is not None and sequence.prefill_engine is not None:
            self.fetched.append((self.fetch(sequence, self.now_s), sequence))
            return None
        # The last position is computed in any case.
        n_prompt = int(self.requests.load.n_prompt[sequence.number])
        n_cached = int(self.pool.policy.prefix_hit_frac * n_prompt)
        sequence.n_present = min(n_cached, sequence.n_target - 1)
        self.filling.append(sequence)
        return sequence

    def _prefilled(self, chunks: list[tuple[ServedSequence, int]]) -> None:
        for sequence, n in chunks:
            sequence.n_present += n
        done = [s for s in self.filling if s.n_present == s.n_target]
        self.filling = [s for s in self.filling if s.n_present < s.n_target]
        for sequence in done:  # it decodes, moves on, or has its only token
            if sequence.last_token_s is None:
                self.requests.first_token_s[sequence.number] = self.now_s
            else:  # it was preempted
                self.requests.add_gaps(np.array([self.now_s - sequence.last_token_s]), 1)
            self.requests.count(sequence, self.now_s)
            if not sequence.n_left:
                self._release(sequence)
            elif self.hand_off is not None:
                self.hand_off(sequence, self.now_s)
            else:
                self.running.append(sequence)

    def _decode_s(self, horizon_s: float) -> FloatArray:
        """Seconds of decode steps up to the next completion, arrival that can be admitted, or lack of blocks."""
        n_steps = min(MAX_STEPS_AT_ONCE, *(s.n_left for s in self.running))
        while n_steps > 1 and self._n_new_blocks(n_steps) > self.n_free:
            n_steps //= 2
        n, policy = len(self.running), self.pool.policy
        contexts = self.mean_context + np.arange(n_steps, dtype=np.float64)
        n_padded = bucket(n, policy.sequence_bucket)
        # Sequences that pad a bucket have no cache to read.
        seconds = self.pool.costs.decode_s(n_padded, contexts * (n / n_padded))
        next_s = min(self._next_event_s(), inf if self.waiting else horizon_s) - self.now_s
        total_s = np.cumsum(policy.step_s(seconds, n, 0))
        return seconds[: int(np.searchsorted(total_s, next_s)) + 1]

    @property
    def mean_context(self) -> float:
        """Mean positions that the next decode step attends to, over the running sequences."""
        if not self.running:
            return 0.0
        return sum(s.n_present for s in self.running) / len(self.running) + 1

    def _decoded(self, seconds: FloatArray) -> None:
        """Adds a position and a token of the running sequences for each step that took `seconds`."""
        n_steps = len(seconds)
        # Fresh sequences began their gap before a transfer or a prefill.
        first_s = self.now_s - float(seconds[1:].sum())
        for sequence in self.fresh:
            assert sequence.last_token_s is not None  # the prefill gave the first token
            self.requests.add_gaps(np.array([first_s - sequence.last_token_s]), 1)
        self.requests.add_gaps(seconds[:1], len(self.running) - len(self.fresh))
        self.requests.add_gaps(seconds[1:], len(self.running))
        self.fresh = []
        for sequence in self.running:
            sequence.n_present += n_steps
            n_blocks = max(self.pool.blocks.of(sequence.n_present), sequence.n_blocks)
            self.n_free -= n_blocks - sequence.n_blocks
            sequence.n_blocks = n_blocks
            self.requests.count(sequence, self.now_s, n_steps)
            if not sequence.n_left:
                self._release(sequence)
        self.running = [s for s in self.running if s.n_left]


def run_engines(
    engines: Sequence[BatchingEngine], until_s: float = inf, senders: Sequence[BatchingEngine] = ()
) -> None:
    """The engine with the earliest clock acts, until nothing is left or the next event is at or after `until_s`.

    Only `senders` give other engines sequences: an engine decodes ahead to the time at which one of them may.
    """
    while True:
        clocks_s = [engine.next_s for engine in engines]
        now_s = min(clocks_s)
        if now_s >= until_s:
            return
        acting = engines[clocks_s.index(now_s)]
        others = [engine for engine in senders if engine is not acting]
        acting.act(now_s, lambda others=others: min((one.next_s for one in others), default=inf))


def run_together(engines: Sequence[BatchingEngine], inbox: Inbox) -> None:
    """Data-parallel ranks that take every step together: it ends with the longest, and all in its bucket.

    A request goes to the rank that has the fewest.
    """
    now_s = 0.0
    while True:
        while inbox and inbox[0][0] <= now_s:
            fewest = min(engines, key=lambda one: one.n_admitted + len(one.waiting))
            fewest.waiting.append(heappop(inbox)[2])
        steps = [engine.begin(now_s) for engine in engines]
        at_work = [
            (engine, step)
            for engine, step in zip(engines, steps, strict=True)
            if step.n_prompt + step.n_decoded
        ]
        if not at_work:
            if not inbox:
                return
            now_s = max(now_s, inbox[0][0])
            continue
        horizon_s = inbox[0][0] if inbox else inf
        has_chunks = any(step.chunks for _, step in at_work)
        # A rank that only decodes takes one step with a rank that prefills.
        times = [
            engine.device_step_s(step, now_s if has_chunks else horizon_s)
            for engine, step in at_work
        ]
        n_steps = min(map(len, times))
        device_s = np.max([of_rank[:n_steps] for of_rank in times], axis=0)
        n_decoded, n_prompt = (
            sum(getattr(step, name) for _, step in at_work) for name in ("n_decoded", "n_prompt")
        )
        pool = engines[0].pool
        if pool.policy.shares_experts and n_prompt:
            device_s = np.array([shared_step_s(at_work, len(engines))])
        step_s = pool.policy.step_s(device_s, n_decoded, n_prompt)
        for engine, step in at_work:
            engine.end(step, device_s, step_s)
        now_s += float(step_s.sum())


def shared_step_s(at_work: Sequence[tuple[BatchingEngine, Step]], n_ranks: int) -> float:
    """A step in which every rank computes the mean prompt tokens, and decodes as many sequences as the fullest.

    It leaves out that attention of a prompt stays on its own rank.
    """
    pool = at_work[0][0].pool
    chunks = [(n, one.n_present) for _, step in at_work for one, n in step.chunks]
    n_tokens = -(-sum(n for n, _ in chunks) // n_ranks)
    engine, fullest = max(at_work, key=lambda one: one[1].n_decoded)
    n_padded = bucket(n_tokens + fullest.n_decoded, pool.policy.token_bucket)
    context = engine.mean_context if fullest.n_decoded else 0.0
    n_decoded = fullest.n_decoded
    return pool.costs.mixed_s(n_decoded, context, n_padded - n_decoded, past_of(chunks))
