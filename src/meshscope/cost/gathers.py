"""Cycles of gathers: libtpu fetches rows one by one, and elements one by one.

The cycles are those of libtpu's own bundles and DMA latencies; nothing was measured on a TPU.
"""

from dataclasses import dataclass
from math import prod

from meshscope.cost.array_traffic import array_traffic
from meshscope.cost.rates import Rates
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.spec.hardware.compiler_facts import CompilerFacts

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


def gather_of(flow: Dataflow, computation: Computation, instruction: Instruction) -> Gather | None:
    """The gather that an instruction, or the fusion that it is, consists of; None for others."""
    if instruction.opcode == "gather":
        return _gather(instruction, computation.producer(instruction))
    if instruction.opcode != "fusion":
        return None
    fused = flow.fused(instruction)
    inner = next((i for i in fused.instructions if i.opcode == "gather"), None)
    if inner is None:
        return None
    table = fused.producer(inner)
    if table is not None and table.opcode == "parameter":
        table = computation.producer(instruction, table.parameter_number)
    return _gather(inner, table)


def _gather(gather: Instruction, table: Instruction | None) -> Gather | None:
    sizes = gather.braced("slice_sizes")
    if not sizes or not gather.arrays or table is None:
        return None
    *others, width = (int(size) for size in sizes.split(","))
    if prod(others) != 1:
        return None  # blocks, which are copied as such
    is_in_hbm = array_traffic(table.shape_text).hbm_bytes > 0
    n_rows = prod(gather.arrays[0].dims) // width
    return Gather(n_rows=n_rows, width=width, is_in_hbm=is_in_hbm)
