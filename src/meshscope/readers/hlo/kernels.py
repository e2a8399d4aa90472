"""Kernels that communicate between chips, which HLO text shows as opaque custom calls."""

import re
from fractions import Fraction

from meshscope.events.enums import Kind
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.devices import Devices
from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.provenance import explicit_op_name, is_asynchronous
from meshscope.readers.hlo.semantics import scheduled_op_of

_REMOTE_BYTES = re.compile(r'"remote_bytes_transferred":\s*"?(\d+)"?')
_COMMUNICATES = re.compile(r'"has_communication":\s*true')


def is_communicating_kernel(instruction: Instruction) -> bool:
    """Whether a custom call declares communication between chips."""
    if instruction.opcode != "custom-call":
        return False
    return (
        bool(_remote_bytes(instruction)) or _COMMUNICATES.search(instruction.attributes) is not None
    )


def kernel_of(flow: Dataflow, site: CallSite, devices: Devices) -> Operation:
    """The operation of a kernel: a permute without groups, with the bytes that it declares, if any.

    A Pallas kernel copies to chips of its choice (`make_async_remote_copy`), which the text does
    not show.
    """
    n_bytes = _remote_bytes(site.instruction)
    op_name = explicit_op_name(site)
    caveats = (*site.caveats, "the kernel chooses its target chips at run time")
    if n_bytes is None:
        caveats += ("the kernel does not declare how many bytes it sends",)
    return Operation(
        site=site,
        scheduled_op=scheduled_op_of(flow, site),
        kind=Kind.PERMUTE,
        opcode="custom-call",
        groups=(),
        group_size=devices.mesh.n_devices,
        is_pairs=True,
        dtype=None,
        shape=None,
        payload_bytes=n_bytes,
        wire_bytes=None if n_bytes is None else Fraction(n_bytes),
        hlo_shape=site.instruction.shape,
        op_name=op_name,
        scope=scope_of(op_name),
        is_async=is_asynchronous(site),
        algorithm=f"kernel {site.instruction.custom_call_target}",
        inserted_by="program",
        count=site.count,
        caveats=caveats,
    )


def _remote_bytes(instruction: Instruction) -> int | None:
    """The bytes sent to other chips by the kernel's cost estimate; None if missing or 0."""
    match = _REMOTE_BYTES.search(instruction.attributes)
    return int(match[1]) or None if match else None
