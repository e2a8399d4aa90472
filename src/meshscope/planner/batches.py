"""The batches of a search: one number of sequences, or a range."""

from dataclasses import dataclass

from meshscope.errors import SpecError
from meshscope.spec.workload import MAX_BATCH

MAX_LOCAL_BATCH = 1024  # sequences of one data-parallel rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences over all devices from `least` to `most`, the data axis of a plan times powers of two.

    A single number is that batch alone.
    """

    least: int = 1
    most: int = MAX_BATCH

    def of(self, data_size: int) -> tuple[int, ...]:
        """The batches of a plan with this data axis, smallest first."""
        if self.least == self.most:
            return () if self.least % data_size else (self.least,)
        powers = (1 << power for power in range(MAX_LOCAL_BATCH.bit_length()))
        return tuple(data_size * n for n in powers if self.least <= data_size * n <= self.most)


def parse_batches(text: str | int | None) -> Batches:
    """The batches of `--batch 64` or `--batch 8:256`; all for None. SpecError for anything else."""
    if text is None:
        return Batches()
    least, separator, most = str(text).partition(":")
    try:
        first, last = int(least or 1), int(most or MAX_BATCH) if separator else int(least)
    except ValueError as error:
        raise SpecError(
            f"--batch '{text}' is neither a number nor a range. Use for example 64 or 8:256."
        ) from error
    if not 1 <= first <= last <= MAX_BATCH:
        raise SpecError(
            f"--batch '{text}' is empty or out of range. Use sizes from 1 to {MAX_BATCH:,}, the smaller first."
        )
    return Batches(least=first, most=last)
