"""What every instruction of a module does between devices, custom kernels included: a collective, nothing, or something unknown.

The kernels of tpu-inference and SGLang-JAX declare neither bytes nor FLOPs. Their operands are tokens
[T, D], packed as [T, 2, D/2] in bf16; weights [E, 2, D, F] and [E, F, D] of the local experts; logits [T, all
experts]; and a buffer [all experts, ...] for the results. The name contains the experts per token and, in
SGLang-JAX, the tokens per block: `fused-moe-k_8-bt_512_128_128-...` (source: kernels/fused_moe in both
projects, November 2026).
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod

from meshscope.events.collective import Effect, OtherOperation
from meshscope.events.enums import Kind, Phase, wire_factor
from meshscope.files import own_table
from meshscope.readers.hlo import semantics
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallSite, call_sites
from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE
from meshscope.readers.hlo.transfers import is_host_transfer, is_megascale, is_peer_transfer
from meshscope.serialize import from_plain
from meshscope.units import DTYPE_BITS

_NAME = re.compile(r"fused[-_](?:ep[-_])?moe(?:[-_]v\d+)?[-_]k[-_](\d+)(?:.*?[-_]bt[-_](\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """Sizes of the kernel on one device; `n_expert_weights` are the numbers in the matrices of one expert."""

    dtype: str
    n_tokens: int
    block_tokens: int  # that read the weights together; all if unknown
    n_active: int  # experts of a token
    n_local: int  # experts of the device
    n_experts: int  # experts of all devices
    hidden: int
    n_expert_weights: int
    weights_bytes: int

    @property
    def n_ranks(self) -> int:
        """Devices that share the experts."""
        return self.n_experts // self.n_local

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of the rows that a device sends to experts and gets back, its own experts included."""
        row_bytes = self.hidden * DTYPE_BITS[self.dtype] // 8
        return 2 * self.n_tokens * self.n_active * row_bytes


def fused_experts(computation: Computation, kernel: Instruction) -> FusedExperts | None:
    """The sizes of a fused mixture of experts; None for another kernel, or one with other operands."""
    match = _NAME.search(f"{kernel.name} {kernel.op_name or ''}")
    arrays = [p.arrays[0] for p in computation.producers(kernel) if len(p.arrays) == 1]
    if match is None or not arrays or arrays[0].dtype not in DTYPE_BITS:
        return None
    tokens, hidden = arrays[0], prod(arrays[0].dims[1:])
    # Rows of the residual stream fill the last two dims of the buffer for results.
    buffers = [a for a in arrays[1:] if len(a.dims) == 4 and prod(a.dims[2:]) == hidden]
    others = [array for array in arrays[1:] if array not in buffers]
    weights = [a for a in others if len(a.dims) in {3, 4} and hidden in a.dims[1:]]
    n_experts = max((array.dims[0] for array in buffers), default=0)
    if not weights or not n_experts or n_experts % weights[0].dims[0]:
        return None
    return FusedExperts(
        dtype=tokens.dtype,
        n_tokens=tokens.dims[0],
        block_tokens=int(match[2] or tokens.dims[0]),
        n_active=int(match[1]),
        n_local=weights[0].dims[0],
        n_experts=n_experts,
        hidden=hidden,
        n_expert_weights=sum(prod(array.dims[1:]) for array in weights),
        weights_bytes=sum(array.n_bytes or 0 for array in weights),
    )


_REMOTE_BYTES = re.compile(r'"remote_bytes_transferred\\?":\s*\\?"?(\d+)')
_NUMBER = re.compile(r"(\.\d+)+$")
_COMMUNICATES = re.compile(r'"has_communication\\?":\s*true')


def is_communicating_kernel(instruction: Instruction) -> bool:
    """Whether a custom call declares communication between chips."""
    if instruction.opcode != "custom-call":
        return False
    has_flag = _COMMUNICATES.search(instruction.attributes) is not None
    return has_flag or bool(_remote_bytes(instruction))


def kernel_of(flow: Dataflow, site: CallSite, devices: Devices) -> Operation:
    """The operation of a kernel: a permute without groups, with the bytes that it declares, if any.

    A Pallas kernel copies to chips of its choice (`make_async_remote_copy`), which the text does
    not show. A fused mixture of experts is the exchange of rows that its shapes imply.
    """
    kernel, op_name = site.instruction, semantics.explicit_op_name(site)
    n_bytes = _remote_bytes(kernel)
    caveats = (*site.caveats, "the kernel chooses its target chips at run time")
    if n_bytes is None:
        caveats += ("the kernel does not declare how many bytes it sends",)
    operation = Operation(
        site=site,
        scheduled_op=semantics.scheduled_op_of(flow, site),
        kind=Kind.PERMUTE,
        opcode="custom-call",
        groups=(),
        group_size=devices.mesh.n_devices,
        is_pairs=True,
        dtype=None,
        shape=None,
        payload_bytes=n_bytes,
        wire_bytes=None if n_bytes is None else Fraction(n_bytes),
        hlo_shape=kernel.shape,
        op_name=op_name,
        scope=scope_of(op_name),
        is_async=semantics.is_asynchronous(site),
        algorithm=f"kernel {_NUMBER.sub('', kernel.name)}",
        inserted_by="program",
        count=site.count,
        caveats=caveats,
    )
    sizes = fused_experts(site.context.computation, kernel)
    if sizes is None or sizes.n_ranks == 1:
        return operation
    n_ranks, n_bytes = sizes.n_ranks, sizes.exchanged_bytes  # under balanced routing
    mesh = devices.mesh
    fitting = [axes for axes in mesh.axis_subsets if prod(map(mesh.size, axes)) == n_ranks]
    groups = mesh.groups(*fitting[0]) if len(fitting) == 1 else ()
    unknown = () if groups else (f"no axis of the mesh has the {n_ranks} devices of the experts",)
    return replace(
        operation,
        kind=Kind.ALL_TO_ALL,
        groups=groups,
        group_size=n_ranks,
        is_pairs=False,
        dtype=sizes.dtype,
        payload_bytes=n_bytes,
        wire_bytes=n_bytes * wire_factor(Kind.ALL_TO_ALL, n_ranks),
        algorithm=f"{operation.algorithm}, balanced routing",
        caveats=(*site.caveats, *unknown),
    )


def _remote_bytes(instruction: Instruction) -> int | None:
    match = _REMOTE_BYTES.search(instruction.attributes)
    return int(match[1]) or None if match else None


_ASYNC_SUFFIX = re.compile(r"-(start|update|done)$")
_TPU_KERNEL = "tpu_custom_call"
_KERNEL_CONFIG = re.compile(r'custom_call_config\\?":')
_COLLECTIVE_ID = re.compile(r'"collective_id\\?":')  # of a kernel with a barrier between devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperations:
    """Opcodes and targets of custom calls that do not communicate between devices."""

    roofline: frozenset[str]  # bytes and FLOPs bound their time
    other: frozenset[str]
    free: frozenset[str]  # without work on the core, except what they call
    free_calls: frozenset[str]
    custom_calls: frozenset[str]
    custom_call_prefixes: tuple[str, ...]
    communicating: str  # words of other targets with such a prefix
    host_custom_calls: frozenset[str]
    host_custom_call_prefixes: tuple[str, ...]


@cache
def local_operations() -> LocalOperations:
    """The table of `local_operations.toml`."""
    return from_plain(LocalOperations, own_table("readers/hlo/local_operations.toml"))


def is_collective(instruction: Instruction) -> bool:
    """Whether the instruction starts a collective or a transfer between devices, which has rows."""
    if instruction.opcode.removesuffix("-start") in KIND_OF_OPCODE:
        return "calls" not in instruction.called  # else the computation has the collective
    return (
        is_megascale(instruction)
        or is_peer_transfer(instruction)
        or is_communicating_kernel(instruction)
    )


def other_operations(module: HloModule, phase: Phase | None) -> tuple[OtherOperation, ...]:
    """Operations without rows that may communicate between devices, or that move data to or from the host."""
    counts: Counter[tuple[str, str | None, Effect]] = Counter()
    is_alone = module.n_devices == 1
    for site in call_sites(module, lambda i: effect_of(i) is not None):
        instruction = site.instruction
        effect = effect_of(instruction)
        if effect is not None and not (is_alone and effect is Effect.UNKNOWN):
            opcode = _ASYNC_SUFFIX.sub("", instruction.opcode)
            counts[opcode, instruction.custom_call_target, effect] += site.count
    return tuple(
        OtherOperation(phase=phase, opcode=opcode, target=target, effect=effect, count=count)
        for (opcode, target, effect), count in counts.items()
    )


def effect_of(instruction: Instruction) -> Effect | None:  # noqa: PLR0911  one per case
    """What an instruction does beyond its device, if it is no collective; None for nothing."""
    opcode = _ASYNC_SUFFIX.sub("", instruction.opcode)
    known = local_operations()
    if opcode in known.roofline or opcode in known.other or is_collective(instruction):
        return None
    if opcode in KIND_OF_OPCODE or instruction.opcode.endswith(("-done", "-update")):
        return None  # the start counts
    if opcode == "recv" and "xla_megascale" in instruction.attributes:
        return None  # the send counts
    if opcode in {"infeed", "outfeed"} or is_host_transfer(instruction):
        return Effect.HOST
    if opcode == "custom-call":
        target, attributes = instruction.custom_call_target or "", instruction.attributes
        if target in known.host_custom_calls or target.startswith(known.host_custom_call_prefixes):
            return Effect.HOST
        # A user's kernel with side effects may write to a peer's memory.
        is_users = "triton" in target and "custom_call_has_side_effect=true" in attributes
        is_named = target.startswith(known.custom_call_prefixes) and not re.search(
            known.communicating, target
        )
        if target in known.custom_calls or is_named:
            return Effect.UNKNOWN if is_users else None
        states_all = target == _TPU_KERNEL and _KERNEL_CONFIG.search(attributes) is not None
        if states_all and not _COLLECTIVE_ID.search(attributes):
            return None
    return Effect.UNKNOWN
