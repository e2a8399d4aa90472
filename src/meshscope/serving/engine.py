"""Continuous batching on one data-parallel rank, step by step.

A step decodes one token of every running sequence, and prefills as many prompt tokens as the budget of
the step leaves, in the order of arrival. A prompt is admitted when all of it fits in the cache. When a
decoding sequence needs a block and none is free, the latest one gives up its blocks, waits at the head of
the queue, and is computed again. Steps that only decode are taken together up to the next event.

In a disaggregated server, an engine either hands its sequences off after the first token and keeps
their blocks until they are fetched, or fetches sequences from such an engine.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop
from math import inf
from typing import NamedTuple

import numpy as np

from meshscope.cost.features import VLLM_EXPERTS
from meshscope.cost.paged import VLLM
from meshscope.errors import SpecError
from meshscope.serving.prefixes import Prefix, PrefixCache
from meshscope.serving.running import RunningBatch, ServedSequence
from meshscope.serving.served_requests import Inbox, ServedRequests
from meshscope.serving.step_costs import CacheBlocks, FloatArray, StepCosts, past_of

MAX_STEPS_AT_ONCE = 4096  # decode steps between two events
MANY_STEPS = 12  # at least as many are faster in arrays
MAX_STEPS = 20_000_000
HELD_S = 30.0  # DP_SCHED_BATCH_PREFILL_FLUSH_TIMEOUT_MS of tpu-inference 0.27


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """Limits of a step, the share of prompts that is in the prefix cache, and time of the host.

    A sequence is admitted when its prompt and `reserved_frac` of its output fit with what the others
    still need. With `has_mixed_steps` false, decoding waits while there are prompts to compute.

    The host takes `host_s` for a step and more for each sequence that decodes, and a request reaches the scheduler
    `host_request_s` after it was sent; with
    `hides_host`, steps that prefill hide it behind the device. A step takes the time of its
    bucket, powers of two from `token_bucket` and `sequence_bucket`; None pads nothing. `steps_together` says
    that data-parallel ranks wait for the longest of them in every step, to which all are padded. With
    `holds_prompts`, requests wait until each rank can have one. They go to the rank with the fewest prompt tokens, or
    requests (`counts_requests`). With `gathers_tokens` every rank has the tokens of all for its experts, and steps of
    at least `fused_from` of them use a fused kernel. `attention` and `experts` are versions of kernels, and `cache_reads` is how many times
    as long attention takes to read the cache as in the closed form. SparseCores run all-reduces from `offloads_from`
    bytes on. `expert_popularity` is the variance of the probabilities of experts over their squared mean.
    """

    max_sequences: int = 256
    max_step_tokens: int = 2048
    prefix_hit_frac: float = 0.0
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    host_request_s: float = 0.0
    hides_host: bool = False
    reserved_frac: float = 0.0
    has_mixed_steps: bool = True
    token_bucket: int | None = None
    sequence_bucket: int | None = None
    steps_together: bool = False
    gathers_tokens: bool = False
    holds_prompts: bool = False
    counts_requests: bool = False
    fused_from: int | None = None
    attention: str = VLLM
    experts: str = VLLM_EXPERTS
    cache_reads: float = 1.0
    offloads_from: int | None = None
    expert_popularity: float = 0.0

    def step_s(self, device_s: Sequence[float], n_decoded: int, n_prompt: int) -> Sequence[float]:
        """Seconds of steps with the time of the host, added to the device's or hidden behind a prefill."""
        host_s = self.host_s + self.host_sequence_s * n_decoded
        if not host_s:
            return device_s
        if self.hides_host and n_prompt:
            return [max(one_s, host_s) for one_s in device_s]
        return [one_s + host_s for one_s in device_s]


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


class Step(NamedTuple):
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
    batch: RunningBatch = field(init=False)
    prefixes: PrefixCache | None = field(init=False)
    waiting: deque[ServedSequence] = field(default_factory=deque[ServedSequence])
    filling: list[ServedSequence] = field(default_factory=list[ServedSequence])
    fetched: list[tuple[float, ServedSequence]] = field(default_factory=list)
    fresh: list[ServedSequence] = field(default_factory=list[ServedSequence])
    releases: list[tuple[float, int]] = field(default_factory=list)
    n_owed: int = (
        0  # prompt tokens that a joint queue has given to this rank, and it has not computed
    )
    _is_late: bool = False  # the last step did not decode
    _n_promised: int = 0  # blocks that admitted sequences will have, if all output is reserved
    _samples: "array[float]" = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        """All blocks are free."""
        blocks = self.pool.blocks
        self.n_free = blocks.n_blocks
        self.batch = RunningBatch(block_tokens=blocks.block_tokens)
        is_shared = self.requests.load.prefixes is not None and self.fetch is self.hand_off is None
        self.prefixes = PrefixCache(block_tokens=blocks.block_tokens) if is_shared else None

    @property
    def running(self) -> list[ServedSequence]:
        """The sequences that decode, the latest last."""
        return self.batch.sequences

    @property
    def samples(self) -> FloatArray:
        """[m, 6] the time, sequences admitted and waiting, used blocks, and tokens of a step from then on.

        Tokens are prompt and decoded tokens; the last sample before an idle stretch has none.
        """
        return np.array(self._samples).reshape(-1, 6)

    @property
    def next_s(self) -> float:
        """When the engine can act; inf if nothing is left, or while it waits for another engine."""
        if self.batch.n or self.filling or self._can_admit(self._n_reserved()):
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
        while self.batch.n_new_blocks(1) > self.n_free:
            latest = self.batch.latest()
            self.batch.remove(latest)
            self._release(latest)
            latest.n_target, latest.n_present = latest.n_present, 0
            self.waiting.appendleft(latest)
            self.n_preemptions += 1
        chunks = self._chunks()
        is_decoding = not chunks or self.pool.policy.has_mixed_steps
        step = Step(
            chunks=chunks,
            n_prompt=sum(n for _, n in chunks),
            n_decoded=is_decoding * self.batch.n,
            is_decoding=is_decoding,
        )
        self._sample(step.n_prompt, step.n_decoded)
        return step

    def device_step_s(self, step: "Step", horizon_s: float) -> list[float]:
        """Seconds of the device in a step that prefills, or in those that decode up to the next event."""
        policy = self.pool.policy
        if not step.chunks:
            return self._decode_s(horizon_s)
        past = past_of([(n, sequence.n_present) for sequence, n in step.chunks])
        context = self.mean_context if step.is_decoding else 0.0
        n_tokens = bucket(step.n_prompt + step.n_decoded, policy.token_bucket) - step.n_decoded
        return [self.pool.costs.mixed_s(step.n_decoded, context, n_tokens, past)]

    def end(self, step: "Step", device_s: Sequence[float], step_s: Sequence[float]) -> None:
        """Counts a step, or several that decode, with these times."""
        total_s = sum(step_s)
        self.now_s += total_s
        self.busy_s += total_s
        self.device_s += sum(device_s)
        self.n_steps += len(step_s)
        if step.is_decoding:
            self._decoded(step_s)
        self._is_late = not step.is_decoding
        self._prefilled(step.chunks)
        if not (self.batch.n or self.filling):
            self._sample(0, 0)
        if self.n_steps > MAX_STEPS:
            raise SpecError(f"more than {MAX_STEPS:,} steps. Use fewer --requests.")

    @property
    def n_admitted(self) -> int:
        """Sequences with blocks that this engine computes or fetches."""
        return self.batch.n + len(self.filling) + len(self.fetched)

    def burden(self, sequence: ServedSequence) -> tuple[int, int]:
        """Prompt tokens that this rank would have to compute with a request, and its requests; or its requests alone.

        Those that wait count four times (vllm at 00080ee, v1/engine/core_client.py).
        """
        if self.pool.policy.counts_requests:
            return 4 * len(self.waiting) + self.n_admitted, 0
        n_hit = 0 if self.prefixes is None else self.prefixes.hit(self._prefix(sequence))[1]
        n_tokens = self.n_owed + sequence.n_target - n_hit
        return n_tokens, self.n_admitted + len(self.waiting)

    def _sample(self, n_prompt: int, n_decoded: int) -> None:
        used, n_waiting = self.pool.blocks.n_blocks - self.n_free, len(self.waiting)
        self._samples.extend((self.now_s, self.n_admitted, n_waiting, used, n_prompt, n_decoded))

    def _next_event_s(self) -> float:
        """When the next cache, blocks, or sequence that need not wait for others arrive; inf if none do."""
        next_s = self.releases[0][0] if self.releases else inf
        if self.inbox and not self.waiting:
            next_s = min(next_s, self.inbox[0][0])
        return min(next_s, *(ready_s for ready_s, _ in self.fetched)) if self.fetched else next_s

    def _receive(self) -> None:
        """Queues what has arrived, runs what has been fetched, frees what others have fetched."""
        while self.inbox and self.inbox[0][0] <= self.now_s:
            self.waiting.append(heappop(self.inbox)[2])
        while self.releases and self.releases[0][0] <= self.now_s:
            self.n_free += heappop(self.releases)[1]
        if not self.fetched:
            return
        for ready_s, sequence in self.fetched:
            if ready_s <= self.now_s:
                sequence.n_present = sequence.n_target
                sequence.prefill_engine = None
                self.batch.add(sequence)
                self.fresh.append(sequence)
        self.fetched = [one for one in self.fetched if one[0] > self.now_s]

    def _release(self, sequence: ServedSequence) -> None:
        self._n_promised -= self._n_whole(sequence) - self.pool.blocks.of(sequence.n_covered)
        self.n_free += sequence.n_blocks
        sequence.n_blocks = 0
        if self.prefixes is not None:
            self.n_free += self.prefixes.release(sequence.nodes)
            sequence.nodes = ()

    def _can_admit(self, n_reserved: int) -> bool:
        if not self.waiting or self.n_admitted >= self.pool.policy.max_sequences:
            return False
        head = self.waiting[0]
        n_needed = self._n_whole(head)
        if self.prefixes is not None:
            prefix = self._prefix(head)
            n_shared, n_idle = self.prefixes.n_new(prefix, self.prefixes.hit(prefix)[0])
            n_needed += n_idle - n_shared
        return n_needed + n_reserved <= self.n_free

    def _prefix(self, sequence: ServedSequence) -> Prefix:
        prefixes = self.requests.load.prefixes
        return () if prefixes is None else prefixes[sequence.number]

    def _n_whole(self, sequence: ServedSequence) -> int:
        """Blocks that the sequence will need, as far as admission reserves them."""
        n_least = max(sequence.n_target, sequence.n_present) + 1
        n_later = int(self.pool.policy.reserved_frac * (sequence.n_left - 1))
        return self.pool.blocks.of(n_least + n_later)

    def _n_reserved(self) -> int:
        """Blocks that admitted sequences do not have and will need."""
        match self.pool.policy.reserved_frac:
            case 0:
                return self.batch.n_new_blocks(1)
            case 1:
                return self._n_promised
            case _:
                fetched = (sequence for _, sequence in self.fetched)
                of = self.pool.blocks.of
                admitted = (*self.running, *self.filling, *fetched)
                return sum(max(self._n_whole(s) - of(s.n_covered), 0) for s in admitted)

    def _chunks(self) -> list[tuple[ServedSequence, int]]:
        budget = self.pool.policy.max_step_tokens
        if self.pool.policy.has_mixed_steps:
            budget -= self.batch.n
        chunks: list[tuple[ServedSequence, int]] = []
        for sequence in self.filling:
            n_tokens = min(budget, sequence.n_target - sequence.n_present)
            if n_tokens > 0:
                chunks.append((sequence, n_tokens))
                budget -= n_tokens
        n_reserved = self._n_reserved() if self.waiting else 0
        while budget > 0 and self._can_admit(n_reserved):
            head = self.waiting[0]
            n_reserved += self._n_whole(head) - self.pool.blocks.of(head.n_target + 1)
            sequence = self._admitted()
            if sequence is not None:
                n_tokens = min(budget, sequence.n_target - sequence.n_present)
                chunks.append((sequence, n_tokens))
                budget -= n_tokens
        return chunks

    def _admitted(self) -> ServedSequence | None:
        """The first waiting sequence with its blocks; None if its cache is fetched, not computed."""
        sequence, policy = self.waiting.popleft(), self.pool.policy
        sequence.n_covered = sequence.n_target + 1
        sequence.n_blocks = self.pool.blocks.of(sequence.n_covered)
        self._n_promised += self._n_whole(sequence) - sequence.n_blocks
        n_prompt = int(self.requests.load.n_prompt[sequence.number])
        n_cached = int(policy.prefix_hit_frac * n_prompt)
        if self.prefixes is not None:
            prefix = self._prefix(sequence)
            n_parts, n_cached = self.prefixes.hit(prefix)
            sequence.nodes = tuple(node for node, _ in prefix[:n_parts])
            sequence.n_blocks -= self.prefixes.n_new(prefix, n_parts)[0]
            self.n_free -= self.prefixes.use(sequence.nodes)
        self.n_free -= sequence.n_blocks
        if self.fetch is not None and sequence.prefill_engine is not None:
            self.fetched.append((self.fetch(sequence, self.now_s), sequence))
            return None
        # The last position is computed in any case.
        sequence.n_present = min(n_cached, sequence.n_target - 1)
        if self.prefixes is not None:
            self.prefixes.evict(self.n_free)
            if sequence.last_token_s is None:
                self.prefixes.n_hit += sequence.n_present
                self.prefixes.n_asked += n_prompt
        self.filling.append(sequence)
        return sequence

    def _prefilled(self, chunks: list[tuple[ServedSequence, int]]) -> None:
        if not chunks:
            return
        for sequence, n in chunks:
            sequence.n_present += n
        done = [s for s in self.filling if s.n_present == s.n_target]
        self.filling = [s for s in self.filling if s.n_present < s.n_target]
        for sequence in done:  # it decodes, moves on, or has its only token
            if self.prefixes is not None:
                added, n_blocks = self.prefixes.add(self._prefix(sequence), len(sequence.nodes))
                sequence.nodes += added
                sequence.n_blocks -= n_blocks
            if sequence.last_token_s is None:
                self.requests.first_token_s[sequence.number] = self.now_s
            else:  # it was preempted
                self.requests.add_gaps([self.now_s - sequence.last_token_s], 1)
            sequence.last_token_s = self.now_s
            self._n_promised -= self._n_whole(sequence)
            sequence.n_left -= 1
            self._n_promised += self._n_whole(sequence)
            self.requests.n_tokens += 1
            if not sequence.n_left:
                self._finished(sequence)
            elif self.hand_off is not None:
                self._n_promised -= self._n_whole(sequence) - sequence.n_blocks
                self.hand_off(sequence, self.now_s)
            else:
                self.batch.add(sequence)
                if not self.pool.policy.has_mixed_steps:
                    self.fresh.append(sequence)

    def _finished(self, sequence: ServedSequence) -> None:
        """Frees what a sequence with all its tokens has, and keeps its conversation for the next turn."""
        answer = self.requests.load.answer(sequence.number)
        if self.prefixes is not None and answer is not None:
            prefix = (*self._prefix(sequence), answer)
            added, n_blocks = self.prefixes.add(prefix, len(prefix) - 1)
            sequence.nodes += added
            sequence.n_blocks -= n_blocks
        self._release(sequence)
        self.requests.finish(sequence.number, self.now_s)

    def _decode_s(self, horizon_s: float) -> list[float]:
        """Seconds of decode steps up to the next completion, arrival that can be admitted, or lack of blocks."""
        batch, policy = self.batch, self.pool.policy
        n, context = batch.n, self.mean_context
        n_padded = bucket(n, policy.sequence_bucket)
        scale = n / n_padded  # sequences that pad a bucket have no cache to read
        first_s = self.pool.costs.decode_step_s(n_padded, context * scale)
        (added_s,) = policy.step_s([0.0], n, 0)
        left_s = min(self._next_event_s(), inf if self.waiting else horizon_s) - self.now_s
        if left_s < first_s + added_s:
            return [first_s]
        n_steps = min(MAX_STEPS_AT_ONCE, batch.n_until_end())
        if left_s < inf:
            n_steps = min(n_steps, int(left_s / (first_s + added_s)) + 2)
        # No sequence needs more blocks than one that begins a block.
        while n_steps > 1 and (
            n * -(-n_steps // batch.block_tokens) > self.n_free
            and batch.n_new_blocks(n_steps) > self.n_free
        ):
            n_steps //= 2
        if n_steps > MANY_STEPS:
            contexts = (context + np.arange(n_steps, dtype=np.float64)) * scale
            seconds = self.pool.costs.decode_s(n_padded, contexts)
            total_s = (seconds + added_s).cumsum()
            return seconds[: int(total_s.searchsorted(left_s)) + 1].tolist()
        seconds, total_s = [first_s], first_s + added_s
        while total_s < left_s and len(seconds) < n_steps:
            one_s = self.pool.costs.decode_step_s(n_padded, (context + len(seconds)) * scale)
            seconds.append(one_s)
            total_s += one_s + added_s
        return seconds

    @property
    def mean_context(self) -> float:
        """Mean positions that the next decode step attends to, over the running sequences."""
        batch = self.batch
        return batch.n_positions / batch.n + 1 if batch.n else 0.0

    def _decoded(self, seconds: Sequence[float]) -> None:
        """Adds a position and a token of the running sequences for each step that took `seconds`."""
        batch, n_steps = self.batch, len(seconds)
        first_s = self.now_s - sum(seconds[1:])
        # Fresh sequences began their gap before a transfer or a prefill; preempted ones run no more.
        fresh = [s for s in self.fresh if batch.by_number.get(s.number) is s]
        for sequence in fresh:
            assert sequence.last_token_s is not None  # the prefill gave the first token
            self.requests.add_gaps([first_s - sequence.last_token_s], 1)
        self.fresh = []
        gaps_s = [first_s - batch.last_s, *seconds[1:]] if self._is_late else seconds
        if fresh:
            self.requests.add_gaps(gaps_s[:1], batch.n - len(fresh))
            gaps_s = gaps_s[1:]
        self.requests.add_gaps(gaps_s, batch.n)
        self.requests.n_tokens += n_steps * batch.n
        n_new = batch.n_new_blocks(n_steps)
        self.n_free -= n_new
        self._n_promised -= n_new
        if self.prefixes is not None:
            self.prefixes.evict(self.n_free)
        for sequence in batch.step(n_steps, self.now_s):
            self._finished(sequence)


def run_engines(
    engines: Sequence[BatchingEngine], until_s: float = inf, senders: Sequence[BatchingEngine] = ()
) -> None:
    """The engine with the earliest clock acts, until nothing is left or the next event is at or after `until_s`.

    Only `senders` give other engines sequences: an engine decodes ahead to the time at which one of them may.
    """
    acting, clocks_s = engines[0], [engine.next_s for engine in engines]

    def horizon_s() -> float:
        return min([one.next_s for one in senders if one is not acting], default=inf)

    while (now_s := min(clocks_s)) < until_s:
        acting = engines[clocks_s.index(now_s)]
        acting.act(now_s, horizon_s)
        clocks_s = [engine.next_s for engine in engines]


def run_together(engines: Sequence[BatchingEngine], inbox: Inbox) -> None:
    """Data-parallel ranks that take every step together: it ends with the longest, and all in its bucket.

    A request goes to the rank with the least `burden`. If the
    engine holds requests, they go when there are as many as ranks, or no more than idle ranks, or after a time
    (DPScheduler of tpu-inference 0.27, core/sched/dp_scheduler.py).
    """
    policy, held = engines[0].pool.policy, list[ServedSequence]()
    n_held = len(engines) if policy.holds_prompts else 1
    now_s, sent_s, n_idle = 0.0, 0.0, len(engines)
    while True:
        has_more = True
        while has_more:
            has_more = bool(inbox) and inbox[0][0] <= now_s
            if has_more:
                held.append(heappop(inbox)[2])
            is_due = not has_more and (n_idle >= len(held) or now_s >= sent_s + HELD_S)
            if is_due or len(held) >= n_held:
                for sequence in held:
                    burdens = [engine.burden(sequence) for engine in engines]
                    engine = engines[burdens.index(min(burdens))]
                    if not policy.counts_requests:
                        engine.n_owed = min(burdens)[0]
                    engine.waiting.append(sequence)
                held, sent_s = [], now_s
        steps = [engine.begin(now_s) for engine in engines]
        at_work = [
            (engine, step)
            for engine, step in zip(engines, steps, strict=True)
            if step.n_prompt + step.n_decoded
        ]
        n_idle = len(engines) - len(at_work)
        if not at_work:
            if not (inbox or held):
                return
            now_s = now_s if held else max(now_s, inbox[0][0])
            continue
        horizon_s = min(inbox[0][0] if inbox else inf, sent_s + HELD_S if held else inf)
        has_chunks = any(step.chunks for _, step in at_work)
        # A rank that only decodes takes one step with a rank that prefills.
        times = [
            engine.device_step_s(step, now_s if has_chunks else horizon_s)
            for engine, step in at_work
        ]
        device_s = [max(of_step) for of_step in zip(*times, strict=False)]
        n_decoded, n_prompt = (
            sum(getattr(step, name) for _, step in at_work) for name in ("n_decoded", "n_prompt")
        )
        step_s = policy.step_s(device_s, n_decoded, n_prompt)
        for engine, step in at_work:
            engine.end(step, device_s, step_s)
            is_done = not (engine.filling or engine.waiting)
            engine.n_owed = 0 if is_done else max(0, engine.n_owed - step.n_prompt)
        now_s += sum(step_s)
