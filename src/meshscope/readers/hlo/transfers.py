"""Sends and recvs: between devices, and of collectives that libtpu's megascale runtime executes over DCN."""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import lru_cache

from meshscope.errors import ParseError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.readers.hlo import shapes
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.operations import Operation, operation, total_bytes
from meshscope.readers.hlo.semantics import (
    Element,
    ScheduledOp,
    Semantics,
    attributed_op_name,
    operand_of,
)

OPCODE = "send/recv"
TILE = (8, 128)  # an all-reduce may send its array tile by tile: `[24,8,128]` for `[8,3072]`
ALGORITHM = "megascale over DCN"

# Transfer types in text of libtpu 0.0.42 and 0.0.50.
_KIND_OF_TRANSFER = {
    kind.value.upper(): kind
    for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
} | {"ONE_TO_ONE": Kind.PERMUTE}
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

_TARGET = re.compile(r'_xla_megascale_target="?((?:\{\{.*?\}\})|(?:\{[^{}]*\}x\{[^{}]*\}))"?')
_TO_HOST = ("is_host_transfer=true", "_xla_host_transfer_")
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\s*(?:\{[\d,\s]*\}[\s,]*)*\})')
_SLICES_BY_DEVICES = re.compile(r"\{(\d+(?:,\d+)*)\}x\{(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)\}")
# A device number is (slice index + 1) times this, plus the device index in the slice.
_SLICE_UNIT = 100_000


def is_megascale(instruction: Instruction) -> bool:
    """Whether the instruction is a send that starts a collective across slices."""
    return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes


def is_host_transfer(instruction: Instruction) -> bool:
    """Whether the instruction is a send to the host or a recv from it."""
    return _is_transfer(instruction) and any(mark in instruction.attributes for mark in _TO_HOST)


def _is_transfer(instruction: Instruction) -> bool:
    return instruction.opcode in {"send", "recv"} and "xla_megascale" not in instruction.attributes


def is_peer_transfer(instruction: Instruction) -> bool:
    """Whether the instruction is a send to other devices or a recv from them."""
    return _is_transfer(instruction) and not is_host_transfer(instruction)


def peer_transfer_of(flow: Dataflow, site: CallSite, devices: Devices) -> list[Operation]:
    """The transfer of a send and its recv; nothing for a recv whose send is in the program.

    XLA's pipelines of GPUs and `jax.lax.psend` and `precv` state the pairs; a program of one stage alone has
    only its sends or its recvs, perhaps without the other device.
    """
    instruction, computation = site.instruction, site.context.computation
    partner = _partners(flow).get(id(instruction))
    if instruction.opcode == "recv" and partner is not None:
        return []
    arrays = tuple(a for a in instruction.arrays if a.dtype != "token")[:-1]
    if not arrays:
        raise ParseError(
            f"{devices.module.where(instruction)}: '{instruction.name}' has no array. "
            "Give the text as the compiler wrote it."
        )
    text = _pairs_text(instruction)
    dones = [  # the recv-done that follows, else its own done
        user
        for begin in (partner, instruction)
        if begin is not None and computation.get(begin.name) is begin
        for user in flow.users(computation, begin)
        if user.opcode.endswith("-done") and user.line > instruction.line
    ]
    result = dones[0] if dones else None
    element = Element(
        site=site,
        scheduled_op=ScheduledOp(context=site.context, instruction=instruction, result=result),
        groups=() if text is None else devices.pairs(instruction, text),
        is_pairs=True,
        index=0,
        array=arrays[0],
        result=None,
        is_combined=len(arrays) > 1,
    )
    kind = Kind.PERMUTE if partner is not None else Kind(instruction.opcode)
    n_bytes = total_bytes(arrays)
    transfer = operation(
        flow,
        element,
        Semantics(kind, OPCODE if partner else instruction.opcode, kind),
        attributed_op_name(flow, element, kind),
        arrays[0] if len(arrays) == 1 else None,
        carried_bytes=n_bytes,
        hlo_shape=None if len(arrays) == 1 else instruction.shape,
        is_async=True,
    )
    sent = None if n_bytes is None else n_bytes * wire_factor(kind, 2)
    return [replace(transfer, group_size=2, wire_bytes=sent)]


@lru_cache(maxsize=1)  # of the module that is read
def _partners(flow: Dataflow) -> Mapping[int, Instruction]:
    """The recv of each send and the send of each recv by its id: in order, with the same array and pairs, or channel."""
    transfers = [i for i in flow.module.instructions if is_peer_transfer(i)]
    of_channel = {i.channel_id: text for i in transfers if (text := _pairs_text(i)) is not None}
    alike = defaultdict[Hashable, dict[str, list[Instruction]]](lambda: {"send": [], "recv": []})
    for one in transfers:
        name = _pairs_text(one) or of_channel.get(one.channel_id, one.channel_id)
        alike[name, one.arrays[:1]][one.opcode].append(one)
    return {
        id(one): others[min(n, len(others) - 1)]
        for sends, recvs in map(dict.values, alike.values())
        for ones, others in ((sends, recvs), (recvs, sends))
        if others
        for n, one in enumerate(ones)
    }


def _pairs_text(transfer: Instruction) -> str | None:
    text = transfer.attribute("source_target_pairs")
    match = None if text else _PAIRS.search(transfer.attributes)
    text = match[1] if match else text
    return None if text is None else re.sub(r"\s", "", text)


@lru_cache(maxsize=1)
def _recvs(flow: Dataflow) -> Mapping[tuple[str, str | None], Instruction]:
    """The first recv of each computation and rendezvous."""
    return {
        (computation.name, recv.rendezvous): recv
        for computation in flow.module.computations.values()
        for recv in reversed(computation.instructions)
        if recv.opcode == "recv" and recv.rendezvous
    }


def transfer_of(flow: Dataflow, site: CallSite, devices: Devices) -> Operation:
    """The collective that a send starts and the recv with the same rendezvous ends."""
    send, computation = site.instruction, site.context.computation
    recv = _recvs(flow).get((computation.name, send.rendezvous))
    if not send.arrays or (recv is not None and not recv.arrays):
        raise ParseError(
            f"{devices.module.where(send)}: '{send.name}' or its recv has no array. "
            "Give the text as the compiler wrote it."
        )
    match = _TYPE.search(send.attributes)
    if match is None or match[1] not in _KIND_OF_TRANSFER:
        raise ParseError(
            f"{devices.module.where(send)}: transfer type {match[1] if match else ''!r} of '{send.name}' is unknown "
            f"(known: {', '.join(_KIND_OF_TRANSFER)}). Please report this line."
        )
    kind = _KIND_OF_TRANSFER[match[1]]
    groups, is_pairs = _groups(devices, send)
    whole = send if kind in {Kind.REDUCE_SCATTER, Kind.PERMUTE} or recv is None else recv
    dones = () if recv is None else flow.users(computation, recv)
    done = next((i for i in dones if i.opcode == "recv-done"), None)
    received = () if done is None else flow.users(computation, done)
    result = next((i for i in received if i.opcode == "get-tuple-element"), None)
    element = Element(
        site=site,
        scheduled_op=ScheduledOp(context=site.context, instruction=send, result=result),
        groups=groups,
        is_pairs=is_pairs,
        index=0,
        array=whole.arrays[0],
        result=result,
        is_combined=False,
    )
    op_name = attributed_op_name(flow, element, kind)
    payload = _payload(flow, element, kind, op_name)
    return operation(
        flow,
        element,
        Semantics(kind, OPCODE, kind),
        op_name,
        payload,
        carried_bytes=(element.array if kind is Kind.ALL_REDUCE else payload).n_bytes,
        hlo_shape=str(element.array) if payload != element.array else None,
        algorithm=ALGORITHM,
        is_async=True,
    )


def _payload(flow: Dataflow, element: Element, kind: Kind, op_name: str | None) -> ArrayShape:
    """The array in the program's shape, without the dim of stacked layers."""
    operand = operand_of(flow, element.site, element.index)
    payload, context = element.array, element.scheduled_op.context
    if kind is Kind.ALL_GATHER:
        payload = shapes.merge_device_dim(element.site.instruction.arrays[0], payload)
    elif kind is not Kind.REDUCE_SCATTER:
        payload = shapes.shape_in_program(
            flow, context, element.result, payload, op_name=op_name, is_split=True
        )
    if operand is None:
        return payload
    if kind is Kind.ALL_REDUCE:
        pad = flow.skip_moves(*operand)
        source = operand[0].computation.producer(pad)
        if pad.custom_call_target == "ZeroCrop" and source and len(source.arrays) == 1:
            payload = source.arrays[0]  # before libtpu padded it to whole lanes
        if payload.dims[-2:] == TILE:
            payload = shapes.untiled_shape(flow, *operand, payload)
    return shapes.without_layer_dim(flow, *operand, payload, scope=scope_of(op_name))


def _groups(devices: Devices, send: Instruction) -> tuple[Groups, bool]:
    """The device IDs of `_xla_megascale_target`, and whether they are (source, target) pairs."""
    match = _TARGET.search(send.attributes)
    text, n = match[1] if match else "", devices.module.n_devices
    if product := _SLICES_BY_DEVICES.fullmatch(text):
        slices = [int(number) - 1 for number in product[1].split(",")]
        ranges = [piece.partition(":") for piece in product[2].split(",")]
        groups = tuple(
            tuple(index * n + device for index in slices)
            for device in range(n)
            if any(int(low) <= device <= int(high or low) for low, _, high in ranges)
        )
    else:
        numbers = (map(int, re.findall(r"\d+", g)) for g in re.findall(r"\{([\d,>-]+)\}", text))
        groups = tuple(
            tuple((one // _SLICE_UNIT - 1) * n + one % _SLICE_UNIT for one in group)
            for group in numbers
        )
    all_devices = range(devices.mesh.n_devices)
    if not groups or any(device not in all_devices for group in groups for device in group):
        raise ParseError(
            f"{devices.module.where(send)}: target of '{send.name}' not understood: {text!r}. "
            'Expected "{1,2}x{0:3}" or groups like {{100000,200000}}; please report this line.'
        )
    return groups, "->" in text
