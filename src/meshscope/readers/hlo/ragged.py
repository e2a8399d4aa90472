"""The payload of a ragged all-to-all: at most the smaller of its send and receive buffers.

Routing decides at run time how many rows a device sends from one buffer and receives into the
other. Averaged over devices both numbers are equal, so the smaller buffer bounds the traffic. The
compiler splits each row into two halves of whole lanes and pads it accordingly.
"""

from dataclasses import replace
from math import prod

from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.executions import CallContext
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.semantics import Element, operand_of

_MAX_MOVES = 8  # copies, pads and slices between the program's array and the collective


def ragged_payload(flow: Dataflow, element: Element) -> tuple[ArrayShape, ArrayShape]:
    """The payload [rows, width] of the program, and the padded payload of the collective."""
    operand = operand_of(flow, element.site, 0)
    buffers = [element.array, *(operand[1].arrays[:1] if operand else ())]
    smaller = min(buffers, key=lambda array: array.dims[:1])
    rows, padded = smaller.dims[0], prod(smaller.dims[1:])
    carried = replace(smaller, dims=(rows, padded))
    width = _width_before(flow, operand, padded) or _width_after(flow, element, padded) or padded
    return replace(carried, dims=(rows, width)), carried


def _width_before(
    flow: Dataflow, operand: tuple[CallContext, Instruction] | None, padded: int
) -> int | None:
    """The width of the array before a pad to the collective's width."""
    if operand is None:
        return None
    context, instruction = operand
    for _ in range(_MAX_MOVES):
        inner = context.computation.producer(instruction)
        if inner is None or not (instruction.opcode == "pad" or flow.is_movement(instruction)):
            return None
        if instruction.opcode == "pad" and _is_narrower(inner, padded):
            return inner.arrays[0].dims[1]
        instruction = inner
    return None


def _width_after(flow: Dataflow, element: Element, padded: int) -> int | None:
    """The width of a slice of the result."""
    results = [element.result] if element.result is not None else []
    for _ in range(_MAX_MOVES):
        users = [
            u for i in results for u in flow.users(element.scheduled_op.context.computation, i)
        ]
        for user in users:
            if flow.consists_of(user, MOVEMENT | {"slice"}) and _is_narrower(user, padded):
                return user.arrays[0].dims[1]
        results = [user for user in users if flow.is_movement(user)]
    return None


def _is_narrower(instruction: Instruction, padded: int) -> bool:
    """Whether the instruction yields one array with rows narrower than `padded`."""
    arrays = instruction.arrays
    return len(arrays) == 1 and len(arrays[0].dims) == 2 and arrays[0].dims[1] < padded
