"""What a kernel does: FLOPs, traffic and cycles, how they are known, and the bytes that it touches."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from meshscope.cost.array_traffic import array_traffic, traffic_of_arrays
from meshscope.cost.traffic import NO_TRAFFIC, ArrayTraffic
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

# Result and operand that share a buffer: `{1}: (10, {})`, or `{}: (0, {})` for a single result.
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")


class WorkSource(StrEnum):
    """How the work of a kernel is known."""

    ALGORITHM = "algorithm"  # from operand shapes, block sizes and lengths
    AUTHOR = "author"  # the cost estimate that its author states
    BYTES = "bytes"  # only the operands are known


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """FLOPs, traffic, and cycles of loop bodies (None: at a fraction of the peak FLOPs of `operand_dtype`).

    `conversion_cycles` are those of a loop that converts weights, while products and transfers run.
    """

    source: WorkSource
    moved: ArrayTraffic
    flops: float = 0.0
    cycles: float | None = None
    conversion_cycles: float = 0.0
    operand_dtype: str = "bf16"
    note: str | None = None


def operand_arrays(computation: Computation, instruction: Instruction) -> list[ArrayShape]:
    """The array of each operand, without those of tuples."""
    return [
        operand.arrays[0]
        for operand in computation.producers(instruction)
        if len(operand.arrays) == 1
    ]


def operand_traffic(computation: Computation, instruction: Instruction) -> ArrayTraffic:
    """Bytes of all operands, by memory."""
    return _sum(array_traffic(o.shape_text) for o in computation.producers(instruction))


def float_arrays(computation: Computation, instruction: Instruction) -> list[ArrayShape]:
    """The floating-point operands."""
    arrays = operand_arrays(computation, instruction)
    return [array for array in arrays if array.dtype.startswith(("bf", "f"))]


def in_place(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """The (result, operand) pairs that share a buffer."""
    aliases = _ALIASES.search(instruction.attributes)
    pairs = _ALIAS.findall("" if aliases is None else f"{aliases[1]}}}")
    return tuple((int(result or 0), int(operand)) for result, operand in pairs)


def touched_traffic(computation: Computation, instruction: Instruction) -> ArrayTraffic:
    """Bytes of a kernel without a model: its arrays, and of a buffer in place no more than of the others.

    What a kernel writes into a buffer comes from its other operands, and what it reads of a cache grows
    with the queries, whatever the size of the buffer.
    """
    shared = in_place(instruction)
    results = traffic_of_arrays(instruction.shape_text)
    operands = [array_traffic(o.shape_text) for o in computation.producers(instruction)]
    written = _sum(r for at, r in enumerate(results) if at not in {pair[0] for pair in shared})
    read = _sum(o for at, o in enumerate(operands) if at not in {pair[1] for pair in shared})
    total = read + _as_written(written)
    for at, _ in shared:
        if at < len(results):
            total += _capped(results[at], (read + written).n_bytes)
    return total


def _sum(arrays: Iterable[ArrayTraffic]) -> ArrayTraffic:
    return sum(arrays, start=NO_TRAFFIC)


def _as_written(moved: ArrayTraffic) -> ArrayTraffic:
    return ArrayTraffic(
        hbm_bytes=moved.hbm_bytes,
        vmem_bytes=moved.vmem_bytes,
        hbm_written_bytes=moved.hbm_bytes,
    )


def _capped(whole: ArrayTraffic, n_bytes: int) -> ArrayTraffic:
    return ArrayTraffic(
        hbm_bytes=min(whole.hbm_bytes, n_bytes), vmem_bytes=min(whole.vmem_bytes, n_bytes)
    )
