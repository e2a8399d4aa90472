"""The batches of a search: one number of sequences, or a range."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from meshscope.errors import SpecError
from meshscope.plans.workload import MAX_BATCH
from meshscope.units import whole_number

MAX_LOCAL_BATCH = 1024  # sequences of one data-parallel rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences over all devices from `least` to `most`.

    They are the data axis of a plan times powers of two, or, with a `step`, each of `least`,
    `least` + `step` and so on that the data axis divides. A single number is that batch alone.
    """

    least: int = 1
    most: int = MAX_BATCH
    step: int | None = None

    def of(self, data_size: int) -> Sequence[int]:
        """The batches of a plan with this data axis, smallest first."""
        if self.least == self.most:
            return () if self.least % data_size else (self.least,)
        if self.step is not None:
            firsts = range(self.least, self.most + 1, self.step)[:data_size]
            first = next((n for n in firsts if n % data_size == 0), self.most + 1)
            return range(first, self.most + 1, lcm(self.step, data_size))
        powers = (1 << power for power in range(MAX_LOCAL_BATCH.bit_length()))
        return tuple(data_size * n for n in powers if self.least <= data_size * n <= self.most)


def parse_batches(text: str | int | None) -> Batches:
    """The batches of `--batch 64`, `8:256` or `8:256:8`; all for None. SpecError for anything else."""
    if text is None:
        return Batches()
    least, separator, rest = str(text).partition(":")
    most, has_step, step = rest.partition(":")
    try:
        first = whole_number(least or "1" if separator else least)
        last = whole_number(most or str(MAX_BATCH)) if separator else first
        every = whole_number(step) if has_step else None
    except ValueError as error:
        raise SpecError(
            f"--batch '{text}' is neither a number nor a range. Use for example 64, 8:256 or 8:256:8."
        ) from error
    if not 1 <= first <= last <= MAX_BATCH:
        raise SpecError(
            f"--batch '{text}' is empty or out of range. Use sizes from 1 to {MAX_BATCH:,}, the smaller first."
        )
    if every is not None and every < 1:
        raise SpecError(f"--batch '{text}': a step of {every} is too small. Use at least 1.")
    return Batches(least=first, most=last, step=every)
