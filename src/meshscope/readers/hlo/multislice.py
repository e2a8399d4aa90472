"""Collectives over an axis that runs across slices, which libtpu carries out level by level.

An all-reduce becomes a reduce-scatter inside each slice, an all-reduce of the parts between
slices, and an all-gather inside each; a gather or scatter becomes one of each level. Each is told
as the one collective that it is.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshscope.events.enums import Kind
from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.devices import Devices
from meshscope.readers.hlo.executions import CallContext
from meshscope.readers.hlo.groups import connected_groups
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.readers.hlo.semantics import operand_of
from meshscope.readers.hlo.shapes import shape_in_program
from meshscope.spec.plan.mesh import Groups

ALGORITHM = "within slices and across"

_LEVELS: dict[tuple[Kind, ...], Kind] = {
    (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_GATHER): Kind.ALL_REDUCE,
    (Kind.ALL_GATHER, Kind.ALL_GATHER): Kind.ALL_GATHER,
    (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER): Kind.REDUCE_SCATTER,
}

_Takers = dict[int, list[Operation]]  # by id of an instruction
# Parts are cut and padded between the levels; a custom call `ZeroCrop` pads, too.
_CUTTING = frozenset({"dynamic-slice", "slice", "pad", "constant"} | MOVEMENT)
_MAX_CUTS = 8  # in a row


def merge_slice_levels(
    flow: Dataflow, operations: list[Operation], devices: Devices
) -> list[Operation]:
    """The operations with the levels of one collective replaced by it, at the first of them."""
    if devices.n_slices == 1:
        return operations
    takers = _takers(flow, operations)
    told: dict[int, Operation] = {}
    hidden: set[int] = set()
    for first in operations:
        for kinds, kind in _LEVELS.items():
            levels = _levels(flow, takers, first, kinds)
            if id(first) in hidden or levels is None or not _belong(devices, kind, levels):
                continue
            told[id(first)] = _merged(flow, kind, levels)
            hidden |= {id(level) for level in levels}
    return [told.get(id(o), o) for o in operations if id(o) in told or id(o) not in hidden]


def _takers(flow: Dataflow, operations: list[Operation]) -> _Takers:
    """Which operations take the result of an instruction: moved, or cut and padded on the way."""
    takers: _Takers = {}
    for operation in operations:
        operand = operand_of(flow, operation.site, 0)
        for source in _sources(flow, *operand) if operand else ():
            takers.setdefault(id(source), []).append(operation)
    return takers


def _sources(flow: Dataflow, context: CallContext, operand: Instruction) -> list[Instruction]:
    """What an operand is made of without computing: its source, and what that cuts or pads."""
    found = [flow.skip_moves(context, operand)]
    for source in found:  # grows on the way
        if len(found) < _MAX_CUTS and _cuts(flow, source):
            producers = context.computation.producers(source)
            found += [flow.skip_moves(context, i) for i in producers[:1]]
    return found


def _cuts(flow: Dataflow, instruction: Instruction) -> bool:
    is_crop = instruction.custom_call_target == "ZeroCrop"
    return is_crop or flow.consists_of(instruction, _CUTTING)


def _levels(
    flow: Dataflow, takers: _Takers, first: Operation, kinds: tuple[Kind, ...]
) -> list[Operation] | None:
    """`first` and what takes its result on, if they are of these kinds and nothing computes between."""
    found = [first]
    if first.kind is not kinds[0]:
        return None
    for kind in kinds[1:]:
        last = found[-1]
        if last.scheduled_op.result is None:
            return None
        result = flow.skip_moves(last.scheduled_op.context, last.scheduled_op.result)
        following = [
            taker
            for taker in takers.get(id(result), [])
            if taker.kind is kind and taker.count == last.count and taker is not last
        ]
        if len(following) != 1:
            return None
        found.append(following[0])
    return found


def _belong(devices: Devices, kind: Kind, levels: list[Operation]) -> bool:
    """Whether the levels are those of one collective, not two that a program wrote in a row."""
    groups = [frozenset(map(frozenset, level.groups)) for level in levels]
    if kind is Kind.ALL_REDUCE:
        return groups[0] == groups[2] != groups[1]
    axes = [devices.mesh.axis_of_groups(level.groups) for level in levels]
    whole = devices.mesh.axis_of_groups(_joined(levels))
    return None in axes and whole is not None


def _joined(levels: Iterable[Operation]) -> Groups:
    """Everyone that the levels connect."""
    return connected_groups(
        tuple((group[0], device) for level in levels for group in level.groups for device in group)
    )


def _shape(flow: Dataflow, levels: list[Operation]) -> tuple[int, ...] | None:
    """What a gather of several levels makes, in the shape of the program."""
    last = levels[-1]
    if last.dtype is None or last.shape is None or last.hlo_shape is not None:
        return last.shape  # unknown, or already told by name
    n_slices = next(o.group_size for o in levels if o.site.instruction.opcode == "send")
    merged = _without_slices_dim(last.shape, n_slices=n_slices)
    if merged != last.shape:
        return merged
    array = ArrayShape(dtype=last.dtype, dims=last.shape)
    result, context = last.scheduled_op.result, last.scheduled_op.context
    return shape_in_program(flow, context, result, array, op_name=last.op_name, is_split=True).dims


def _without_slices_dim(dims: tuple[int, ...], *, n_slices: int) -> tuple[int, ...]:
    """Dims in which the slices have one of their own, in front of the gathered one: taken together."""
    for dim, size in enumerate(dims[:-1]):
        if size == n_slices:
            return (*dims[:dim], size * dims[dim + 1], *dims[dim + 2 :])
    return dims


def _merged(flow: Dataflow, kind: Kind, levels: list[Operation]) -> Operation:
    first, last = levels[0], levels[-1]
    groups = _joined(levels)
    named = next((level for level in levels if level.scope.missing is None), first)
    known = [level.wire_bytes for level in levels if level.wire_bytes is not None]
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
        wire_bytes=sum(known) if len(known) == len(levels) else None,
        hlo_shape=first.hlo_shape,
        is_async=any(level.is_async for level in levels),
        algorithm=ALGORITHM,
        caveats=tuple(dict.fromkeys(caveat for level in levels for caveat in level.caveats)),
        source_ops=source_ops_of(levels),
    )
