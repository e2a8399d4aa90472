"""The kind, payload, wire bytes, groups and scope of a collective instruction."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod

from meshscope.errors import ParseError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.readers.hlo import semantics, shapes
from meshscope.readers.hlo.attribution import Scope, scope_of
from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow, Location
from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.semantics import (
    ALL_REDUCE_SCATTER,
    Element,
    ScheduledOp,
    Semantics,
    operand_of,
)
from meshscope.serialize import picked

_MAX_MOVES = 8  # copies, pads and slices between the program's array and the collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective in the text, over all layers and iterations that execute it.

    `count` is its number of executions in one run of the module; `caveats` say what is unknown.
    `source_ops` names the scheduled instructions that implement it, if there are several. `kept_frac` is the
    fraction of an all-reduce or all-gather that a device keeps, by its ID or the same on all; None if it uses all.
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
    carried_bytes: int | None = None  # the payload with padding
    kept_frac: Fraction | None = None
    is_kept_by_device: bool = True


def source_ops_of(operations: Iterable[Operation]) -> tuple[str, ...]:
    """The names of the scheduled instructions that implement these operations, without repeats."""
    names = (o.source_ops or (o.scheduled_op.instruction.name,) for o in operations)
    return tuple(dict.fromkeys(chain.from_iterable(names)))


def operations_of(flow: Dataflow, site: CallSite, devices: Devices) -> Iterator[Operation]:
    """The operation at a site, or one for each array that the compiler combined into a tuple."""
    elements = list(_elements(flow, site, devices))
    instruction, n_bytes = site.instruction, total_bytes(element.array for element in elements)
    # An all-to-all sends one array of its tuple to each device; the whole shape is unknown.
    is_spread = instruction.opcode.startswith("all-to-all") and len(elements) > 1
    for element in [replace(elements[0], is_combined=False)] if is_spread else elements:
        effect = semantics.semantics_of(flow, element)
        op_name = semantics.attributed_op_name(flow, element, effect.kind)
        payload, is_reshaped = None, True
        if instruction.opcode.startswith("ragged"):
            payload, carried = _ragged_payload(flow, element)
            n_bytes, is_reshaped = carried.n_bytes, payload.dims != element.array.dims
        elif not is_spread:
            payload, is_reshaped = _payload(flow, element, effect.kind, op_name)
            n_bytes = payload.n_bytes
        is_whole = is_spread or element.is_combined
        shape = instruction.shape if is_whole else str(element.array)
        shape = shape if is_reshaped else None
        yield operation(
            flow, element, effect, op_name, payload, carried_bytes=n_bytes, hlo_shape=shape
        )


def total_bytes(arrays: Iterable[ArrayShape]) -> int | None:
    """Bytes of all arrays; None if one is unknown."""
    sizes = [array.n_bytes for array in arrays]
    return None if None in sizes else sum(filter(None, sizes))


def _ragged_payload(flow: Dataflow, element: Element) -> tuple[ArrayShape, ArrayShape]:
    """The payload [rows, width] of the program, and the padded payload of the collective.

    Routing decides at run time how many rows a device sends from one buffer and receives into the
    other. Averaged over devices both numbers are equal, so the smaller buffer bounds the traffic. The
    compiler splits each row into two halves of whole lanes and pads it accordingly.
    """
    operand = operand_of(flow, element.site, 0)
    buffers = [element.array, *(operand[1].arrays[:1] if operand else ())]
    smaller = min(buffers, key=lambda array: array.dims[:1])
    carried = replace(smaller, dims=(smaller.dims[0], prod(smaller.dims[1:])))
    for narrow in _unpadded(flow, element, operand):
        dims = narrow.arrays[0].dims if len(narrow.arrays) == 1 else ()
        if len(dims) == 2 and dims[1] < carried.dims[1]:
            return replace(carried, dims=(carried.dims[0], dims[1])), carried
    return carried, carried


def _unpadded(flow: Dataflow, element: Element, operand: Location | None) -> Iterator[Instruction]:
    """What was padded before the collective, then slices of its result."""
    if operand is not None:
        context, instruction = operand
        for _ in range(_MAX_MOVES):
            inner = context.computation.producer(instruction)
            if inner is None or not (instruction.opcode == "pad" or flow.is_movement(instruction)):
                break
            if instruction.opcode == "pad":
                yield inner
            instruction = inner
    results = [element.result] if element.result is not None else []
    computation = element.scheduled_op.context.computation
    for _ in range(_MAX_MOVES):
        users = [user for result in results for user in flow.users(computation, result)]
        yield from (user for user in users if flow.consists_of(user, MOVEMENT | {"slice"}))
        results = [user for user in users if flow.is_movement(user)]


def operation(  # noqa: PLR0913  facts beyond the element
    flow: Dataflow,
    element: Element,
    effect: Semantics,
    op_name: str | None,
    payload: ArrayShape | None,
    *,
    carried_bytes: int | None,
    hlo_shape: str | None,
    algorithm: str | None = None,
    is_async: bool = False,
) -> Operation:
    """The operation of an element, with wire bytes by its payload, group size and executed kind.

    `carried_bytes` is the payload with padding, if the collective sends padding.
    """
    site = element.site
    factor = wire_factor(effect.executed_as, element.group_size)
    is_whole = effect.kind in {Kind.ALL_REDUCE, Kind.ALL_GATHER}
    kept = semantics.kept_slices(flow, element) if is_whole else {}
    return Operation(
        kind=effect.kind,
        opcode=effect.opcode,
        dtype=(payload or element.array).dtype,
        shape=payload.dims if payload else None,
        payload_bytes=payload.n_bytes if payload else carried_bytes,
        carried_bytes=carried_bytes,
        wire_bytes=None if carried_bytes is None else carried_bytes * factor,
        hlo_shape=hlo_shape,
        op_name=op_name,
        scope=scope_of(op_name),
        is_async=is_async or semantics.is_asynchronous(site),
        algorithm=algorithm or semantics.algorithm_of(site),
        inserted_by=semantics.inserted_by(flow, element),
        kept_frac=semantics.kept_frac(kept, prod(element.array.dims)),
        is_kept_by_device=all(one.is_of_device for one in kept),
        **picked(element, "site", "scheduled_op", "groups", "group_size", "is_pairs"),
        **picked(site, "count", "caveats"),
    )


def _elements(flow: Dataflow, site: CallSite, devices: Devices) -> Iterator[Element]:
    groups, is_pairs = devices.groups(site.instruction)
    scheduled_op = semantics.scheduled_op_of(flow, site)
    arrays = shapes.result_arrays(site.instruction)
    if not arrays:
        raise ParseError(
            f"{devices.module.where(site.instruction)}: '{site.instruction.name}' has the shape "
            f"{site.instruction.shape!r}, which lacks the arrays of {site.instruction.opcode}. "
            "Please report this line."
        )
    whole, reads = scheduled_op.result, dict[int, Instruction]()
    if whole is not None and len(arrays) > 1:
        for user in flow.users(scheduled_op.context.computation, whole):
            if user.opcode == "get-tuple-element" and (number := user.tuple_index) is not None:
                reads.setdefault(number, user)
    for index, array in enumerate(arrays):
        yield Element(
            site=site,
            scheduled_op=scheduled_op,
            groups=groups,
            is_pairs=is_pairs,
            index=index,
            array=array,
            result=whole if len(arrays) == 1 else reads.get(index),
            is_combined=len(arrays) > 1,
        )


def _payload(
    flow: Dataflow, element: Element, kind: Kind, op_name: str | None
) -> tuple[ArrayShape, bool]:
    """The whole array in the program's shape, and whether that differs from the instruction's."""
    instruction, whole, n = element.site.instruction, element.array, element.group_size
    if instruction.opcode.startswith(("reduce-scatter", ALL_REDUCE_SCATTER)):
        scattered = instruction.dimensions[:1] or (0,)
        sizes = (size * n if d in scattered else size for d, size in enumerate(whole.dims))
        whole = shape = replace(whole, dims=tuple(sizes))
    else:
        # An all-gather may add a separate device dim that the program does not have.
        dims = instruction.dimensions if instruction.opcode.startswith("all-gather") else ()
        is_split = bool(dims) and whole.dims[dims[0] : dims[0] + 1] == (n,)
        name, context = semantics.original_op_name(flow, element), element.scheduled_op.context
        shape = shapes.shape_in_program(
            flow, context, element.result, whole, op_name=name, is_split=is_split
        )
    operand = operand_of(flow, element.site, element.index)
    if operand is not None:
        if kind is Kind.REDUCE_SCATTER and semantics.explicit_op_name(element.site) is None:
            source = shapes.shape_of_source(flow, *operand, shape)
            shape = shape if shapes.equal_up_to_unit_dims(source, shape) else source
        shape = shapes.without_layer_dim(flow, *operand, shape, scope=scope_of(op_name))
    return shape, shape != whole or element.is_combined
