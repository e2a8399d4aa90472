"""Collectives that several instructions implement: windowed einsums, and levels over slices and chips.

Around a large dot, XLA's SPMD partitioner sends shards (or partial sums) around a ring while it
multiplies: a windowed einsum. The ring is a loop named `windowed_dot_general_body_ag` or `_rs`,
often bidirectional, with one more permute before or after the loop; small rings are unrolled
(xla/service/spmd/dot_handler.cc).

libtpu implements a collective over an axis that spans slices hierarchically. An all-reduce becomes a
reduce-scatter within each slice, an all-reduce of the shards across slices, and an all-gather within each
slice. An all-gather or reduce-scatter becomes one within slices and one across.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction

from meshscope.events.collective import WINDOWED_EINSUM, Groups
from meshscope.events.enums import Kind
from meshscope.readers.hlo.attribution import same_name
from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.executions import CallContext, CallSite
from meshscope.readers.hlo.groups import Devices, connected_groups
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.readers.hlo.semantics import operand_of
from meshscope.readers.hlo.shapes import shape_in_program
from meshscope.units import format_shape

_MAX_VISITED = 500  # instructions between two permutes of one ring
_FORWARDED = frozenset(
    {"parameter", "get-tuple-element", "collective-permute", "collective-permute-done"}
)


_RingKey = tuple[tuple[str, ...], str | None, int, str | None, tuple[int, ...] | None, Groups]


def merge_collective_matmuls(flow: Dataflow, operations: list[Operation]) -> list[Operation]:
    """Replaces the permutes of each ring by one collective, at the position of the first permute."""
    candidates: dict[_RingKey, list[Operation]] = defaultdict(list)
    for o in operations:
        if o.kind is Kind.PERMUTE and o.groups and o.inserted_by != "program":
            callers = o.site.context.callers[: _depth(o)]  # around the collective matmul
            names = tuple(c.instruction.name for c in callers)
            frame, groups = o.site.instruction.stack_frame_id, connected_groups(o.groups)
            candidates[names, o.op_name, frame, o.dtype, o.shape, groups].append(o)
    merged: dict[int, Operation | None] = {}
    for (*_, groups), permutes in candidates.items():
        for ring in _rings(flow, permutes):
            if (collective := _collective(flow, groups, ring)) is not None:
                merged |= dict.fromkeys(map(id, ring)) | {id(ring[0]): collective}
    return with_merged(operations, merged)


def with_merged(
    operations: list[Operation], merged: dict[int, Operation | None]
) -> list[Operation]:
    """The operations with the values of `merged`, by their ids, instead; None leaves one out."""
    return [o for o in (merged.get(id(o), o) for o in operations) if o is not None]


def _depth(operation: Operation) -> int:
    """The number of callers around the collective matmul, without its own loops and branches."""
    callers = operation.site.context.callers
    depth = len(callers)
    while depth:
        caller = callers[depth - 1].instruction
        called = (name for names in caller.called.values() for name in names)
        is_its = any("windowed_dot_general" in name for name in called)
        is_its = is_its or same_name(caller.op_name, operation.site.instruction.op_name)
        if caller.opcode not in {"while", "conditional"} or not is_its:
            break
        depth -= 1
    return depth


def _loop(operation: Operation) -> CallSite | None:
    callers = operation.site.context.callers[_depth(operation) :]
    return callers[0] if callers else None


def _rings(flow: Dataflow, permutes: list[Operation]) -> list[list[Operation]]:
    """The permutes of each ring: in one loop, from one shard in both directions, or one after the other."""
    loops = [_loop(permute) for permute in permutes]
    starts = [
        permute.scheduled_op.instruction if loop is None else loop.instruction
        for permute, loop in zip(permutes, loops, strict=True)
    ]
    numbers: dict[int, int] = {}  # the first permute of a loop, or the only one of another start
    pairs = [(n, numbers.setdefault(id(start), n)) for n, start in enumerate(starts)]
    first_from: dict[int, int] = {}
    for n, (permute, loop) in enumerate(zip(permutes, loops, strict=True)):
        if loop is None:
            pairs.append((n, first_from.setdefault(id(_source(flow, permute)), n)))
    for n in numbers.values():
        pairs += [(n, other) for other in _reached(flow, permutes[n], loops[n], starts[n], numbers)]
    return [[permutes[n] for n in ring] for ring in connected_groups(tuple(pairs))]


def _reached(
    flow: Dataflow,
    permute: Operation,
    loop: CallSite | None,
    start: Instruction,
    numbers: dict[int, int],
) -> Iterator[int]:
    """The next permutes that use `start` only through instructions with its op_name or none; loops do not meet."""
    context = permute.site.context if loop is None else loop.context
    stack, seen = [start], {start.name}
    while stack and len(seen) < _MAX_VISITED:
        for user in flow.users(context.computation, stack.pop()):
            number = numbers.get(id(user))
            if number is not None and not (loop and user.opcode == "while"):
                yield number
            elif (user.op_name is None or same_name(user.op_name, permute.op_name)) and (
                user.name not in seen
            ):
                seen.add(user.name)
                stack.append(user)


def _source(flow: Dataflow, permute: Operation) -> Instruction | None:
    """The instruction that computes the sent data, or forwards it from the last iteration."""
    context = permute.site.context
    operand = context.computation.producer(permute.site.instruction)
    source = None if operand is None else flow.skip_moves(context, operand)
    if source is not None and source.opcode == "get-tuple-element":
        whole = context.computation.producer(source)
        return whole if whole is not None and whole.opcode == "fusion" else source
    return source


def _collective(flow: Dataflow, groups: Groups, ring: list[Operation]) -> Operation | None:
    """The collective that a ring implements; None if the permutes are not a full ring.

    A ring of n devices sends n-1 times; in a loop or in both directions up to two times more.
    """
    first, group_size, loops = ring[0], len(groups[0]), [_loop(permute) for permute in ring]
    loop = next(filter(None, loops), None)
    # How often the collective matmul runs.
    n_runs = min(at.count if at else o.count for at, o in zip(loops, ring, strict=True))
    if not n_runs or len({len(group) for group in groups}) > 1:
        return None
    n_sends, rest = divmod(sum(permute.count for permute in ring), n_runs)
    is_one = n_sends > 1 or loop is not None or is_product(first.op_name)
    if rest or not group_size - 1 <= n_sends <= group_size + 1 or not is_one:
        return None
    kind = Kind.ALL_GATHER  # unless a permute sends partial sums
    for permute, at in zip(ring, loops, strict=True):
        source = _source(flow, permute)
        if source is None or source.opcode in _FORWARDED:
            continue
        if at or same_name(source.op_name, permute.op_name):
            kind = Kind.REDUCE_SCATTER
    sent_bytes = sum((p.count * (p.wire_bytes or 0) for p in ring), Fraction(0))
    scheduled_op = first.scheduled_op
    return replace(
        first,
        scheduled_op=replace(scheduled_op, instruction=loop.instruction) if loop else scheduled_op,
        kind=kind,
        groups=groups,
        group_size=group_size,
        is_pairs=False,
        shape=_whole_shape(flow, ring, kind, group_size),
        payload_bytes=None if first.payload_bytes is None else first.payload_bytes * group_size,
        wire_bytes=None if first.payload_bytes is None else sent_bytes / n_runs,
        hlo_shape=f"{first.dtype}{format_shape(first.shape)}",
        is_async=any(permute.is_async for permute in ring),
        algorithm=WINDOWED_EINSUM,
        inserted_by="partitioner",
        count=n_runs,
        caveats=loop.caveats if loop else first.caveats,
        source_ops=source_ops_of(ring),
    )


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
    inputs = (instruction, *computation.producers(instruction))
    ends = {"dynamic-slice": inputs[:2], "dynamic-update-slice": inputs[2:3] + inputs[:1]}
    sizes = [array.dims for i in ends.get(instruction.opcode, ()) for array in i.arrays]
    if len(sizes) != 2 or len(sizes[0]) != len(sizes[1]):
        return None
    changed = [(a, b) for a, b in zip(*sizes, strict=True) if a != b]
    is_equal_part = len(changed) == 1 and changed[0][0] * group_size == changed[0][1]
    return changed[0][0] if is_equal_part and changed[0][0] > 1 else None


def is_product(op_name: str | None) -> bool:
    """Whether this is the name of a matrix product, which the partitioner gives to what it inserts for one."""
    return op_name is not None and op_name.rsplit("/", 1)[-1].startswith(
        ("dot_general", "aten__mm")
    )


SLICES_ALGORITHM = "hierarchical over ICI and DCN"

_LEVELS: dict[tuple[Kind, ...], Kind] = {
    (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_GATHER): Kind.ALL_REDUCE,
    (Kind.ALL_GATHER, Kind.ALL_GATHER): Kind.ALL_GATHER,
    (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER): Kind.REDUCE_SCATTER,
}

_Consumers = dict[int, list[Operation]]  # by id of the instruction whose result they take
# Shards are sliced and padded between levels; a custom call `ZeroCrop` pads, too.
_SLICING = frozenset({"dynamic-slice", "slice", "pad", "constant"} | MOVEMENT)
_MAX_SLICES = 8  # in a row


def merge_slice_levels(
    flow: Dataflow, operations: list[Operation], devices: Devices
) -> list[Operation]:
    """Replaces the levels of each collective by one operation, at the position of the first level."""
    if devices.n_slices == 1:
        return operations
    # The operations that take the result of an instruction, moved, sliced or padded.
    consumers: _Consumers = defaultdict(list)
    for operation in operations:
        operand = operand_of(flow, operation.site, 0)
        for source in _sources(flow, *operand) if operand else ():
            consumers[id(source)].append(operation)
    merged: dict[int, Operation | None] = {}
    for first in operations:
        for kinds, kind in _LEVELS.items():
            levels = _levels(flow, consumers, first, kinds)
            if id(first) in merged or levels is None:
                continue
            # One collective, not several that the program issues in a row.
            groups = [frozenset(map(frozenset, level.groups)) for level in levels]
            axes = [devices.mesh.axis_of_groups(level.groups) for level in levels]
            is_one = None in axes and devices.mesh.axis_of_groups(_joined(levels)) is not None
            if kind is Kind.ALL_REDUCE:
                is_one = groups[0] == groups[2] != groups[1]
            if is_one:
                collective = _merged(flow, kind, levels)
                merged |= dict.fromkeys(map(id, levels)) | {id(first): collective}
    return with_merged(operations, merged)


def _sources(flow: Dataflow, context: CallContext, operand: Instruction) -> list[Instruction]:
    """The source of an operand, then the sources through slices and pads."""
    sources = [flow.skip_moves(context, operand)]
    for source in sources:  # grows during iteration
        is_slice = source.custom_call_target == "ZeroCrop" or flow.consists_of(source, _SLICING)
        if len(sources) < _MAX_SLICES and is_slice:
            producers = context.computation.producers(source)
            sources += [flow.skip_moves(context, i) for i in producers[:1]]
    return sources


def _levels(
    flow: Dataflow, consumers: _Consumers, first: Operation, kinds: tuple[Kind, ...]
) -> list[Operation] | None:
    """`first` and the operations that take its result in turn, if they have these kinds."""
    levels = [first]
    for kind in kinds[1:] if first.kind is kinds[0] else ():
        last = levels[-1]
        if last.scheduled_op.result is None:
            return None
        result = flow.skip_moves(last.scheduled_op.context, last.scheduled_op.result)
        following = [
            consumer
            for consumer in consumers.get(id(result), ())
            if consumer.kind is kind and consumer.count == last.count and consumer is not last
        ]
        if len(following) != 1:
            return None
        levels += following
    return levels if first.kind is kinds[0] else None


def _joined(levels: Iterable[Operation]) -> Groups:
    return connected_groups(
        tuple((group[0], device) for level in levels for group in level.groups for device in group)
    )


def _shape(flow: Dataflow, levels: list[Operation]) -> tuple[int, ...] | None:
    """The result of an all-gather of several levels, in the shape of the program."""
    last = levels[-1]
    if last.dtype is None or last.shape is None or last.hlo_shape is not None:
        return last.shape  # unknown, or already the program's shape
    n_slices = next(o.group_size for o in levels if o.site.instruction.opcode == "send")
    dims = last.shape
    for dim, size in enumerate(dims[:-1]):
        if size == n_slices:  # a separate slice dim, before the gathered one
            return (*dims[:dim], size * dims[dim + 1], *dims[dim + 2 :])
    array = ArrayShape(dtype=last.dtype, dims=dims)
    result, context = last.scheduled_op.result, last.scheduled_op.context
    return shape_in_program(flow, context, result, array, op_name=last.op_name, is_split=True).dims


def _merged(flow: Dataflow, kind: Kind, levels: list[Operation]) -> Operation:
    first, last = levels[0], levels[-1]
    groups = _joined(levels)
    named = next((level for level in levels if level.scope.missing is None), first)
    known_bytes = [level.wire_bytes for level in levels if level.wire_bytes is not None]
    return replace(
        named,
        site=first.site,
        scheduled_op=first.scheduled_op,
        kind=kind,
        opcode=" + ".join(level.opcode for level in levels),
        groups=groups,
        group_size=len(groups[0]),
        is_pairs=False,
        shape=_shape(flow, levels) if kind is Kind.ALL_GATHER else first.shape,
        payload_bytes=last.payload_bytes if kind is Kind.ALL_GATHER else first.payload_bytes,
        wire_bytes=sum(known_bytes) if len(known_bytes) == len(levels) else None,
        hlo_shape=first.hlo_shape,
        is_async=any(level.is_async for level in levels),
        algorithm=SLICES_ALGORITHM,
        caveats=tuple(dict.fromkeys(caveat for level in levels for caveat in level.caveats)),
        source_ops=source_ops_of(levels),
    )
