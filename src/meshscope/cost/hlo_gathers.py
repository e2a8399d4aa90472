"""Gathers in HLO: instructions that fetch rows of a table."""

from math import prod

from meshscope.cost.array_traffic import array_traffic
from meshscope.cost.gathers import Gather
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction


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
