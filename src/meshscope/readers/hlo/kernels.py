"""Kernels that communicate between chips, which HLO text shows as opaque custom calls."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import prod

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.devices import Devices
from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.fused_experts import FusedExperts, fused_experts
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.provenance import explicit_op_name, is_asynchronous
from meshscope.readers.hlo.semantics import scheduled_op_of

_REMOTE_BYTES = re.compile(r'"remote_bytes_transferred\\?":\s*\\?"?(\d+)')
_NUMBER = re.compile(r"(\.\d+)+$")
_COMMUNICATES = re.compile(r'"has_communication\\?":\s*true')


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
    not show. A fused mixture of experts is the exchange of rows that its shapes imply.
    """
    sizes = fused_experts(site.context.computation, site.instruction)
    if sizes is not None and sizes.n_ranks > 1:
        return _exchange_of(flow, site, devices, sizes)
    n_bytes = _remote_bytes(site.instruction)
    caveats = (*site.caveats, "the kernel chooses its target chips at run time")
    if n_bytes is None:
        caveats += ("the kernel does not declare how many bytes it sends",)
    return replace(
        _operation(flow, site, n_bytes),
        group_size=devices.mesh.n_devices,
        wire_bytes=None if n_bytes is None else Fraction(n_bytes),
        caveats=caveats,
    )


def _operation(flow: Dataflow, site: CallSite, n_bytes: int | None) -> Operation:
    """What any kernel that communicates is: without groups, and of one device."""
    op_name = explicit_op_name(site)
    return Operation(
        site=site,
        scheduled_op=scheduled_op_of(flow, site),
        kind=Kind.PERMUTE,
        opcode="custom-call",
        groups=(),
        group_size=1,
        is_pairs=True,
        dtype=None,
        shape=None,
        payload_bytes=n_bytes,
        wire_bytes=None,
        hlo_shape=site.instruction.shape,
        op_name=op_name,
        scope=scope_of(op_name),
        is_async=is_asynchronous(site),
        algorithm=f"kernel {_name(site.instruction)}",
        inserted_by="program",
        count=site.count,
        caveats=site.caveats,
    )


def _exchange_of(
    flow: Dataflow, site: CallSite, devices: Devices, sizes: FusedExperts
) -> Operation:
    """The all-to-all of rows to experts and back, under balanced routing."""
    groups = _groups_of_size(devices.mesh, sizes.n_ranks)
    n_ranks, n_bytes = sizes.n_ranks, sizes.exchanged_bytes
    unknown = () if groups else (f"no axis of the mesh has the {n_ranks} devices of the experts",)
    kernel = _operation(flow, site, n_bytes)
    return replace(
        kernel,
        kind=Kind.ALL_TO_ALL,
        groups=groups,
        group_size=n_ranks,
        is_pairs=False,
        dtype=sizes.dtype,
        wire_bytes=n_bytes * wire_factor(Kind.ALL_TO_ALL, n_ranks),
        algorithm=f"{kernel.algorithm}, balanced routing",
        caveats=(*site.caveats, *unknown),
    )


def _groups_of_size(mesh: Mesh, size: int) -> Groups:
    """The groups of the only axis or axes of this size; () if there are none or several."""
    names = [name for name, n in mesh.axes if n > 1]
    fitting = [
        axes
        for n_axes in range(1, len(names) + 1)
        for axes in combinations(names, n_axes)
        if prod(mesh.size(name) for name in axes) == size
    ]
    return mesh.groups(*fitting[0]) if len(fitting) == 1 else ()


def _name(kernel: Instruction) -> str:
    """The kernel's name without XLA's number."""
    return _NUMBER.sub("", kernel.name)


def _remote_bytes(instruction: Instruction) -> int | None:
    """The bytes sent to other chips by the kernel's cost estimate; None if missing or 0."""
    match = _REMOTE_BYTES.search(instruction.attributes)
    return int(match[1]) or None if match else None
