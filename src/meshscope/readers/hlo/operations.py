"""The kind, payload, wire bytes, groups and scope of a collective instruction.

Routing decides at run time how many rows a device sends from one buffer and receives into the
other. Averaged over devices both numbers are equal, so the smaller buffer bounds the traffic. The
compiler splits each row into two halves of whole lanes and pads it accordingly.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod

from meshscope.errors import ParseError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.readers.hlo.attribution import Scope, scope_of
from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.executions import CallContext, CallSite
from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.provenance import (
    algorithm_of,
    attributed_op_name,
    explicit_op_name,
    inserted_by,
    is_asynchronous,
    original_op_name,
)
from meshscope.readers.hlo.semantics import (
    ALL_REDUCE_SCATTER,
    Element,
    ScheduledOp,
    Semantics,
    kept_sizes,
    operand_of,
    scheduled_op_of,
    semantics_of,
)
from meshscope.readers.hlo.shapes import (
    equal_up_to_unit_dims,
    reduce_scatter_input,
    result_arrays,
    shape_in_program,
    shape_of_source,
    without_layer_dim,
)

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


_INDEX = re.compile(r"\bindex=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective in the text, over all layers and iterations that execute it.

    `count` is its number of executions in one run of the module; `caveats` say what is unknown.
    `source_ops` names the scheduled instructions that implement it, if there are several. `kept_frac` is the
    fraction of an all-reduce that each device keeps, by its ID; None if it uses all of it.
    """

    site: CallSite
    scheduled_op: ScheduledOp
    kind: Kind
    opcode: str
    groups: Groups
    group_size: int
    is_pairs: bool
    dtype: str | None
    shape: tuple[int, ...] | None
    payload_bytes: int | None
    wire_bytes: Fraction | None
    hlo_shape: str | None
    op_name: str | None
    scope: Scope
    is_async: bool
    algorithm: str | None
    inserted_by: str | None
    count: int
    caveats: tuple[str, ...]
    source_ops: tuple[str, ...] = ()
    kept_frac: Fraction | None = None


def source_ops_of(operations: Iterable[Operation]) -> tuple[str, ...]:
    """The names of the scheduled instructions that implement these operations, without repeats."""
    names = (o.source_ops or (o.scheduled_op.instruction.name,) for o in operations)
    return tuple(dict.fromkeys(chain.from_iterable(names)))


def operations_of(flow: Dataflow, site: CallSite, devices: Devices) -> Iterator[Operation]:
    """The operation at a site, or one for each array that the compiler combined into a tuple."""
    opcode = site.instruction.opcode
    elements = list(_elements(flow, site, devices))
    if opcode.startswith("all-to-all") and len(elements) > 1:
        yield _all_to_all_of_tuple(flow, elements)
        return
    for element in elements:
        semantics = semantics_of(flow, element)
        op_name = attributed_op_name(flow, element, semantics.kind)
        payload, is_reshaped = _payload(flow, element, semantics.kind, op_name)
        carried = payload
        if opcode.startswith("ragged"):
            payload, carried = ragged_payload(flow, element)
            is_reshaped = payload.dims != element.array.dims
        yield operation(
            flow,
            element,
            semantics,
            payload=payload,
            payload_bytes=payload.n_bytes,
            carried_bytes=carried.n_bytes,
            hlo_shape=_hlo_shape(element) if is_reshaped else None,
            op_name=op_name,
            caveats=site.caveats,
        )


def _all_to_all_of_tuple(flow: Dataflow, parts: list[Element]) -> Operation:
    """An all-to-all that sends one array of its tuple to each device; the whole shape is unknown."""
    element = replace(parts[0], is_combined=False)
    semantics = semantics_of(flow, element)
    sizes = [part.array.n_bytes for part in parts]
    known = [size for size in sizes if size is not None]
    return operation(
        flow,
        element,
        semantics,
        payload=None,
        payload_bytes=sum(known) if len(known) == len(sizes) else None,
        hlo_shape=element.site.instruction.shape,
        op_name=attributed_op_name(flow, element, semantics.kind),
        caveats=element.site.caveats,
    )


def operation(  # noqa: PLR0913  facts beyond the element
    flow: Dataflow,
    element: Element,
    semantics: Semantics,
    *,
    payload: ArrayShape | None,
    payload_bytes: int | None,
    hlo_shape: str | None,
    op_name: str | None,
    caveats: tuple[str, ...],
    carried_bytes: int | None = None,
    algorithm: str | None = None,
    is_async: bool = False,
) -> Operation:
    """The operation of an element, with wire bytes by its payload, group size and executed kind.

    `carried_bytes` is the payload with padding, if the collective sends padding.
    """
    site = element.site
    carried_bytes = payload_bytes if carried_bytes is None else carried_bytes
    factor = wire_factor(semantics.executed_as, element.group_size)
    kept = kept_sizes(flow, element) if semantics.kind is Kind.ALL_REDUCE else ()
    return Operation(
        site=site,
        scheduled_op=element.scheduled_op,
        kind=semantics.kind,
        opcode=semantics.opcode,
        groups=element.groups,
        group_size=element.group_size,
        is_pairs=element.is_pairs,
        dtype=(payload or element.array).dtype,
        shape=payload.dims if payload else None,
        payload_bytes=payload_bytes,
        wire_bytes=None if carried_bytes is None else carried_bytes * factor,
        hlo_shape=hlo_shape,
        op_name=op_name,
        scope=scope_of(op_name),
        is_async=is_async or is_asynchronous(site),
        algorithm=algorithm or algorithm_of(site),
        inserted_by=inserted_by(flow, element),
        count=site.count,
        caveats=caveats,
        kept_frac=Fraction(max(kept), prod(element.array.dims)) if kept else None,
    )


def _elements(flow: Dataflow, site: CallSite, devices: Devices) -> Iterator[Element]:
    groups, is_pairs = devices.groups(site.instruction)
    scheduled_op = scheduled_op_of(flow, site)
    arrays = result_arrays(site.instruction)
    if not arrays:
        raise ParseError(
            f"{devices.module.where(site.instruction)}: '{site.instruction.name}' has the shape "
            f"{site.instruction.shape!r}, which lacks the arrays of {site.instruction.opcode}. "
            "Please report this line."
        )
    is_combined = len(arrays) > 1
    for index, array in enumerate(arrays):
        result = scheduled_op.result
        if result is not None and is_combined:
            result = _tuple_element(flow, scheduled_op, result, index)
        yield Element(
            site=site,
            scheduled_op=scheduled_op,
            groups=groups,
            is_pairs=is_pairs,
            index=index,
            array=array,
            result=result,
            is_combined=is_combined,
        )


def _tuple_element(
    flow: Dataflow, scheduled_op: ScheduledOp, whole: Instruction, index: int
) -> Instruction | None:
    """The get-tuple-element that reads one array of a tuple."""
    for user in flow.users(scheduled_op.context.computation, whole):
        match = _INDEX.search(user.attributes)
        if user.opcode == "get-tuple-element" and match and int(match[1]) == index:
            return user
    return None


def _payload(
    flow: Dataflow, element: Element, kind: Kind, op_name: str | None
) -> tuple[ArrayShape, bool]:
    """The whole array in the program's shape, and whether that differs from the instruction's."""
    instruction, scope = element.site.instruction, scope_of(op_name)
    whole = element.array
    if instruction.opcode.startswith(("reduce-scatter", ALL_REDUCE_SCATTER)):
        whole = shape = reduce_scatter_input(whole, instruction.dimensions, element.group_size)
    else:
        is_split = _is_split_gather(element)
        context = element.scheduled_op.context
        name = original_op_name(flow, element)
        shape = shape_in_program(
            flow, context, element.result, whole, op_name=name, is_split=is_split
        )
    operand = operand_of(flow, element.site, element.index)
    if operand is None:
        return shape, shape != whole or element.is_combined
    if kind is Kind.REDUCE_SCATTER and explicit_op_name(element.site) is None:
        source = shape_of_source(flow, *operand, shape)
        shape = shape if equal_up_to_unit_dims(source, shape) else source
    shape = without_layer_dim(flow, *operand, shape, scope=scope)
    return shape, shape != whole or element.is_combined


def _hlo_shape(element: Element) -> str:
    """The shape in the text, with all arrays if the collective is combined."""
    return element.site.instruction.shape if element.is_combined else str(element.array)


def _is_split_gather(element: Element) -> bool:
    """Whether an all-gather added a separate device dim that the program does not have."""
    instruction = element.site.instruction
    if not instruction.opcode.startswith("all-gather") or not instruction.dimensions:
        return False
    dim = instruction.dimensions[0]
    return element.array.dims[dim : dim + 1] == (element.group_size,)
