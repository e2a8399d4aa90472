"""Cycles of gathers: libtpu fetches rows one by one, and elements one by one.

The cycles are those of libtpu's own bundles and DMA latencies; nothing was measured on a TPU.
"""

from dataclasses import dataclass

from meshscope.cost.rates import Rates
from meshscope.hardware.compiler_facts import CompilerFacts

LANES = 128  # of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A gather of `n_rows` rows, each of `width` elements side by side, from HBM or VMEM."""

    n_rows: int
    width: int
    is_in_hbm: bool

    def cycles(self, facts: CompilerFacts) -> float:
        """Cycles of the whole gather."""
        if self.width < LANES:
            return self.n_rows * self.width * facts.gathered_element_cycles.value
        return self.n_rows * row_cycles(self.width, facts, is_in_hbm=self.is_in_hbm)


def row_cycles(width: int, facts: CompilerFacts, *, is_in_hbm: bool) -> float:
    """Cycles to gather one row of `width` elements."""
    fact = facts.gathered_row_cycles if is_in_hbm else facts.gathered_vmem_row_cycles
    per_row, per_tile = fact.value
    return per_row + per_tile * -(-width // LANES)


def row_s(rates: Rates, width: int, element_bytes: float, *, is_in_hbm: bool = True) -> float:
    """Seconds to gather one row; without a clock, those to read and write its bytes."""
    if rates.clock_hz is None:
        return 2 * width * element_bytes / rates.hbm_bytes_per_s
    return row_cycles(width, rates.facts, is_in_hbm=is_in_hbm) / rates.clock_hz
