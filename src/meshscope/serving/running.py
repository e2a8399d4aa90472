"""Sequences that decode together, whose bookkeeping does not grow with their number."""

from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True, kw_only=True)
class ServedSequence:
    """A request in an engine: `n_present` positions are in its cache.

    `n_blocks` blocks are its own, and cover `n_covered` positions together with `nodes`, the parts of a prefix
    cache that it uses. `prefill_engine` is the engine that computed the prompt, while its keys and values are
    still there. While a sequence runs, its figures describe the decode step `as_of`.
    """

    number: int
    n_target: int  # positions to compute before the next token
    n_left: int  # output tokens to come
    n_present: int = 0
    n_blocks: int = 0
    n_covered: int = 0
    last_token_s: float | None = None
    prefill_engine: int | None = None
    nodes: tuple[int, ...] = ()
    as_of: int = 0


@dataclass(slots=True, kw_only=True)
class RunningBatch:
    """Sequences that get a token each in every decode step, the latest last.

    `block_tokens` positions are a block. `n` sequences run. `n_steps` are the decode steps so far, of which the last one ended at
    `last_s`; `n_positions` are in the caches of all. `n_ahead` sequences have a block for their next position
    that others of their length do not have yet.
    """

    block_tokens: int
    n: int = 0
    n_steps: int = 0
    last_s: float = 0.0
    n_positions: int = 0
    n_ahead: int = 0
    by_number: dict[int, ServedSequence] = field(default_factory=dict[int, ServedSequence])
    _ends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _by_phase: list[int] = field(init=False)  # sequences by positions at step 0, modulo a block

    def __post_init__(self) -> None:
        """No sequence runs."""
        self._by_phase = [0] * self.block_tokens

    @property
    def sequences(self) -> list[ServedSequence]:
        """The sequences as they are now, the latest last."""
        for sequence in self.by_number.values():
            self._update(sequence)
        return list(self.by_number.values())

    def add(self, sequence: ServedSequence) -> None:
        """Lets a sequence decode from the next step on."""
        sequence.as_of = self.n_steps
        self.by_number[sequence.number] = sequence
        heappush(self._ends, (self.n_steps + sequence.n_left, sequence.number))
        self._count(sequence, 1)

    def remove(self, sequence: ServedSequence) -> None:
        """Takes a sequence out, as it is now."""
        self._update(sequence)
        del self.by_number[sequence.number]
        self._count(sequence, -1)

    def latest(self) -> ServedSequence:
        """The sequence that began last."""
        return self.by_number[next(reversed(self.by_number))]

    def n_new_blocks(self, n_steps: int) -> int:
        """Blocks that so many steps need and the sequences do not have."""
        size, now = self.block_tokens, self.n_steps
        if n_steps == 1:
            return self._by_phase[-now % size] - self.n_ahead
        n_new = -self.n_ahead
        for phase, count in enumerate(self._by_phase):
            if count:
                used = (phase + now) % size
                n_new += count * (-(-(used + n_steps) // size) - (used > 0))
        return n_new

    def n_until_end(self) -> int:
        """Decode steps until the first sequence has all its tokens."""
        while True:
            end, number = self._ends[0]
            sequence = self.by_number.get(number)
            if sequence is not None and sequence.as_of + sequence.n_left == end:
                return end - self.n_steps
            heappop(self._ends)  # it was preempted

    def step(self, n_steps: int, now_s: float) -> list[ServedSequence]:
        """Counts steps that ended now; returns the sequences that have all their tokens, taken out."""
        self.n_steps += n_steps
        self.n_positions += n_steps * self.n
        self.n_ahead = 0
        self.last_s = now_s
        done: list[ServedSequence] = []
        while self.n and not self.n_until_end():
            sequence = self.by_number[heappop(self._ends)[1]]
            self.remove(sequence)
            done.append(sequence)
        return done

    def _count(self, sequence: ServedSequence, n: int) -> None:
        self.n += n
        self.n_positions += n * sequence.n_present
        self._by_phase[(sequence.n_present - self.n_steps) % self.block_tokens] += n
        if self._blocks(sequence.n_covered) > self._blocks(sequence.n_present):
            self.n_ahead += n

    def _blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)

    def _update(self, sequence: ServedSequence) -> None:
        if n := self.n_steps - sequence.as_of:
            sequence.as_of = self.n_steps
            sequence.n_present += n
            sequence.n_left -= n
            sequence.last_token_s = self.last_s
            n_covered = max(sequence.n_covered, sequence.n_present)
            sequence.n_blocks += self._blocks(n_covered) - self._blocks(sequence.n_covered)
            sequence.n_covered = n_covered
