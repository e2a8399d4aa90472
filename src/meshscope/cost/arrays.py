"""How many bytes an instruction reads and writes, in HBM and in VMEM, and how many flops it is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE
from meshscope.units import DTYPE_BITS, array_bytes

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_IN_VMEM = re.compile(r"S\([1-9]\d*\)")
# Of their first operand these take what their result holds; the others read all of it.
_TAKES_PART = frozenset({"gather", "dynamic-slice", "slice"})
# Of their operand these take what is taken of their result.
_LAYS_OUT = frozenset({"copy", "bitcast"})
_MAX_NESTING = 8
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTraffic:
    """Bytes that an instruction moves, by where they lie."""

    hbm_bytes: int = 0
    vmem_bytes: int = 0

    def __add__(self, other: "ArrayTraffic") -> "ArrayTraffic":
        return ArrayTraffic(
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
            vmem_bytes=self.vmem_bytes + other.vmem_bytes,
        )

    @property
    def n_bytes(self) -> int:
        """All of them."""
        return self.hbm_bytes + self.vmem_bytes


def traffic(flow: Dataflow, computation: Computation, instruction: Instruction) -> ArrayTraffic:
    """What an instruction reads and writes once.

    Of an operand that is only sliced or gathered from, what is taken; an array that is updated in
    place counts as what is written. Bytes of kernels that read an operand twice are not seen.
    """
    parts = [_read(flow, computation, instruction, i) for i in range(len(instruction.operands))]
    return sum(parts, start=_written(flow, computation, instruction))


def held(shape_text: str) -> ArrayTraffic:
    """The bytes of the arrays in the text of a shape; memory space 0 is HBM, the others are on the chip."""
    found = ArrayTraffic()
    for dtype, dims, layout in _ARRAY.findall(shape_text):
        if dtype in DTYPE_BITS:
            n = array_bytes(dtype, tuple(int(d) for d in re.findall(r"\d+", dims)))
            is_inside = _IN_VMEM.search(layout) is not None
            found += ArrayTraffic(vmem_bytes=n) if is_inside else ArrayTraffic(hbm_bytes=n)
    return found


def _read(
    flow: Dataflow, computation: Computation, instruction: Instruction, at: int
) -> ArrayTraffic:
    operand = computation.producer(instruction, at)
    if operand is None:
        return ArrayTraffic()
    whole = held(operand.shape_text)
    if instruction.opcode == "fusion":
        taken = _taken_inside(flow, flow.fused(instruction), at, 0)
        return whole if taken is None else _scaled(whole, taken)
    if instruction.opcode in _TAKES_PART and at == 0:
        return _scaled(whole, held(instruction.shape_text).n_bytes)
    if instruction.opcode == "dynamic-update-slice" and at == 0:
        return ArrayTraffic()
    return whole


def _written(flow: Dataflow, computation: Computation, instruction: Instruction) -> ArrayTraffic:
    whole = held(instruction.shape_text)
    if instruction.opcode == "fusion" and _holds_collective(flow.fused(instruction)):
        return _computed(flow.fused(instruction))
    inner, root = computation, instruction
    for _ in range(_MAX_NESTING):
        if root.opcode != "fusion":
            break
        inner = flow.fused(root)
        root = inner.root
    if root.opcode == "dynamic-update-slice" and (update := inner.producer(root, 1)):
        return _scaled(whole, held(update.shape_text).n_bytes)
    return whole


def _holds_collective(fused: Computation) -> bool:
    return any(inner.opcode in KIND_OF_OPCODE for inner in fused.instructions)


def _computed(fused: Computation) -> ArrayTraffic:
    """What a fusion around a collective writes itself: the collective's arrays pass through it."""
    elements = fused.producers(fused.root) if fused.root.opcode == "tuple" else [fused.root]
    own = [e for e in elements if e.opcode not in KIND_OF_OPCODE and e.opcode != "parameter"]
    return sum((held(element.shape_text) for element in own), start=ArrayTraffic())


def _taken_inside(flow: Dataflow, fused: Computation, at: int, depth: int) -> int | None:
    """Bytes that a fusion takes of one operand where it slices it; None where it reads all of it."""
    parameter = fused.parameters.get(at)
    return None if parameter is None else _taken_by_users(flow, fused, parameter, depth)


def _taken_by_users(
    flow: Dataflow, fused: Computation, array: Instruction, depth: int
) -> int | None:
    users = flow.users(fused, array)
    taken = 0
    for user in users:
        own = _taken_by(flow, fused, user, array.name, depth)
        if own is None:
            return None
        taken += own
    return taken if users else None


def _taken_by(
    flow: Dataflow, fused: Computation, user: Instruction, name: str, depth: int
) -> int | None:
    at = user.operands.index(name)
    if user.opcode in _TAKES_PART and at == 0:
        return held(user.shape_text).n_bytes
    is_updated = user.opcode == "dynamic-update-slice" and at == 0
    is_handed_on = user.opcode == "tuple" and user.is_root and _holds_collective(fused)
    if is_updated or is_handed_on or user.opcode in KIND_OF_OPCODE:
        return 0  # what a collective sends, the wires read
    if flow.consists_of(user, _LAYS_OUT) and not user.is_root:
        return _taken_by_users(flow, fused, user, depth)
    if user.opcode == "fusion" and depth < _MAX_NESTING:
        return _taken_inside(flow, flow.fused(user), at, depth + 1)
    return None


def _scaled(whole: ArrayTraffic, n_bytes: int) -> ArrayTraffic:
    """At most `n_bytes`, where the whole lies."""
    if n_bytes >= whole.n_bytes:
        return whole
    return ArrayTraffic(vmem_bytes=n_bytes) if whole.vmem_bytes else ArrayTraffic(hbm_bytes=n_bytes)


def flops(flow: Dataflow, computation: Computation, instruction: Instruction) -> int:
    """Two for each multiplication of the products in an instruction and in the fusions that it calls."""
    if instruction.opcode == "fusion":
        inside = flow.fused(instruction)
        return sum(_product_flops(c, i) for c, i in flow.inner(inside))
    return _product_flops(computation, instruction)


def _product_flops(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode not in {"dot", "convolution"}:
        return 0
    sides = computation.producers(instruction)
    if len(sides) != 2 or not sides[0].arrays or not instruction.arrays:
        return 0
    left, right = (side.arrays[0].dims for side in sides)
    result = prod(instruction.arrays[0].dims)
    if match := _CONTRACTING.search(instruction.attributes):
        return 2 * result * prod(_at(left, (int(d) for d in match[1].split(",") if d)))
    if match := _DIM_LABELS.search(instruction.attributes):
        # A window that pads or dilates holds a batch as a spatial dim: one position of it counts.
        kernel, is_batch = match[2], "pad=" in instruction.attributes
        counted = [
            size
            for label, size in zip(kernel, right, strict=True)
            if label == "i" or (label != "o" and not is_batch)
        ]
        return 2 * result * prod(counted)
    return 0


def _at(dims: tuple[int, ...], which: Iterable[int]) -> list[int]:
    return [dims[d] for d in which if d < len(dims)]
