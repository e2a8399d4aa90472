"""Bytes that an HLO instruction or a kernel reads and writes in HBM and VMEM, and its FLOPs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from meshscope.cost.rates import NO_TRAFFIC, ArrayTraffic
from meshscope.events.step_time import TimeBasis
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction
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
# `lhs_contracting_dims={1}`, or `"lhs_contracting_dimensions":["1"]` in the configuration of a cuBLAS call.
_CONTRACTING = re.compile(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)[\]}]")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_BATCH_WINDOW = re.compile(r"window=\{[^}]*(?:pad|lhs_dilate|rhs_dilate)=")
# Result and operand that share a buffer: `{1}: (10, {})`, or `{}: (0, {})` for a single result.
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")


def traffic(flow: Dataflow, computation: Computation, instruction: Instruction) -> ArrayTraffic:
    """Bytes that an instruction reads and writes, each array once.

    A sliced or gathered operand counts with the part that is read, an array updated in place with the
    part that is written. Kernels that read an operand twice are undercounted. A cuBLAS product does not
    count its workspace, the last result.
    """
    reads = [_read(flow, computation, instruction, i) for i in range(len(instruction.operands))]
    if is_library_product(instruction):
        written = ArrayTraffic(hbm_bytes=instruction.arrays[0].n_bytes or 0)
    else:
        written = _written(flow, computation, instruction)
    return sum(reads, start=replace(written, hbm_written_bytes=written.hbm_bytes))


def array_traffic(shape_text: str) -> ArrayTraffic:
    """Bytes of the arrays in a shape's text."""
    return _sum(traffic_of_arrays(shape_text))


def _sum(arrays: Iterable[ArrayTraffic]) -> ArrayTraffic:
    return sum(arrays, start=NO_TRAFFIC)


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
    operand = computation.producer(instruction, at)
    if operand is None:
        return NO_TRAFFIC
    whole = array_traffic(operand.shape_text)
    n_bytes: int | None = None
    if instruction.opcode == "fusion":
        fused = flow.fused(instruction)
        n_bytes = _read_by_users(flow, fused, fused.parameters.get(at), 0)
    elif instruction.opcode in _SLICING and at == 0:
        n_bytes = array_traffic(instruction.shape_text).n_bytes
    elif instruction.opcode in _UPDATES and at == 0:
        n_bytes = 0
    return whole if n_bytes is None else _capped(whole, n_bytes)


def _written(flow: Dataflow, computation: Computation, instruction: Instruction) -> ArrayTraffic:
    if instruction.opcode == "fusion" and _has_collective(fused := flow.fused(instruction)):
        # Results that a fusion around a collective computes itself, without the collective's arrays.
        results = fused.producers(fused.root) if fused.root.opcode == "tuple" else [fused.root]
        outside = {*KIND_OF_OPCODE, "parameter"}
        return _sum(array_traffic(r.shape_text) for r in results if r.opcode not in outside)
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
        return _sum(_written_by(flow, computation, e, [r], _MAX_NESTING) for e, r in pairs)
    whole = _sum(results)
    updated, update = (computation.producer(root, at) for at in (0, _UPDATES.get(root.opcode, 0)))
    if root.opcode not in _UPDATES or update is None or updated is None:
        return whole
    is_new = updated.opcode in _NEW_ARRAYS
    return whole if is_new else _capped(whole, array_traffic(update.shape_text).n_bytes)


def _has_collective(fused: Computation) -> bool:
    return any(inner.opcode in KIND_OF_OPCODE for inner in fused.instructions)


def _read_by_users(
    flow: Dataflow, fused: Computation, array: Instruction | None, depth: int
) -> int | None:
    """Bytes that a fusion reads of an array that it slices; None if it reads the whole array."""
    if array is None or not (users := flow.users(fused, array)):
        return None
    reads = [_read_by(flow, fused, user, array.name, depth) for user in users]
    return None if None in reads else sum(n or 0 for n in reads)


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
        inner = flow.fused(user)
        return _read_by_users(flow, inner, inner.parameters.get(at), depth + 1)
    return None


def _capped(whole: ArrayTraffic, n_bytes: int) -> ArrayTraffic:
    """At most `n_bytes`, in the memory of the whole array."""
    if n_bytes >= whole.n_bytes:
        return whole
    return ArrayTraffic(vmem_bytes=n_bytes) if whole.vmem_bytes else ArrayTraffic(hbm_bytes=n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Sizes of a matrix product: the result, the contracted dimensions, and dimensions of one operand only."""

    result: int
    contracted: int
    free: tuple[int, int]

    @property
    def flops(self) -> int:
        """Two for each multiplication."""
        return 2 * self.result * self.contracted

    def padding_flops(self, mxu_dim: int) -> float:
        """FLOPs that fill matrix units of `mxu_dim` x `mxu_dim`.

        A unit holds one operand in tiles and streams the rows of the other: the contracted dimension is padded,
        and the smaller padding of the two others is taken.
        """
        if not self.flops:
            return 0.0
        contracted, *free = (-(-n // mxu_dim) * mxu_dim / n for n in (self.contracted, *self.free))
        return self.flops * (contracted * min(free) - 1)


def products(flow: Dataflow, computation: Computation, instruction: Instruction) -> list[Product]:
    """The matrix products in an instruction and its fusions."""
    inner = [(computation, instruction)]
    if instruction.opcode == "fusion":
        inner = list(flow.inner(flow.fused(instruction)))
    return [product for one in inner if (product := _product(*one)) is not None]


def is_library_product(instruction: Instruction) -> bool:
    """Whether the instruction is a product that XLA for GPUs leaves to cuBLAS."""
    return (instruction.custom_call_target or "").startswith("__cublas$")


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


def _product(computation: Computation, instruction: Instruction) -> Product | None:
    is_library = is_library_product(instruction)
    if instruction.opcode not in {"dot", "convolution"} and not is_library:
        return None
    sides = computation.producers(instruction)
    if is_library:
        sides = sides[:2]  # before scales and biases
    if len(sides) != 2 or not all(side.arrays for side in sides) or not instruction.arrays:
        return None
    left, right = (side.arrays[0].dims for side in sides)
    result = prod(instruction.arrays[0].dims)
    if match := _CONTRACTING.search(instruction.attributes):
        dims = [int(d) for d in re.findall(r"\d+", match[1])]
        contracted = prod(left[d] for d in dims if d < len(left))
        n_left, n_right = prod(left) // contracted, prod(right) // contracted
        n_batches = max(1, n_left * n_right // max(1, result))
        free = (max(1, n_left // n_batches), max(1, n_right // n_batches))
        return Product(result=result, contracted=contracted, free=free)
    if match := _DIM_LABELS.search(instruction.attributes):
        # A padded or dilated window holds a batch as a spatial dim; only one position counts.
        labels = list(zip(match[2], right, strict=True))
        is_batch = _BATCH_WINDOW.search(instruction.attributes) is not None
        contracted = prod(
            size for label, size in labels if label == "i" or (label != "o" and not is_batch)
        )
        n_out = prod(size for label, size in labels if label == "o")
        return Product(result=result, contracted=contracted, free=(result // n_out, n_out))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """FLOPs, traffic, and cycles of loop bodies (None: at a fraction of the peak FLOPs of `operand_dtype`).

    The basis is the algorithm, the cost that the author states, or, by roofline, the bytes of the operands.
    `conversion_cycles` are cycles of a loop that converts weights while products and transfers run.
    """

    moved: ArrayTraffic
    basis: TimeBasis = TimeBasis.KERNEL_MODEL
    flops: float = 0.0
    cycles: float | None = None
    conversion_cycles: float = 0.0
    operand_dtype: str = "bf16"
    note: str | None = None


def operand_arrays(computation: Computation, instruction: Instruction) -> list[ArrayShape]:
    """The array of each operand that is not a tuple."""
    operands = computation.producers(instruction)
    return [operand.arrays[0] for operand in operands if len(operand.arrays) == 1]


def touched_traffic(computation: Computation, instruction: Instruction) -> ArrayTraffic:
    """Bytes of a kernel without a model: its arrays, with an in-place buffer counted at most as the others.

    What a kernel writes into a buffer comes from its other operands, and what it reads of a cache grows
    with the queries, whatever the size of the buffer.
    """
    aliases = _ALIASES.search(instruction.attributes)
    pairs = _ALIAS.findall("" if aliases is None else f"{aliases[1]}}}")
    shared = [(int(result or 0), int(operand)) for result, operand in pairs]
    results = traffic_of_arrays(instruction.shape_text)
    operands = [array_traffic(o.shape_text) for o in computation.producers(instruction)]
    written = _sum(r for at, r in enumerate(results) if at not in {pair[0] for pair in shared})
    read = _sum(o for at, o in enumerate(operands) if at not in {pair[1] for pair in shared})
    total = read + replace(written, hbm_written_bytes=written.hbm_bytes)
    limit = (read + written).n_bytes
    return total + _sum(_capped(results[at], limit) for at, _ in shared if at < len(results))
