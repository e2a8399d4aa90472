"""Discrete-event simulation of continuous batching on one data-parallel rank.

A step decodes one token of every running sequence, and prefills as many prompt tokens as the budget of
the step leaves, in the order of arrival. A prompt is admitted when all of it fits in the cache. When a
decoding sequence needs a block and none is free, the latest one gives up its blocks, waits at the head of
the queue, and is computed again. Steps that only decode are taken together up to the next event.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import SpecError
from meshscope.serving.cache_blocks import BLOCK_TOKENS, CacheBlocks
from meshscope.serving.load import Load
from meshscope.serving.step_costs import StepCosts, past_of

MAX_STEPS_AT_ONCE = 4096  # decode steps between two events
MAX_SEQUENCES = 1 << 16
MIN_STEP_TOKENS = 16
MAX_STEP_TOKENS = 1 << 20
MAX_HOST_S = 10.0
MAX_STEPS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """Limits of a step, the share of prompts that is in the prefix cache, and time of the host."""

    max_sequences: int = 256
    max_step_tokens: int = 2048
    prefix_hit_frac: float = 0.0
    host_s: float = 0.0  # added to every step

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _check_range("max_sequences", self.max_sequences, (1, MAX_SEQUENCES))
        # A step has room for a token of every sequence, and for some of a prompt.
        least = max(self.max_sequences, MIN_STEP_TOKENS)
        _check_range("max_step_tokens", self.max_step_tokens, (least, MAX_STEP_TOKENS))
        if not 0 <= self.prefix_hit_frac < 1:
            raise SpecError(f"prefix_hit_frac={self.prefix_hit_frac} is not in [0, 1).")
        if not 0 <= self.host_s <= MAX_HOST_S:
            raise SpecError(f"host_s={self.host_s} is not in 0 to {MAX_HOST_S:g}. Use seconds.")


def _check_range(name: str, value: int, limits: tuple[int, int]) -> None:
    least, most = limits
    if not least <= value <= most:
        raise SpecError(f"{name}={value} is not in {least:,} to {most:,}. Change it.")


@dataclass(slots=True, kw_only=True)
class ServedSequence:
    """A request in the engine; `n_present` positions are in the cache, `n_blocks` are its blocks."""

    number: int
    n_target: int  # positions to compute before the next token
    n_left: int  # output tokens to come
    n_present: int = 0
    n_blocks: int = 0
    last_token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What happened: times of [n] requests, NaN where they are not done, and the steps of the engine.

    `gaps_s` are times between tokens of one sequence, `n_gaps` how many each. `samples` [m, 4] are the
    time, running and waiting sequences, and used blocks at the beginning of a step.
    """

    arrival_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    n_output: NDArray[np.int64]
    gaps_s: NDArray[np.float64]
    n_gaps: NDArray[np.int64]
    samples: NDArray[np.float64]
    end_s: float
    busy_s: float
    n_steps: int
    n_tokens: int
    n_preemptions: int
    n_running: int
    n_waiting: int


@dataclass(slots=True, kw_only=True)
class BatchingEngine:
    """The state of the simulation; `run` advances it to the end."""

    load: Load
    costs: StepCosts
    blocks: CacheBlocks
    policy: EnginePolicy
    now_s: float = 0.0
    busy_s: float = 0.0
    n_arrived: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    n_preemptions: int = 0
    n_free: int = 0
    waiting: deque[ServedSequence] = field(default_factory=deque[ServedSequence])
    filling: list[ServedSequence] = field(default_factory=list[ServedSequence])
    running: list[ServedSequence] = field(default_factory=list[ServedSequence])
    first_token_s: NDArray[np.float64] = field(init=False)
    finish_s: NDArray[np.float64] = field(init=False)
    gaps: list[tuple[NDArray[np.float64], int]] = field(default_factory=list)
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Checks that every request fits alone."""
        longest = int((self.load.n_prompt + self.load.n_output).max())
        if self.blocks.of(longest) > self.blocks.n_blocks:
            raise SpecError(
                f"a request of {longest:,} tokens needs {self.blocks.of(longest):,} blocks of "
                f"{BLOCK_TOKENS} tokens, and the cache has {self.blocks.n_blocks:,}. Use more devices, "
                "a smaller --cache-dtype or shorter requests."
            )
        self.n_free = self.blocks.n_blocks
        self.first_token_s = np.full(self.load.n_requests, np.nan)
        self.finish_s = np.full(self.load.n_requests, np.nan)

    def run(self, until_s: float = float("inf")) -> Served:
        """Simulates until all requests are done, or until the first event after `until_s`."""
        while self.now_s < until_s:
            self._receive()
            if not (self.waiting or self.filling or self.running):
                if self.n_arrived == self.load.n_requests:
                    break
                self.now_s = float(self.load.arrival_s[self.n_arrived])
                continue
            self._step()
            if self.n_steps > MAX_STEPS:
                raise SpecError(f"more than {MAX_STEPS:,} steps. Use fewer --requests.")
        return self._served()

    def _receive(self) -> None:
        """Queues the requests that have arrived."""
        arrival_s, n_requests = self.load.arrival_s, self.load.n_requests
        while self.n_arrived < n_requests and arrival_s[self.n_arrived] <= self.now_s:
            number = self.n_arrived
            prompt, output = int(self.load.n_prompt[number]), int(self.load.n_output[number])
            self.waiting.append(ServedSequence(number=number, n_target=prompt, n_left=output))
            self.n_arrived += 1

    def _step(self) -> None:
        self._make_room()
        chunks = self._chunks()
        n_sequences = len(self.running)
        in_use = n_sequences + len(self.filling)
        used = self.blocks.n_blocks - self.n_free
        self.samples.append((self.now_s, in_use, len(self.waiting), used))
        if chunks:
            self._mixed_step(chunks)
        else:
            self._decode_steps()

    def _make_room(self) -> None:
        """Gives every running sequence room for its next position; preempts the latest if there is none."""
        while self._n_new_blocks(1) > self.n_free:
            latest = self.running.pop()
            self._release(latest)
            latest.n_target, latest.n_present = latest.n_present, 0
            self.waiting.appendleft(latest)
            self.n_preemptions += 1

    def _n_new_blocks(self, n_steps: int) -> int:
        """Blocks that the running sequences need for this many positions each."""
        blocks = self.blocks
        return sum(max(blocks.of(s.n_present + n_steps) - s.n_blocks, 0) for s in self.running)

    def _release(self, sequence: ServedSequence) -> None:
        self.n_free += sequence.n_blocks
        sequence.n_blocks = 0

    def _chunks(self) -> list[tuple[ServedSequence, int]]:
        """The prompt tokens of this step, by sequence; admits waiting ones while there is room."""
        budget = self.policy.max_step_tokens - len(self.running)
        chunks: list[tuple[ServedSequence, int]] = []
        n_reserved = self._n_new_blocks(1)
        for sequence in self.filling:
            n_tokens = min(budget, sequence.n_target - sequence.n_present)
            if n_tokens > 0:
                chunks.append((sequence, n_tokens))
                budget -= n_tokens
        while budget > 0 and self.waiting and self._n_admitted < self.policy.max_sequences:
            sequence = self.waiting[0]
            n_blocks = self.blocks.of(sequence.n_target + 1)
            if n_blocks + n_reserved > self.n_free:
                break
            self.waiting.popleft()
            self.n_free -= n_blocks
            sequence.n_blocks = n_blocks
            sequence.n_present = self._n_cached(sequence)
            self.filling.append(sequence)
            n_tokens = min(budget, sequence.n_target - sequence.n_present)
            chunks.append((sequence, n_tokens))
            budget -= n_tokens
        return chunks

    @property
    def _n_admitted(self) -> int:
        return len(self.running) + len(self.filling)

    def _n_cached(self, sequence: ServedSequence) -> int:
        """Positions that the prefix cache holds; the last one is computed in any case."""
        n_prompt = int(self.load.n_prompt[sequence.number])
        return min(int(self.policy.prefix_hit_frac * n_prompt), sequence.n_target - 1)

    def _mixed_step(self, chunks: list[tuple[ServedSequence, int]]) -> None:
        """Prefills the chunks and decodes one token of every running sequence."""
        n_tokens = sum(n for _, n in chunks)
        past = past_of([(n, sequence.n_present) for sequence, n in chunks])
        n_sequences = len(self.running)
        step_s = self.costs.mixed_s(n_sequences, self._mean_context, n_tokens, past)
        seconds = np.array([step_s + self.policy.host_s])
        self._advance(seconds)
        self._decoded(seconds)
        for sequence, n in chunks:
            sequence.n_present += n
        done = [s for s in self.filling if s.n_present == s.n_target]
        self.filling = [s for s in self.filling if s.n_present < s.n_target]
        for sequence in done:
            self._token_of_prefill(sequence)

    def _token_of_prefill(self, sequence: ServedSequence) -> None:
        """The token at the end of a prefill: the first one, or the next of a preempted sequence."""
        if sequence.last_token_s is None:
            self.first_token_s[sequence.number] = self.now_s
        else:
            self.gaps.append((np.array([self.now_s - sequence.last_token_s]), 1))
        self._count_token(sequence)
        if sequence.n_left:
            self.running.append(sequence)

    def _count_token(self, sequence: ServedSequence, n: int = 1) -> None:
        sequence.last_token_s = self.now_s
        sequence.n_left -= n
        self.n_tokens += n
        if not sequence.n_left:
            self.finish_s[sequence.number] = self.now_s
            self._release(sequence)

    def _decode_steps(self) -> None:
        """Decodes up to the next completion, arrival that can be admitted, or lack of blocks."""
        n_steps = min(MAX_STEPS_AT_ONCE, *(s.n_left for s in self.running))
        while n_steps > 1 and self._n_new_blocks(n_steps) > self.n_free:
            n_steps //= 2
        contexts = self._mean_context + np.arange(n_steps, dtype=np.float64)
        seconds = self.costs.decode_s(len(self.running), contexts) + self.policy.host_s
        if not self.waiting and self.n_arrived < self.load.n_requests:
            next_s = float(self.load.arrival_s[self.n_arrived]) - self.now_s
            n_before = int(np.searchsorted(np.cumsum(seconds), next_s)) + 1
            seconds = seconds[:n_before]
        self._advance(seconds)
        self._decoded(seconds)

    @property
    def _mean_context(self) -> float:
        """Positions that a running sequence attends to in the next step, on average."""
        if not self.running:
            return 0.0
        return sum(s.n_present for s in self.running) / len(self.running) + 1

    def _advance(self, seconds: NDArray[np.float64]) -> None:
        total_s = float(seconds.sum())
        self.now_s += total_s
        self.busy_s += total_s
        self.n_steps += len(seconds)

    def _decoded(self, seconds: NDArray[np.float64]) -> None:
        """Adds a position and a token of the running sequences for each step that took `seconds`."""
        n_steps = len(seconds)
        if self.running:
            self.gaps.append((seconds, len(self.running)))
        for sequence in self.running:
            sequence.n_present += n_steps
            n_blocks = max(self.blocks.of(sequence.n_present), sequence.n_blocks)
            self.n_free -= n_blocks - sequence.n_blocks
            sequence.n_blocks = n_blocks
            self._count_token(sequence, n_steps)
        self.running = [s for s in self.running if s.n_left]

    def _served(self) -> Served:
        gaps = [np.empty(0), *(seconds for seconds, _ in self.gaps)]
        counts = [np.empty(0, int), *(np.full(len(seconds), n) for seconds, n in self.gaps)]
        return Served(
            arrival_s=self.load.arrival_s[: self.n_arrived],
            first_token_s=self.first_token_s[: self.n_arrived],
            finish_s=self.finish_s[: self.n_arrived],
            n_output=self.load.n_output[: self.n_arrived],
            gaps_s=np.concatenate(gaps),
            n_gaps=np.concatenate(counts),
            samples=np.array(self.samples, dtype=float).reshape(-1, 4),
            end_s=self.now_s,
            busy_s=self.busy_s,
            n_steps=self.n_steps,
            n_tokens=self.n_tokens,
            n_preemptions=self.n_preemptions,
            n_running=len(self.running) + len(self.filling),
            n_waiting=len(self.waiting),
        )
