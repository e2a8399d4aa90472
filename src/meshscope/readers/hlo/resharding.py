"""What a partitioner-inserted collective moves: its operand, where that comes from, and along which dim."""

import re
from fractions import Fraction
from itertools import combinations
from math import prod

from meshscope.events.resharding import Resharding
from meshscope.readers.hlo.collective_matmul import is_product
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import operand_of
from meshscope.spec.plan.mesh import Mesh

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
    kept_frac, mesh = operation.kept_frac, collectives.devices.mesh
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
        dropped_over=None if kept_frac is None else _other_axes(mesh, operation, kept_frac),
    )


def _other_axes(mesh: Mesh, operation: Operation, kept_frac: Fraction) -> str | None:
    """The only axes beside those of the collective that cut an array to this fraction; None if others do, too."""
    own = (mesh.axis_of_groups(operation.groups) or "").split("+")
    names = [name for name, size in mesh.axes if size > 1 and name not in own]
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
        if not _is_move(instruction) or not inputs:
            return None, instruction.opcode
        place = inputs[0]
    return None, None


def _is_move(instruction: Instruction) -> bool:
    """Whether the instruction passes its first input on."""
    return instruction.opcode in {"parameter", "get-tuple-element", "convert", *_MOVES}
