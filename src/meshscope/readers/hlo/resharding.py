"""What a partitioner-inserted collective moves: its operand, where that comes from, and along which dim."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from math import prod

from meshscope.events.collective import Resharding
from meshscope.plans.mesh import Mesh
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
    argument, opcode = _source(collectives.flow, operation)
    mesh, kept_frac = collectives.devices.mesh, operation.kept_frac
    names = _names_of_others(mesh, operation)
    part = Fraction(1, prod(mesh.size(name) for name in names))
    is_returned = (
        operation.kind == "all_reduce"
        and part < 1
        and _is_argument_in_parts(collectives.flow, operation, part)
        and _is_returned(collectives.flow, operation)
    )
    kept_frac = part if is_returned else kept_frac
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
        dropped_over=None if kept_frac is None else _axes_of(mesh, names, kept_frac),
        is_returned=is_returned,
    )


def _names_of_others(mesh: Mesh, operation: Operation) -> list[str]:
    """The axes of the mesh beside those of the collective."""
    axes = (mesh.axis_of_groups(operation.groups) or "").split("+")
    return [name for name, size in mesh.axes if size > 1 and name not in axes]


def _is_argument_in_parts(flow: Dataflow, operation: Operation, part: Fraction) -> bool:
    """Whether devices have such a part of an argument with the dims of the collective, as of a weight its gradient is of."""
    entry, dims = flow.module.entry, operation.shape or ()
    parts = {(*dims[:i], size * part, *dims[i + 1 :]) for i, size in enumerate(dims)}
    arguments = () if entry is None else entry.parameters.values()
    return any(array.dims in parts for argument in arguments for array in argument.arrays)


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


def _axes_of(mesh: Mesh, names: Sequence[str], kept_frac: Fraction) -> str | None:
    """The only axes among these that cut an array to this fraction; None if others do, too."""
    fitting = [
        "+".join(axes)
        for n_axes in range(1, len(names) + 1)
        for axes in combinations(names, n_axes)
        if Fraction(1, prod(mesh.size(name) for name in axes)) == kept_frac
    ]
    return fitting[0] if len(fitting) == 1 else None


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
