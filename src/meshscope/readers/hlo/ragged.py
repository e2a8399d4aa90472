"""The array of a ragged all-to-all: what travels is decided by the routing, what can travel by two buffers.

A device gives rows of one buffer and takes rows into another. On average over the devices as many
rows are given as taken, so no more than the smaller of the two holds can travel: that is the
payload. The compiler lays a row out in two halves of whole lanes, and pads it to fit.
"""

from dataclasses import replace
from math import prod

from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.executions import CallContext
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.semantics import Element, operand_of

_MAX_MOVES = 8  # copies, pads and slices between the program's array and the exchange


def ragged_payload(flow: Dataflow, element: Element) -> tuple[ArrayShape, ArrayShape]:
    """The payload [rows, width] as the program has it, and as the exchange carries it, padded."""
    given = operand_of(flow, element.site, 0)
    buffers = [element.array, *(given[1].arrays[:1] if given else ())]
    smaller = min(buffers, key=lambda array: array.dims[:1])
    rows, padded = smaller.dims[0], prod(smaller.dims[1:])
    carried = replace(smaller, dims=(rows, padded))
    width = _width_before(flow, given, padded) or _width_behind(flow, element, padded) or padded
    return replace(carried, dims=(rows, width)), carried


def _width_before(
    flow: Dataflow, given: tuple[CallContext, Instruction] | None, padded: int
) -> int | None:
    """The width of the array that a pad made as wide as the exchange wants it."""
    if given is None:
        return None
    context, instruction = given
    for _ in range(_MAX_MOVES):
        inner = context.computation.producer(instruction)
        if inner is None or not (instruction.opcode == "pad" or flow.is_movement(instruction)):
            return None
        if instruction.opcode == "pad" and _is_narrower(inner, padded):
            return inner.arrays[0].dims[1]
        instruction = inner
    return None


def _width_behind(flow: Dataflow, element: Element, padded: int) -> int | None:
    """The width to which a slice cuts the result."""
    found = [element.result] if element.result is not None else []
    for _ in range(_MAX_MOVES):
        users = [u for i in found for u in flow.users(element.scheduled_op.context.computation, i)]
        for user in users:
            if flow.consists_of(user, MOVEMENT | {"slice"}) and _is_narrower(user, padded):
                return user.arrays[0].dims[1]
        found = [user for user in users if flow.is_movement(user)]
    return None


def _is_narrower(instruction: Instruction, padded: int) -> bool:
    """Whether it makes one array of rows less wide than this."""
    arrays = instruction.arrays
    return len(arrays) == 1 and len(arrays[0].dims) == 2 and arrays[0].dims[1] < padded
