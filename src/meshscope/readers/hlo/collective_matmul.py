"""Windowed einsums: an all-gather or reduce-scatter that the partitioner spread over a ring of permutes.

Around a large dot the SPMD partitioner sends shards (or partial sums) around a ring while it
multiplies, in a loop named `windowed_dot_general_body_ag` or `_rs`, often in both directions,
with one more permute in front of the loop or behind it; small rings come unrolled
(xla/service/spmd/dot_handler.cc). Such a ring is told as the one collective that it carries out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from meshscope.events.enums import Kind
from meshscope.readers.hlo.attribution import same_name
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallContext, CallSite
from meshscope.readers.hlo.groups import connected_groups
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.spec.plan.mesh import Groups
from meshscope.units import format_shape

ALGORITHM = "windowed einsum"
_MAX_VISITED = 500  # instructions between two permutes of one ring
_HANDED_ON = frozenset(
    {"parameter", "get-tuple-element", "collective-permute", "collective-permute-done"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """What the permutes of one einsum share."""

    home: tuple[str, ...]  # the callers around the einsum, by name
    op_name: str | None
    stack_frame_id: int
    payload: tuple[str | None, tuple[int, ...] | None]
    ring: Groups


def merge_collective_matmuls(flow: Dataflow, operations: list[Operation]) -> list[Operation]:
    """The operations with each windowed einsum's permutes replaced by what they carry out, at the first."""
    rings: dict[_Key, list[Operation]] = {}
    for operation in operations:
        is_ring = operation.kind is Kind.PERMUTE and operation.groups
        if is_ring and operation.inserted_by != "program":
            rings.setdefault(_key(operation), []).append(operation)
    told: dict[int, Operation] = {}
    hidden: set[int] = set()
    for key, permutes in rings.items():
        for members in _einsums(flow, permutes):
            if (einsum := _einsum(flow, key, members)) is not None:
                told[id(members[0])] = einsum
                hidden |= {id(member) for member in members}
    return [
        told.get(id(operation), operation)
        for operation in operations
        if id(operation) in told or id(operation) not in hidden
    ]


def _key(operation: Operation) -> _Key:
    callers = operation.site.context.callers[: _depth(operation)]
    return _Key(
        home=tuple(caller.instruction.name for caller in callers),
        op_name=operation.op_name,
        stack_frame_id=operation.site.instruction.stack_frame_id,
        payload=(operation.dtype, operation.shape),
        ring=connected_groups(operation.groups),
    )


def _depth(operation: Operation) -> int:
    """How many callers stand around the einsum, without its own loops and conditionals."""
    callers = operation.site.context.callers
    depth = len(callers)
    while depth and _is_part_of_einsum(callers[depth - 1].instruction, operation):
        depth -= 1
    return depth


def _is_part_of_einsum(caller: Instruction, operation: Operation) -> bool:
    is_named = any("windowed_dot_general" in n for names in caller.called.values() for n in names)
    return caller.opcode in {"while", "conditional"} and (
        is_named or same_name(caller.op_name, operation.site.instruction.op_name)
    )


def _loop(operation: Operation) -> CallSite | None:
    """The loop of the einsum that the permute stands in."""
    callers = operation.site.context.callers[_depth(operation) :]
    return callers[0] if callers else None


def _einsums(flow: Dataflow, permutes: list[Operation]) -> list[list[Operation]]:
    """Permutes of one key, apart by einsum: by loop, and by what feeds what."""
    joined: list[list[Operation]] = []
    for permute in permutes:
        near = [group for group in joined if any(_belong(flow, permute, m) for m in group)]
        merged = [member for group in near for member in group]
        joined = [group for group in joined if group not in near]
        joined.append([*merged, permute])
    order = {id(permute): number for number, permute in enumerate(permutes)}
    return [sorted(group, key=lambda member: order[id(member)]) for group in joined]


def _belong(flow: Dataflow, one: Operation, other: Operation) -> bool:
    """Whether two permutes of one key belong to one einsum."""
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
    """What computes the data that is sent, or hands it over from the last iteration."""
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
    """Whether `end` uses `start` through instructions of the einsum, which share its op_name or have none."""
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


def _einsum(flow: Dataflow, key: _Key, members: list[Operation]) -> Operation | None:
    """The collective that the ring carries out; None when the permutes are no full ring."""
    first = members[0]
    n = len(key.ring[0])
    times = min(_times(member) for member in members)
    if not times:
        return None
    n_sends, rest = divmod(sum(member.count for member in members), times)
    # A ring of n sends n-1 times; in a loop or in both directions up to two sends more.
    if rest or not n - 1 <= n_sends <= n + 1 or len({len(group) for group in key.ring}) != 1:
        return None
    if n_sends == 1 and not any(_loop(m) for m in members) and not _is_dot(first.op_name):
        return None
    kind = Kind.REDUCE_SCATTER if any(_sends_sums(flow, m) for m in members) else Kind.ALL_GATHER
    loop = next(filter(None, map(_loop, members)), None)
    sent = sum((m.count * (m.wire_bytes or 0) for m in members), Fraction(0))
    scheduled_op = (
        replace(first.scheduled_op, instruction=loop.instruction) if loop else first.scheduled_op
    )
    return replace(
        first,
        scheduled_op=scheduled_op,
        kind=kind,
        groups=key.ring,
        group_size=n,
        is_pairs=False,
        shape=_whole_shape(flow, members, kind, n),
        payload_bytes=None if first.payload_bytes is None else first.payload_bytes * n,
        wire_bytes=None if first.payload_bytes is None else sent / times,
        hlo_shape=f"{first.dtype}{format_shape(first.shape)}",
        is_async=any(m.is_async for m in members),
        algorithm=ALGORITHM,
        inserted_by="partitioner",
        count=times,
        caveats=loop.caveats if loop else first.caveats,
        source_ops=source_ops_of(members),
    )


def _whole_shape(
    flow: Dataflow, members: list[Operation], kind: Kind, n: int
) -> tuple[int, ...] | None:
    """The array that the ring gathers or scatters; None when the text does not tell along which dim.

    Each step takes a slice of the other operand, or fills one of the result, and that slice is
    as long as the shard is along the dim in question, and the whole `n` times as long. The
    shards of a gather have a unit dim of their own in front of it.
    """
    shard = members[0].shape
    lengths = {
        length
        for computation, instruction in _steps(flow, members)
        if (length := _sliced_length(computation, instruction, n)) is not None
    }
    dims = [dim for dim, size in enumerate(shard or ()) if size in lengths]
    if shard is None or len(dims) != 1:
        return None
    (dim,) = dims
    is_added = kind is Kind.ALL_GATHER and dim > 0 and shard[dim - 1] == 1
    return (*shard[: dim - is_added], shard[dim] * n, *shard[dim + 1 :])


def _steps(flow: Dataflow, members: list[Operation]) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions of the einsum: those of its loop, or those around its permutes that share its name."""
    for computation in {member.site.context.computation for member in members}:
        for instruction in computation.instructions:
            is_inside = any(_loop(m) and m.site.context.computation is computation for m in members)
            if not is_inside and not same_name(instruction.op_name, members[0].op_name):
                continue
            yield computation, instruction
            if instruction.opcode == "fusion":
                yield from flow.inner(flow.fused(instruction))


def _sliced_length(computation: Computation, instruction: Instruction, n: int) -> int | None:
    """Length of a slice that is one of `n` along a single dim; None for any other instruction."""
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
    is_one_of_n = len(changed) == 1 and changed[0][0] * n == changed[0][1]
    return changed[0][0] if is_one_of_n and changed[0][0] > 1 else None


def _times(operation: Operation) -> int:
    """How often the einsum around a permute runs."""
    loop = _loop(operation)
    return loop.count if loop else operation.count


def _is_dot(op_name: str | None) -> bool:
    return op_name is not None and op_name.rsplit("/", 1)[-1].startswith(
        ("dot_general", "aten__mm")
    )


def _sends_sums(flow: Dataflow, permute: Operation) -> bool:
    """Whether what is sent was computed by the einsum, not merely handed on."""
    source = _source(flow, permute)
    if source is None or source.opcode in _HANDED_ON:
        return False
    return _loop(permute) is not None or same_name(source.op_name, permute.op_name)
