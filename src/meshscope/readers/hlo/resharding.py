"""What a partitioner-inserted collective moves: its operand, where that comes from, and along which dim."""

import re
from fractions import Fraction
from itertools import chain, combinations
from math import prod

from meshscope.events.collective import Resharding
from meshscope.readers.hlo.collective_matmul import is_product
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import operand_of

MAX_STEPS = 50  # instructions between an argument and its collective
_DIMENSIONS = re.compile(r"\bdimensions=\{(\d+)\}")
_MOVES = frozenset({"optimization-barrier", "slice", "dynamic-slice"})


def reshardings(collectives: ModuleCollectives) -> dict[str, Resharding]:
    """The collectives that the partitioner inserted, by the names of their scheduled instructions."""
    inserted = (o for o in collectives.merged if o.inserted_by == "partitioner")
    moved = (_resharding(collectives, operation) for operation in inserted)
    return {one.hlo_name: one for one in moved}


def _resharding(collectives: ModuleCollectives, operation: Operation) -> Resharding:
    flow, mesh, kept_frac = collectives.flow, collectives.devices.mesh, operation.kept_frac
    argument, opcode = _source(flow, operation)
    own = (mesh.axis_of_groups(operation.groups) or "").split("+")
    others = [name for name, size in mesh.axes if size > 1 and name not in own]
    part = Fraction(1, prod(mesh.size(name) for name in others))
    is_returned = False
    if operation.kind == "all_reduce" and part < 1:
        # Devices have a part of an argument like it, as of a weight whose gradient it is.
        dims, entry = operation.shape or (), flow.module.entry
        parts = {(*dims[:i], size * part, *dims[i + 1 :]) for i, size in enumerate(dims)}
        arguments = () if entry is None else entry.parameters.values()
        is_part = any(array.dims in parts for one in arguments for array in one.arrays)
        is_returned = is_part and _is_returned(flow, operation)
    kept_frac = part if is_returned else kept_frac
    choices = chain.from_iterable(combinations(others, n) for n in range(1, len(others) + 1))
    fitting = [a for a in choices if Fraction(1, prod(map(mesh.size, a))) == kept_frac]
    match = _DIMENSIONS.search(operation.site.instruction.attributes)
    is_shape_kept = operation.hlo_shape is None
    return Resharding(
        hlo_name=operation.scheduled_op.instruction.name,
        argument=argument,
        opcode=opcode,
        dim=int(match[1]) if match and is_shape_kept else None,
        is_of_product=is_product(operation.op_name),
        is_unmerged=operation.kind == "reduce_scatter" and operation.opcode == "all-reduce",
        dropped_frac=None if kept_frac is None else 1 - kept_frac,
        dropped_over="+".join(fitting[0]) if len(fitting) == 1 else None,
        is_returned=is_returned,
    )


def _is_returned(flow: Dataflow, operation: Operation) -> bool:
    """Whether the program returns the whole result and uses it for nothing else."""
    context, result = operation.scheduled_op.context, operation.scheduled_op.result
    computation = context.computation
    for _ in range(MAX_STEPS if context.caller is None else 0):
        if result is None or result is computation.root:
            return result is not None
        users = flow.users(computation, result)
        if len(users) != 1 or not (flow.keeps_values(users[0]) or users[0].opcode == "tuple"):
            return False
        result = users[0]
    return False


def _source(flow: Dataflow, operation: Operation) -> tuple[str | None, str | None]:
    """The argument that the operand is, or else the opcode of the operation that computes it."""
    place = operand_of(flow, operation.site, 0)
    for _ in range(MAX_STEPS):
        if place is None:
            return None, None
        context, instruction = flow.origin(*place)
        if instruction.opcode == "parameter" and context.caller is None:
            return instruction.op_name, None
        inputs = flow.inputs(context, instruction)
        if (
            instruction.opcode not in {"parameter", "get-tuple-element", "convert", *_MOVES}
            or not inputs
        ):
            return None, instruction.opcode
        place = inputs[0]
    return None, None
