"""From a collective in the text to what it means: kind, payload, wire bytes, groups, scope."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from meshscope.errors import ParseError
from meshscope.events.enums import Kind, wire_factor
from meshscope.readers.hlo.attribution import Scope, scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.devices import Devices
from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.provenance import (
    algorithm_of,
    inserted_by,
    is_asynchronous,
    kept_name,
    own_name,
    served_name,
)
from meshscope.readers.hlo.ragged import ragged_payload
from meshscope.readers.hlo.semantics import (
    Element,
    Meaning,
    ScheduledOp,
    anchor_of,
    meaning_of,
    operand_of,
)
from meshscope.readers.hlo.shapes import (
    as_fed,
    as_program_sees,
    result_arrays,
    same_but_for_ones,
    scattered_whole,
    without_layer_dim,
)
from meshscope.spec.plan.mesh import Groups

_INDEX = re.compile(r"\bindex=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective as it stands in the text, for all the layers and iterations that it serves.

    `count` is how often it executes in one run of the module; `doubts` say what is not known.
    `carriers` are the names of the scheduled instructions that carry it out together, where they
    are several.
    """

    site: CallSite
    anchor: ScheduledOp
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
    doubts: tuple[str, ...]
    carriers: tuple[str, ...] = ()


def carriers_of(operations: Iterable[Operation]) -> tuple[str, ...]:
    """The names of the scheduled instructions that carry these operations out, each once."""
    names = (o.carriers or (o.anchor.instruction.name,) for o in operations)
    return tuple(dict.fromkeys(name for own in names for name in own))


def operations_of(flow: Dataflow, site: CallSite, devices: Devices) -> Iterator[Operation]:
    """The operation at a site; one for each array when the compiler combined several into a tuple."""
    opcode = site.instruction.opcode
    elements = list(_elements(flow, site, devices))
    if opcode.startswith("all-to-all") and len(elements) > 1:
        yield _all_to_all_of_tuple(flow, elements)
        return
    for element in elements:
        meaning = meaning_of(flow, element)
        op_name = served_name(flow, element, meaning.kind)
        payload, is_renamed = _payload(flow, element, meaning.kind, op_name)
        carried = payload
        if opcode.startswith("ragged"):
            payload, carried = ragged_payload(flow, element)
            is_renamed = payload.dims != element.array.dims
        yield operation(
            flow,
            element,
            meaning,
            payload=payload,
            payload_bytes=payload.n_bytes,
            carried_bytes=carried.n_bytes,
            hlo_shape=_hlo_shape(element) if is_renamed else None,
            op_name=op_name,
            doubts=site.doubts,
        )


def _all_to_all_of_tuple(flow: Dataflow, parts: list[Element]) -> Operation:
    """An all-to-all that sends one array of its tuple to each device; how they make one array is not told."""
    element = replace(parts[0], is_combined=False)
    meaning = meaning_of(flow, element)
    sizes = [part.array.n_bytes for part in parts]
    known = [size for size in sizes if size is not None]
    return operation(
        flow,
        element,
        meaning,
        payload=None,
        payload_bytes=sum(known) if len(known) == len(sizes) else None,
        hlo_shape=element.site.instruction.shape,
        op_name=served_name(flow, element, meaning.kind),
        doubts=element.site.doubts,
    )


def operation(  # noqa: PLR0913  what is not told by the element
    flow: Dataflow,
    element: Element,
    meaning: Meaning,
    *,
    payload: ArrayShape | None,
    payload_bytes: int | None,
    hlo_shape: str | None,
    op_name: str | None,
    doubts: tuple[str, ...],
    carried_bytes: int | None = None,
    algorithm: str | None = None,
    is_async: bool = False,
) -> Operation:
    """The operation of an element; wire bytes follow from payload, group size and what carries it out.

    `carried_bytes` is the payload as it travels, where that is more: padded.
    """
    site = element.site
    carried_bytes = payload_bytes if carried_bytes is None else carried_bytes
    factor = wire_factor(meaning.carried_out_as, element.group_size)
    return Operation(
        site=site,
        anchor=element.anchor,
        kind=meaning.kind,
        opcode=meaning.opcode,
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
        doubts=doubts,
    )


def _elements(flow: Dataflow, site: CallSite, devices: Devices) -> Iterator[Element]:
    groups, is_pairs = devices.groups(site.instruction)
    anchor = anchor_of(flow, site)
    arrays = result_arrays(site.instruction)
    if not arrays:
        raise ParseError(
            f"{devices.module.where(site.instruction)}: '{site.instruction.name}' has the shape "
            f"{site.instruction.shape!r}, in which the arrays of {site.instruction.opcode} were "
            "expected. Please report this line."
        )
    is_combined = len(arrays) > 1
    for index, array in enumerate(arrays):
        result = anchor.result
        if result is not None and is_combined:
            result = _taken(flow, anchor, result, index)
        yield Element(
            site=site,
            anchor=anchor,
            groups=groups,
            is_pairs=is_pairs,
            index=index,
            array=array,
            result=result,
            is_combined=is_combined,
        )


def _taken(
    flow: Dataflow, anchor: ScheduledOp, whole: Instruction, index: int
) -> Instruction | None:
    """The get-tuple-element that takes one array out of a tuple."""
    for user in flow.users(anchor.place.computation, whole):
        match = _INDEX.search(user.attributes)
        if user.opcode == "get-tuple-element" and match and int(match[1]) == index:
            return user
    return None


def _payload(
    flow: Dataflow, element: Element, kind: Kind, op_name: str | None
) -> tuple[ArrayShape, bool]:
    """The array by the size rule (the whole one) in the program's shape, and whether it is renamed."""
    instruction, scope = element.site.instruction, scope_of(op_name)
    whole = element.array
    if instruction.opcode.startswith("reduce-scatter"):
        whole = seen = scattered_whole(whole, instruction.dimensions, element.group_size)
    else:
        is_split = _is_split_gather(element)
        place = element.anchor.place
        name = kept_name(flow, element)
        seen = as_program_sees(flow, place, element.result, whole, op_name=name, is_split=is_split)
    operand = operand_of(flow, element.site, element.index)
    if operand is not None and kind is Kind.REDUCE_SCATTER and own_name(element.site) is None:
        fed = as_fed(flow, *operand, seen)
        seen = seen if same_but_for_ones(fed, seen) else fed
    if operand is not None:
        seen = without_layer_dim(flow, *operand, seen, scope=scope)
    return seen, seen != whole or element.is_combined


def _hlo_shape(element: Element) -> str:
    """The instruction's own shape, with all of its arrays when it is combined."""
    return element.site.instruction.shape if element.is_combined else str(element.array)


def _is_split_gather(element: Element) -> bool:
    """Whether an all-gather laid the devices along a dim of their own, which is not the program's."""
    instruction = element.site.instruction
    if not instruction.opcode.startswith("all-gather") or not instruction.dimensions:
        return False
    dim = instruction.dimensions[0]
    return element.array.dims[dim : dim + 1] == (element.group_size,)
