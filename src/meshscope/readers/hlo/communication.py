"""What every instruction of a module does between devices: a collective, nothing, or something unknown."""

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from meshscope.events.collective import Effect, OtherOperation
from meshscope.events.enums import Phase
from meshscope.readers.hlo.executions import call_sites
from meshscope.readers.hlo.kernels import is_communicating_kernel
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE
from meshscope.readers.hlo.transfers import is_host_transfer, is_megascale, is_peer_transfer
from meshscope.serialize import from_plain

_ASYNC_SUFFIX = re.compile(r"-(start|update|done)$")
_TPU_KERNEL = "tpu_custom_call"
_KERNEL_CONFIG = re.compile(r'custom_call_config\\?":')
_COLLECTIVE_ID = re.compile(r'"collective_id\\?":')  # of a kernel with a barrier between devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperations:
    """Opcodes and targets of custom calls that do not communicate between devices."""

    roofline: frozenset[str]  # bytes and FLOPs bound their time
    other: frozenset[str]
    custom_calls: frozenset[str]
    custom_call_prefixes: tuple[str, ...]
    host_custom_calls: frozenset[str]
    host_custom_call_prefixes: tuple[str, ...]


@cache
def local_operations() -> LocalOperations:
    """The table of `local_operations.toml`."""
    text = (files("meshscope.readers.hlo") / "local_operations.toml").read_text(encoding="utf-8")
    return from_plain(LocalOperations, tomllib.loads(text))


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
    for site in call_sites(module, lambda i: _effect(module, i) is not None):
        instruction = site.instruction
        effect = _effect(module, instruction)
        assert effect is not None
        opcode = _ASYNC_SUFFIX.sub("", instruction.opcode)
        counts[opcode, instruction.custom_call_target, effect] += site.count
    return tuple(
        OtherOperation(phase=phase, opcode=opcode, target=target, effect=effect, count=count)
        for (opcode, target, effect), count in counts.items()
    )


def _effect(module: HloModule, instruction: Instruction) -> Effect | None:
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
        return _effect_of_call(module, instruction)
    return Effect.UNKNOWN if module.n_devices > 1 else None


def _effect_of_call(module: HloModule, call: Instruction) -> Effect | None:
    known, target = local_operations(), call.custom_call_target or ""
    if target in known.host_custom_calls or target.startswith(known.host_custom_call_prefixes):
        return Effect.HOST
    if target in known.custom_calls or target.startswith(known.custom_call_prefixes):
        return None
    states_local = target == _TPU_KERNEL and _KERNEL_CONFIG.search(call.attributes) is not None
    if module.n_devices == 1 or (states_local and not _COLLECTIVE_ID.search(call.attributes)):
        return None
    return Effect.UNKNOWN
