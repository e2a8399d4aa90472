"""Bytes that an HLO instruction reads and writes in HBM and VMEM, and its FLOPs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from meshscope.cost.traffic import NO_TRAFFIC, ArrayTraffic
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE
from meshscope.units import DTYPE_BITS, array_bytes

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_IN_VMEM = re.compile(r"S\([1-9]\d*\)")
# These ops read only the part of their first operand that their result contains.
_SLICING = frozenset({"gather", "dynamic-slice", "slice"})
# These ops read only what their consumers read.
_LAYOUT_ONLY = frozenset({"copy", "bitcast"})
# These ops write only their update, operand number 1 or 2, into their first operand.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# An update of these arrays writes all of the result.
_NEW_ARRAYS = frozenset({"broadcast", "constant", "iota"})
_MAX_NESTING = 8
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_BATCH_WINDOW = re.compile(r"window=\{[^}]*(?:pad|lhs_dilate|rhs_dilate)=")


def traffic(flow: Dataflow, computation: Computation, instruction: Instruction) -> ArrayTraffic:
    """Bytes that an instruction reads and writes, each array once.

    A sliced or gathered operand counts with the part that is read, an array updated in place with the
    part that is written. Kernels that read an operand twice are undercounted.
    """
    reads = [_read(flow, computation, instruction, i) for i in range(len(instruction.operands))]
    written = _written(flow, computation, instruction)
    return sum(reads, start=replace(written, hbm_written_bytes=written.hbm_bytes))


def array_traffic(shape_text: str) -> ArrayTraffic:
    """Bytes of the arrays in a shape's text."""
    return sum(traffic_of_arrays(shape_text), start=NO_TRAFFIC)


def traffic_of_arrays(shape_text: str) -> list[ArrayTraffic]:
    """Bytes of each array in a shape's text; memory space 0 is HBM, the others are VMEM."""
    arrays: list[ArrayTraffic] = []
    for dtype, dims, layout in _ARRAY.findall(shape_text):
        if dtype in DTYPE_BITS:
            n = array_bytes(dtype, tuple(int(d) for d in re.findall(r"\d+", dims)))
            is_in_vmem = _IN_VMEM.search(layout) is not None
            arrays.append(ArrayTraffic(vmem_bytes=n) if is_in_vmem else ArrayTraffic(hbm_bytes=n))
    return arrays


def _read(
    flow: Dataflow, computation: Computation, instruction: Instruction, at: int
) -> ArrayTraffic:
    """Bytes read of operand number `at`."""
    operand = computation.producer(instruction, at)
    if operand is None:
        return ArrayTraffic()
    whole = array_traffic(operand.shape_text)
    if instruction.opcode == "fusion":
        n_bytes = _read_by_fusion(flow, flow.fused(instruction), at, 0)
        return whole if n_bytes is None else _capped(whole, n_bytes)
    if instruction.opcode in _SLICING and at == 0:
        return _capped(whole, array_traffic(instruction.shape_text).n_bytes)
    if instruction.opcode in _UPDATES and at == 0:
        return ArrayTraffic()
    return whole


def _written(flow: Dataflow, computation: Computation, instruction: Instruction) -> ArrayTraffic:
    if instruction.opcode == "fusion" and _has_collective(flow.fused(instruction)):
        return _computed_results(flow.fused(instruction))
    return _written_by(flow, computation, instruction, traffic_of_arrays(instruction.shape_text))


def _written_by(
    flow: Dataflow,
    computation: Computation,
    root: Instruction,
    results: list[ArrayTraffic],
    depth: int = 0,
) -> ArrayTraffic:
    """Bytes that an instruction writes; an array updated in place counts with its update."""
    if root.opcode == "fusion" and depth < _MAX_NESTING:
        inner = flow.fused(root)
        return _written_by(flow, inner, inner.root, results, depth + 1)
    elements = computation.producers(root) if root.opcode == "tuple" and depth else []
    if len(elements) == len(results) > 0:
        pairs = zip(elements, results, strict=True)
        parts = (_written_by(flow, computation, e, [r], _MAX_NESTING) for e, r in pairs)
        return sum(parts, start=NO_TRAFFIC)
    whole = sum(results, start=NO_TRAFFIC)
    updated, update = (computation.producer(root, at) for at in (0, _UPDATES.get(root.opcode, 0)))
    if root.opcode not in _UPDATES or update is None or updated is None:
        return whole
    is_new = updated.opcode in _NEW_ARRAYS
    return whole if is_new else _capped(whole, array_traffic(update.shape_text).n_bytes)


def _has_collective(fused: Computation) -> bool:
    return any(inner.opcode in KIND_OF_OPCODE for inner in fused.instructions)


def _computed_results(fused: Computation) -> ArrayTraffic:
    """Results that a fusion around a collective computes itself, without the collective's arrays."""
    results = fused.producers(fused.root) if fused.root.opcode == "tuple" else [fused.root]
    computed = [r for r in results if r.opcode not in KIND_OF_OPCODE and r.opcode != "parameter"]
    return sum((array_traffic(result.shape_text) for result in computed), start=ArrayTraffic())


def _read_by_fusion(flow: Dataflow, fused: Computation, at: int, depth: int) -> int | None:
    """Bytes that a fusion reads of one operand that it slices; None if it reads the whole operand."""
    parameter = fused.parameters.get(at)
    return None if parameter is None else _read_by_users(flow, fused, parameter, depth)


def _read_by_users(
    flow: Dataflow, fused: Computation, array: Instruction, depth: int
) -> int | None:
    users = flow.users(fused, array)
    total = 0
    for user in users:
        n_bytes = _read_by(flow, fused, user, array.name, depth)
        if n_bytes is None:
            return None
        total += n_bytes
    return total if users else None


def _read_by(
    flow: Dataflow, fused: Computation, user: Instruction, name: str, depth: int
) -> int | None:
    at = user.operands.index(name)
    if user.opcode in _SLICING and at == 0:
        return array_traffic(user.shape_text).n_bytes
    is_updated = user.opcode in _UPDATES and at == 0
    is_passed_through = user.opcode == "tuple" and user.is_root and _has_collective(fused)
    if is_updated or is_passed_through or user.opcode in KIND_OF_OPCODE:
        return 0  # the ICI DMA reads a collective's operand
    if flow.consists_of(user, _LAYOUT_ONLY) and not user.is_root:
        return _read_by_users(flow, fused, user, depth)
    if user.opcode == "fusion" and depth < _MAX_NESTING:
        return _read_by_fusion(flow, flow.fused(user), at, depth + 1)
    return None


def _capped(whole: ArrayTraffic, n_bytes: int) -> ArrayTraffic:
    """At most `n_bytes`, in the memory of the whole array."""
    if n_bytes >= whole.n_bytes:
        return whole
    return ArrayTraffic(vmem_bytes=n_bytes) if whole.vmem_bytes else ArrayTraffic(hbm_bytes=n_bytes)


def flops(flow: Dataflow, computation: Computation, instruction: Instruction) -> int:
    """FLOPs of the matrix products in an instruction and its fusions, two per multiplication."""
    if instruction.opcode == "fusion":
        return sum(_product_flops(c, i) for c, i in flow.inner(flow.fused(instruction)))
    return _product_flops(computation, instruction)


def vector_products(flow: Dataflow, instruction: Instruction) -> int:
    """Multiplications of the products in a fusion that the compiler leaves to the vector units; 0 without.

    It writes a product of one row as a sum over the rows of the matrix, and keeps its name. Sums with
    several dims of outputs do not count: they take a register for each row of the matrix.
    """
    if instruction.opcode != "fusion":
        return 0
    sums = [
        (computation.producer(inner), inner.arrays[0])
        for computation, inner in flow.inner(flow.fused(instruction))
        if inner.opcode == "reduce" and (inner.op_name or "").endswith("/dot_general")
    ]
    if any(len(result.dims) != 1 for _, result in sums):
        return 0
    return sum(prod(terms.arrays[0].dims) for terms, _ in sums if terms is not None)


def padding_flops(
    flow: Dataflow, computation: Computation, instruction: Instruction, mxu_dim: int
) -> float:
    """FLOPs that the products of an instruction add to fill matrix units of `mxu_dim` x `mxu_dim`.

    A unit holds one operand in tiles and streams the rows of the other: the contracted dimension is padded,
    and the smaller padding of the two others is taken.
    """
    products = [(computation, instruction)]
    if instruction.opcode == "fusion":
        products = list(flow.inner(flow.fused(instruction)))
    return sum(
        n * (_padding(p.contracted, mxu_dim) * min(_padding(s, mxu_dim) for s in p.free) - 1)
        for p, n in ((_product(c, i), _product_flops(c, i)) for c, i in products)
        if p is not None and n
    )


def _padding(size: int, multiple: int) -> float:
    return -(-size // multiple) * multiple / size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Sizes of a matrix product: the result, the contracted dimensions, and those of one operand only."""

    result: int
    contracted: int
    free: tuple[int, int]


def _product_flops(computation: Computation, instruction: Instruction) -> int:
    product = _product(computation, instruction)
    return 0 if product is None else 2 * product.result * product.contracted


def _product(computation: Computation, instruction: Instruction) -> _Product | None:
    if instruction.opcode not in {"dot", "convolution"}:
        return None
    sides = computation.producers(instruction)
    if len(sides) != 2 or not sides[0].arrays or not instruction.arrays:
        return None
    left, right = (side.arrays[0].dims for side in sides)
    result = prod(instruction.arrays[0].dims)
    if match := _CONTRACTING.search(instruction.attributes):
        contracted = prod(_sizes(left, (int(d) for d in match[1].split(",") if d)))
        return _free(result, prod(left) // contracted, prod(right) // contracted, contracted)
    if match := _DIM_LABELS.search(instruction.attributes):
        # A padded or dilated window holds a batch as a spatial dim, of which one position counts.
        kernel, is_batch = match[2], _BATCH_WINDOW.search(instruction.attributes) is not None
        counted = [
            size
            for label, size in zip(kernel, right, strict=True)
            if label == "i" or (label != "o" and not is_batch)
        ]
        contracted = prod(counted)
        n_out = prod(s for label, s in zip(kernel, right, strict=True) if label == "o")
        return _Product(result=result, contracted=contracted, free=(result // n_out, n_out))
    return None


def _free(result: int, left: int, right: int, contracted: int) -> _Product:
    """The product of operands with `left` and `right` times the contracted elements, batched or not."""
    n_batches = max(1, left * right // max(1, result))
    free = (max(1, left // n_batches), max(1, right // n_batches))
    return _Product(result=result, contracted=contracted, free=free)


def _sizes(dims: tuple[int, ...], which: Iterable[int]) -> list[int]:
    return [dims[d] for d in which if d < len(dims)]
