"""Time of large elementwise ops: instructions that move or compute arrays element by element.

The compiler's cycle estimates are no times for these ops. They are 1.0 to 3.5 times as long as eleven
published measurements on v5p, v6e and tpu7x (a 5.4 GB broadcast on v6e: 15.7 ms estimated, 4.44 ms
measured): a flat number of cycles per register in any number format, plus the bytes of unfused ops.
These and eleven more measured ops reach 58 to 89 % of the HBM rate, like streams
(benchmarks/pass_cycles.py prints both). A large op therefore takes the longer of its bytes and its vector
work, and at most the compiler's estimate.

The compiler's estimate remains for relayouts (another tile, or another dimension along the lanes), for
tiles that do not fill a register (except when an array is filled with one number), for updates in place,
and for small ops, whose launch dominates.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from meshscope.cost.array_traffic import ArrayTraffic
from meshscope.cost.rates import OpTime, Rates
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction

# Launch dominates below this. On v5p, 4 MB slices reached 45 % of the HBM rate and 22 MB ops 84 %; in
# between, the time may be too short by up to 1.7 times.
MIN_BYTES = 4_000_000
# One vector unit: 4 ops a cycle on registers of 8 x 128 numbers (jax-ml/scaling-book@0819a7d, tpus.md),
# one of which may be transcendental.
_NUMBERS_PER_CYCLE = 4 * 8 * 128
_TRANSCENDENTAL = frozenset(
    (
        *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh"),
        *("rsqrt", "sqrt", "cbrt", "power", "sine", "cosine", "tan", "erf", "divide", "atan2"),
    )
)
_TRANSCENDENTAL_FACTOR = 4
_MOVING = frozenset(
    (
        *("parameter", "constant", "bitcast", "broadcast", "copy", "reshape", "tuple"),
        *("get-tuple-element", "slice", "dynamic-slice", "pad", "iota", "fusion"),
    )
)
_COMPUTING = _TRANSCENDENTAL | frozenset(
    (
        *("abs", "add", "and", "bitcast-convert", "ceil", "clamp", "compare", "convert", "floor"),
        *("is-finite", "maximum", "minimum", "multiply", "negate", "not", "or", "reduce"),
        *("round-nearest-afz", "round-nearest-even", "select", "shift-left", "sign", "subtract"),
        *("shift-right-arithmetic", "shift-right-logical", "xor"),
    )
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]\{([\d,]*)(?::((?:T\([\d,]*\))*))?[^{}]*\}")
_ROWS = re.compile(r"T\((\d+),128\)")
_NUMBERS_PER_STORE = 4 * 8 * 128
_FULL_TILES = ("T(8,128)", "T(16,128)", "T(32,128)")
_NEGLIGIBLE = 8  # arrays below this fraction of the largest are ignored: vectors and scalars


class _TiledArray(NamedTuple):
    dtype: str
    dims: list[int]
    minor_to_major: list[int]
    tiles: str

    @property
    def lane_dim(self) -> int | None:
        """Size of the dimension along the lanes."""
        return self.dims[self.minor_to_major[0]] if self.minor_to_major else None

    @property
    def n_registers(self) -> float:
        """Registers that hold the tiles, each of up to 8 rows."""
        rows = _ROWS.match(self.tiles)
        return prod(self.dims) / 128 / min(8, int(rows[1]) if rows else 8)


def elementwise_time(
    flow: Dataflow,
    computation: Computation,
    instruction: Instruction,
    traffic: ArrayTraffic,
    rates: Rates,
) -> OpTime | None:
    """Time of a large elementwise op; None for any other instruction."""
    if traffic.n_bytes < MIN_BYTES or rates.clock_hz is None:
        return None
    if not is_elementwise(flow, computation, instruction):
        return None
    numbers = _vector_numbers(flow, computation, instruction)
    return rates.elementwise(
        hbm_bytes=traffic.hbm_bytes,
        vmem_bytes=traffic.vmem_bytes,
        vector_s=numbers / _NUMBERS_PER_CYCLE / rates.clock_hz,
    )


def _is_fill(instruction: Instruction, computation: Computation) -> bool:
    """Whether the op fills an array with one number, which needs no relayout on any tiles."""
    operands = computation.producers(instruction)
    is_scalar = all(not array.dims for operand in operands for array in operand.arrays)
    return instruction.opcode == "broadcast" and is_scalar


def is_elementwise(flow: Dataflow, computation: Computation, instruction: Instruction) -> bool:
    """Whether all arrays of the op share one layout: full tiles and the same dimension along the lanes."""
    if _is_fill(instruction, computation):
        return True
    inner_ops = _inner_ops(flow, computation, instruction)
    if not all(inner.opcode in _MOVING | _COMPUTING for _, inner in inner_ops):
        return False
    texts = [instruction.shape_text]
    texts += [operand.shape_text for operand in computation.producers(instruction)]
    arrays = [array for text in texts for array in _tiled_arrays(text)]
    largest = max((prod(array.dims) for array in arrays), default=0)
    large = [array for array in arrays if prod(array.dims) * _NEGLIGIBLE > largest]
    has_one_layout = len({array.lane_dim for array in large}) == 1
    return has_one_layout and all(array.tiles.startswith(_FULL_TILES) for array in large)


def _tiled_arrays(shape_text: str) -> Iterator[_TiledArray]:
    for dtype, dims, minor_to_major, tiles in _ARRAY.findall(shape_text):
        yield _TiledArray(dtype, _integers(dims), _integers(minor_to_major), tiles)


def _integers(text: str) -> list[int]:
    return [int(d) for d in text.split(",") if d]


def _inner_ops(
    flow: Dataflow, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    if instruction.opcode == "fusion":
        yield from flow.inner(flow.fused(instruction))
    else:
        yield computation, instruction


def _vector_numbers(flow: Dataflow, computation: Computation, instruction: Instruction) -> float:
    """Numbers that the vector unit processes; transcendental ops count several times.

    A fill stores one tile per cycle, in which four ops could run.
    """
    if _is_fill(instruction, computation):
        arrays = _tiled_arrays(instruction.shape_text)
        return sum(array.n_registers for array in arrays) * _NUMBERS_PER_STORE
    total = 0
    for home, inner in _inner_ops(flow, computation, instruction):
        if inner.opcode not in _COMPUTING:
            continue
        arrays = inner.arrays
        if inner.opcode == "reduce" and (operand := home.producer(inner, 0)) is not None:
            arrays = operand.arrays
        n = max((prod(array.dims) for array in arrays), default=0)
        total += n * (_TRANSCENDENTAL_FACTOR if inner.opcode in _TRANSCENDENTAL else 1)
    return total
