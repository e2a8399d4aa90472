"""Collectives over an axis that spans slices, which libtpu implements hierarchically.

An all-reduce becomes a reduce-scatter within each slice, an all-reduce of the shards across slices,
and an all-gather within each slice. An all-gather or reduce-scatter becomes one within slices and
one across. This module replaces these levels by the one collective that they implement.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.executions import CallContext
from meshscope.readers.hlo.groups import Devices, connected_groups
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.readers.hlo.semantics import operand_of
from meshscope.readers.hlo.shapes import shape_in_program

ALGORITHM = "hierarchical over ICI and DCN"

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
    consumers = _consumers(flow, operations)
    merged: dict[int, Operation] = {}
    hidden: set[int] = set()
    for first in operations:
        for kinds, kind in _LEVELS.items():
            levels = _levels(flow, consumers, first, kinds)
            if id(first) in hidden or levels is None or not _is_one(devices, kind, levels):
                continue
            merged[id(first)] = _merged(flow, kind, levels)
            hidden |= {id(level) for level in levels}
    return [merged.get(id(o), o) for o in operations if id(o) in merged or id(o) not in hidden]


def _consumers(flow: Dataflow, operations: list[Operation]) -> _Consumers:
    """The operations that take the result of an instruction, moved, sliced or padded."""
    consumers: _Consumers = {}
    for operation in operations:
        operand = operand_of(flow, operation.site, 0)
        for source in _sources(flow, *operand) if operand else ():
            consumers.setdefault(id(source), []).append(operation)
    return consumers


def _sources(flow: Dataflow, context: CallContext, operand: Instruction) -> list[Instruction]:
    """The source of an operand, then the sources behind slices and pads."""
    sources = [flow.skip_moves(context, operand)]
    for source in sources:  # grows during iteration
        if len(sources) < _MAX_SLICES and _slices(flow, source):
            producers = context.computation.producers(source)
            sources += [flow.skip_moves(context, i) for i in producers[:1]]
    return sources


def _slices(flow: Dataflow, instruction: Instruction) -> bool:
    is_crop = instruction.custom_call_target == "ZeroCrop"
    return is_crop or flow.consists_of(instruction, _SLICING)


def _levels(
    flow: Dataflow, consumers: _Consumers, first: Operation, kinds: tuple[Kind, ...]
) -> list[Operation] | None:
    """`first` and the operations that take its result in turn, if they have these kinds."""
    if first.kind is not kinds[0]:
        return None
    levels = [first]
    for kind in kinds[1:]:
        last = levels[-1]
        if last.scheduled_op.result is None:
            return None
        result = flow.skip_moves(last.scheduled_op.context, last.scheduled_op.result)
        following = [
            consumer
            for consumer in consumers.get(id(result), [])
            if consumer.kind is kind and consumer.count == last.count and consumer is not last
        ]
        if len(following) != 1:
            return None
        levels.append(following[0])
    return levels


def _is_one(devices: Devices, kind: Kind, levels: list[Operation]) -> bool:
    """Whether the levels implement one collective, not several that the program issues in a row."""
    groups = [frozenset(map(frozenset, level.groups)) for level in levels]
    if kind is Kind.ALL_REDUCE:
        return groups[0] == groups[2] != groups[1]
    axes = [devices.mesh.axis_of_groups(level.groups) for level in levels]
    whole = devices.mesh.axis_of_groups(_joined(levels))
    return None in axes and whole is not None


def _joined(levels: Iterable[Operation]) -> Groups:
    """The groups of devices that the levels connect together."""
    return connected_groups(
        tuple((group[0], device) for level in levels for group in level.groups for device in group)
    )


def _shape(flow: Dataflow, levels: list[Operation]) -> tuple[int, ...] | None:
    """The result of an all-gather of several levels, in the shape of the program."""
    last = levels[-1]
    if last.dtype is None or last.shape is None or last.hlo_shape is not None:
        return last.shape  # unknown, or already the program's shape
    n_slices = next(o.group_size for o in levels if o.site.instruction.opcode == "send")
    merged = _without_slice_dim(last.shape, n_slices=n_slices)
    if merged != last.shape:
        return merged
    array = ArrayShape(dtype=last.dtype, dims=last.shape)
    result, context = last.scheduled_op.result, last.scheduled_op.context
    return shape_in_program(flow, context, result, array, op_name=last.op_name, is_split=True).dims


def _without_slice_dim(dims: tuple[int, ...], *, n_slices: int) -> tuple[int, ...]:
    """The dims with a separate slice dim merged into the gathered dim after it."""
    for dim, size in enumerate(dims[:-1]):
        if size == n_slices:
            return (*dims[:dim], size * dims[dim + 1], *dims[dim + 2 :])
    return dims


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
        algorithm=ALGORITHM,
        caveats=tuple(dict.fromkeys(caveat for level in levels for caveat in level.caveats)),
        source_ops=source_ops_of(levels),
    )
