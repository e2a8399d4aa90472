"""Passes over arrays: instructions that move or compute element by element, and how long they take.

The compiler's estimates of them are no times. Beside published measurements of eleven passes on v5p, v6e
and tpu7x they are 1.0 to 3.5 times as long (a broadcast of 5.4 GB on v6e: 15.7 ms estimated, 4.44 ms
measured): a flat number of cycles for each register, whatever the number format, and for operations
that are not fused the bytes on top. These and eleven more reach 58 to 89 % of the HBM's rate, as streams
do (benchmarks/pass_cycles.py prints both). So a large pass takes its bytes, or what the vector unit
needs, but never longer than the compiler says.

Left to the compiler: passes that lay an array out anew (another tile, or another dimension along the
lanes), whose cost is the shuffling; those on tiles that do not fill a register, but for filling an array
with one number; updates in place; and small ones, where beginning counts.
"""

import re
from collections.abc import Iterator
from math import prod

from meshscope.cost.arrays import ArrayTraffic
from meshscope.cost.rates import OpCost, Rates
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction

# Below, beginning counts. On v5p slices of 4 MB reached 45 % of the HBM's rate, passes of 22 MB 84 %: in
# between the price may be short by up to 1.7 times.
MIN_BYTES = 4_000_000
# One vector unit: 4 operations a cycle on registers of 8 x 128 numbers (jax-ml/scaling-book@0819a7d,
# tpus.md), of which one may be transcendental.
_NUMBERS_PER_CYCLE = 4 * 8 * 128
_SLOW = frozenset(
    (
        *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh"),
        *("rsqrt", "sqrt", "cbrt", "power", "sine", "cosine", "tan", "erf", "divide", "atan2"),
    )
)
_SLOW_FACTOR = 4
_MOVING = frozenset(
    (
        *("parameter", "constant", "bitcast", "broadcast", "copy", "reshape", "tuple"),
        *("get-tuple-element", "slice", "dynamic-slice", "pad", "iota", "fusion"),
    )
)
_COMPUTING = _SLOW | frozenset(
    (
        *("abs", "add", "and", "bitcast-convert", "ceil", "clamp", "compare", "convert", "floor"),
        *("is-finite", "maximum", "minimum", "multiply", "negate", "not", "or", "reduce"),
        *("round-nearest-afz", "round-nearest-even", "select", "shift-left", "sign", "subtract"),
        *("shift-right-arithmetic", "shift-right-logical", "xor"),
    )
)
_LAID_OUT = re.compile(r"([a-z]\w*)\[([\d,]*)\]\{([\d,]*)(?::((?:T\([\d,]*\))*))?[^{}]*\}")
_ROWS = re.compile(r"T\((\d+),128\)")
_PER_STORE = 4 * 8 * 128
_FULL_TILES = ("T(8,128)", "T(16,128)", "T(32,128)")
_SMALL = 8  # arrays below this part of the largest do not count: vectors along it, and scalars


def pass_price(
    flow: Dataflow,
    computation: Computation,
    instruction: Instruction,
    moved: ArrayTraffic,
    rates: Rates,
) -> OpCost | None:
    """What a large pass over arrays takes; None for any other instruction."""
    if moved.n_bytes < MIN_BYTES or rates.clock_hz is None:
        return None
    if not is_pass(flow, computation, instruction):
        return None
    numbers = _numbers(flow, computation, instruction)
    return rates.passing(
        hbm_bytes=moved.hbm_bytes,
        vmem_bytes=moved.vmem_bytes,
        vector_s=numbers / _NUMBERS_PER_CYCLE / rates.clock_hz,
    )


def _is_fill(instruction: Instruction, computation: Computation) -> bool:
    """Whether it writes one number everywhere: nothing is laid out anew, on whatever tiles."""
    operands = computation.producers(instruction)
    is_scalar = all(not array.dims for operand in operands for array in operand.arrays)
    return instruction.opcode == "broadcast" and is_scalar


def is_pass(flow: Dataflow, computation: Computation, instruction: Instruction) -> bool:
    """Whether it passes over arrays that all lie alike: full tiles, and the same numbers along the lanes."""
    if _is_fill(instruction, computation):
        return True
    inside = list(_inside(flow, computation, instruction))
    if not all(i.opcode in _MOVING | _COMPUTING for _, i in inside):
        return False
    texts = [instruction.shape_text]
    texts += [operand.shape_text for operand in computation.producers(instruction)]
    arrays = [found for text in texts for found in _LAID_OUT.findall(text)]
    sizes = [prod(_dims(dims)) for _, dims, _, _ in arrays]
    large = [a for a, n in zip(arrays, sizes, strict=True) if n * _SMALL > max(sizes)]
    return len({_lanes(a) for a in large}) == 1 and all(a[3].startswith(_FULL_TILES) for a in large)


def _stored_tiles(array: tuple[str, str, str, str]) -> float:
    """Registers that hold the tiles of an array, each of `rows` of its 8 rows."""
    rows = _ROWS.match(array[3])
    return prod(_dims(array[1])) / 128 / min(8, int(rows[1]) if rows else 8)


def _lanes(array: tuple[str, str, str, str]) -> int | None:
    """The size of the dimension that lies along the lanes."""
    dims, order = _dims(array[1]), _dims(array[2])
    return dims[order[0]] if order else None


def _dims(text: str) -> list[int]:
    return [int(d) for d in text.split(",") if d]


def _inside(
    flow: Dataflow, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    if instruction.opcode == "fusion":
        yield from flow.inner(flow.fused(instruction))
    else:
        yield computation, instruction


def _numbers(flow: Dataflow, computation: Computation, instruction: Instruction) -> float:
    """Numbers that the vector unit works on, slow operations counted several times.

    Of a fill, a store for each tile: one a cycle, where four operations are.
    """
    if _is_fill(instruction, computation):
        return sum(map(_stored_tiles, _LAID_OUT.findall(instruction.shape_text))) * _PER_STORE
    total = 0
    for home, inner in _inside(flow, computation, instruction):
        if inner.opcode not in _COMPUTING:
            continue
        arrays = inner.arrays
        if inner.opcode == "reduce" and (operand := home.producer(inner, 0)) is not None:
            arrays = operand.arrays
        n = max((prod(array.dims) for array in arrays), default=0)
        total += n * (_SLOW_FACTOR if inner.opcode in _SLOW else 1)
    return total
