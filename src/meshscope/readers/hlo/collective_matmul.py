"""Collective matmuls: an all-gather or reduce-scatter implemented as a ring of permutes.

Around a large dot, XLA's SPMD partitioner sends shards (or partial sums) around a ring while it
multiplies: a windowed einsum. The ring is a loop named `windowed_dot_general_body_ag` or `_rs`,
often bidirectional, with one more permute before or after the loop; small rings are unrolled
(xla/service/spmd/dot_handler.cc). This module replaces the permutes of each ring by the one
collective that they implement.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.readers.hlo.attribution import same_name
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallContext, CallSite
from meshscope.readers.hlo.groups import connected_groups
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.units import format_shape

ALGORITHM = "windowed einsum"
_MAX_VISITED = 500  # instructions between two permutes of one ring
_FORWARDED = frozenset(
    {"parameter", "get-tuple-element", "collective-permute", "collective-permute-done"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RingKey:
    """The properties that all permutes of a ring share."""

    callers: tuple[str, ...]  # names of the callers around the collective matmul
    op_name: str | None
    stack_frame_id: int
    payload: tuple[str | None, tuple[int, ...] | None]
    ring: Groups


def merge_collective_matmuls(flow: Dataflow, operations: list[Operation]) -> list[Operation]:
    """Replaces the permutes of each ring by one collective, at the position of the first permute."""
    candidates: dict[_RingKey, list[Operation]] = {}
    for operation in operations:
        is_ring = operation.kind is Kind.PERMUTE and operation.groups
        if is_ring and operation.inserted_by != "program":
            candidates.setdefault(_ring_key(operation), []).append(operation)
    merged: dict[int, Operation] = {}
    hidden: set[int] = set()
    for key, permutes in candidates.items():
        for ring in _rings(flow, permutes):
            if (collective := _collective(flow, key, ring)) is not None:
                merged[id(ring[0])] = collective
                hidden |= {id(permute) for permute in ring}
    return [
        merged.get(id(operation), operation)
        for operation in operations
        if id(operation) in merged or id(operation) not in hidden
    ]


def _ring_key(operation: Operation) -> _RingKey:
    callers = operation.site.context.callers[: _depth(operation)]
    return _RingKey(
        callers=tuple(caller.instruction.name for caller in callers),
        op_name=operation.op_name,
        stack_frame_id=operation.site.instruction.stack_frame_id,
        payload=(operation.dtype, operation.shape),
        ring=connected_groups(operation.groups),
    )


def _depth(operation: Operation) -> int:
    """The number of callers around the collective matmul, without its own loops and branches."""
    callers = operation.site.context.callers
    depth = len(callers)
    while depth and _is_part_of_matmul(callers[depth - 1].instruction, operation):
        depth -= 1
    return depth


def _is_part_of_matmul(caller: Instruction, operation: Operation) -> bool:
    is_named = any("windowed_dot_general" in n for names in caller.called.values() for n in names)
    return caller.opcode in {"while", "conditional"} and (
        is_named or same_name(caller.op_name, operation.site.instruction.op_name)
    )


def _loop(operation: Operation) -> CallSite | None:
    """The loop of the collective matmul around a permute; None if the permute is outside it."""
    callers = operation.site.context.callers[_depth(operation) :]
    return callers[0] if callers else None


def _rings(flow: Dataflow, permutes: list[Operation]) -> list[list[Operation]]:
    """The permutes of one key, split into rings by their loops and dataflow."""
    rings: list[list[Operation]] = []
    for permute in permutes:
        joined = [ring for ring in rings if any(_share_ring(flow, permute, p) for p in ring)]
        merged = [member for ring in joined for member in ring]
        rings = [ring for ring in rings if ring not in joined]
        rings.append([*merged, permute])
    position = {id(permute): number for number, permute in enumerate(permutes)}
    return [sorted(ring, key=lambda permute: position[id(permute)]) for ring in rings]


def _share_ring(flow: Dataflow, one: Operation, other: Operation) -> bool:
    """Whether two permutes of one key belong to the same ring."""
    loops = (_loop(one), _loop(other))
    if loops[0] and loops[1]:
        return loops[0].instruction is loops[1].instruction
    if not loops[0] and not loops[1] and _source(flow, one) is _source(flow, other):
        return True  # both directions start from the same shard
    ends = [
        loop.instruction if loop else o.scheduled_op.instruction
        for loop, o in zip(loops, (one, other), strict=True)
    ]
    context = one.site.context if not loops[0] else loops[0].context
    return _reaches(flow, context, ends[0], ends[1], one.op_name) or _reaches(
        flow, context, ends[1], ends[0], one.op_name
    )


def _source(flow: Dataflow, permute: Operation) -> Instruction | None:
    """The instruction that computes the sent data, or forwards it from the last iteration."""
    context = permute.site.context
    operand = context.computation.producer(permute.site.instruction)
    if operand is None:
        return None
    source = flow.skip_moves(context, operand)
    if source.opcode == "get-tuple-element":
        whole = context.computation.producer(source)
        return whole if whole is not None and whole.opcode == "fusion" else source
    return source


def _reaches(
    flow: Dataflow, context: CallContext, start: Instruction, end: Instruction, op_name: str | None
) -> bool:
    """Whether `end` uses `start` only through instructions with this op_name or none."""
    stack, seen = [start], {start.name}
    while stack and len(seen) < _MAX_VISITED:
        for user in flow.users(context.computation, stack.pop()):
            if user is end:
                return True
            is_inside = user.op_name is None or same_name(user.op_name, op_name)
            if is_inside and user.name not in seen:
                seen.add(user.name)
                stack.append(user)
    return False


def _collective(flow: Dataflow, key: _RingKey, ring: list[Operation]) -> Operation | None:
    """The collective that a ring implements; None if the permutes are not a full ring."""
    first, group_size = ring[0], len(key.ring[0])
    n_runs = _full_ring_runs(key, ring)
    if n_runs is None:
        return None
    kind = Kind.REDUCE_SCATTER if any(_sends_sums(flow, p) for p in ring) else Kind.ALL_GATHER
    loop = next(filter(None, map(_loop, ring)), None)
    sent_bytes = sum((p.count * (p.wire_bytes or 0) for p in ring), Fraction(0))
    scheduled_op = first.scheduled_op
    return replace(
        first,
        scheduled_op=replace(scheduled_op, instruction=loop.instruction) if loop else scheduled_op,
        kind=kind,
        groups=key.ring,
        group_size=group_size,
        is_pairs=False,
        shape=_whole_shape(flow, ring, kind, group_size),
        payload_bytes=None if first.payload_bytes is None else first.payload_bytes * group_size,
        wire_bytes=None if first.payload_bytes is None else sent_bytes / n_runs,
        hlo_shape=f"{first.dtype}{format_shape(first.shape)}",
        is_async=any(permute.is_async for permute in ring),
        algorithm=ALGORITHM,
        inserted_by="partitioner",
        count=n_runs,
        caveats=loop.caveats if loop else first.caveats,
        source_ops=source_ops_of(ring),
    )


def _full_ring_runs(key: _RingKey, ring: list[Operation]) -> int | None:
    """How often the ring runs; None if its permutes do not make a full ring.

    A ring of n devices sends n-1 times; in a loop or in both directions up to two times more.
    """
    group_size = len(key.ring[0])
    n_runs = min(_runs(permute) for permute in ring)
    if not n_runs:
        return None
    n_sends, rest = divmod(sum(permute.count for permute in ring), n_runs)
    has_equal_groups = len({len(group) for group in key.ring}) == 1
    if rest or not group_size - 1 <= n_sends <= group_size + 1 or not has_equal_groups:
        return None
    is_in_loop = any(_loop(permute) for permute in ring)
    return n_runs if n_sends > 1 or is_in_loop or is_product(ring[0].op_name) else None


def _whole_shape(
    flow: Dataflow, ring: list[Operation], kind: Kind, group_size: int
) -> tuple[int, ...] | None:
    """The array that the ring gathers or scatters; None if the text does not show along which dim.

    Each step slices the other operand, or updates a slice of the result. That slice is as long as
    the shard along the gathered or scattered dim, and one `group_size`-th of the whole. The shards
    of a gather have a unit dim in front of that dim.
    """
    shard = ring[0].shape
    lengths = {
        length
        for computation, instruction in _steps(flow, ring)
        if (length := _sliced_length(computation, instruction, group_size)) is not None
    }
    dims = [dim for dim, size in enumerate(shard or ()) if size in lengths]
    if shard is None or len(dims) != 1:
        return None
    (dim,) = dims
    has_unit_dim = kind is Kind.ALL_GATHER and dim > 0 and shard[dim - 1] == 1
    return (*shard[: dim - has_unit_dim], shard[dim] * group_size, *shard[dim + 1 :])


def _steps(flow: Dataflow, ring: list[Operation]) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions of the collective matmul: in its loop, or with its op_name."""
    for computation in {permute.site.context.computation for permute in ring}:
        is_loop = any(_loop(p) and p.site.context.computation is computation for p in ring)
        for instruction in computation.instructions:
            if not is_loop and not same_name(instruction.op_name, ring[0].op_name):
                continue
            yield computation, instruction
            if instruction.opcode == "fusion":
                yield from flow.inner(flow.fused(instruction))


def _sliced_length(
    computation: Computation, instruction: Instruction, group_size: int
) -> int | None:
    """The length of a slice that takes one `group_size`-th of one dim; None for other instructions."""
    inputs = computation.producers(instruction)
    match instruction.opcode:
        case "dynamic-slice" if inputs:
            part, whole = instruction, inputs[0]
        case "dynamic-update-slice" if len(inputs) > 1:
            part, whole = inputs[1], instruction
        case _:
            return None
    sizes = [array.dims for i in (part, whole) for array in i.arrays]
    if len(sizes) != 2 or len(sizes[0]) != len(sizes[1]):
        return None
    changed = [(a, b) for a, b in zip(*sizes, strict=True) if a != b]
    is_equal_part = len(changed) == 1 and changed[0][0] * group_size == changed[0][1]
    return changed[0][0] if is_equal_part and changed[0][0] > 1 else None


def _runs(permute: Operation) -> int:
    """How often the collective matmul around a permute runs."""
    loop = _loop(permute)
    return loop.count if loop else permute.count


def is_product(op_name: str | None) -> bool:
    """Whether this is the name of a matrix product, which the partitioner gives to what it inserts for one."""
    return op_name is not None and op_name.rsplit("/", 1)[-1].startswith(
        ("dot_general", "aten__mm")
    )


def _sends_sums(flow: Dataflow, permute: Operation) -> bool:
    """Whether the sent data is a partial sum of the matmul, not a forwarded shard."""
    source = _source(flow, permute)
    if source is None or source.opcode in _FORWARDED:
        return False
    return _loop(permute) is not None or same_name(source.op_name, permute.op_name)
