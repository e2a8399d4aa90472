"""The kind of a collective by its effect, whatever opcode the compiler chose for it."""

from dataclasses import dataclass
from itertools import takewhile
from math import prod

from meshscope.events.collective import Groups, size_of_groups
from meshscope.events.enums import Kind
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import (
    CallContext,
    CallSite,
    async_chain_of,
    starts_async_chain,
)
from meshscope.readers.hlo.module import ArrayShape, Instruction

KIND_OF_OPCODE: dict[str, Kind] = {
    "all-reduce": Kind.ALL_REDUCE,
    "all-gather": Kind.ALL_GATHER,
    "reduce-scatter": Kind.REDUCE_SCATTER,
    "all-to-all": Kind.ALL_TO_ALL,
    "ragged-all-to-all": Kind.ALL_TO_ALL,
    "collective-permute": Kind.PERMUTE,
    "collective-broadcast": Kind.BROADCAST,
    "cross-replica-sum": Kind.ALL_REDUCE,  # the name of an all-reduce up to 2019
    "all-reduce-scatter": Kind.REDUCE_SCATTER,
}
# libtpu's fusion of an all-reduce and a slice of its result, which runs only the reduce-scatter phase
# ("How to Scale Your Model", profiling chapter, reads `calls=%all-reduce-scatter` as a reduce-scatter).
ALL_REDUCE_SCATTER = "all-reduce-scatter"

_PARTITION = frozenset({"partition-id", "replica-id"})
_ZERO = frozenset({"0", "-0", "false"})
_PASSED_ON = frozenset({"broadcast", "parameter", "bitcast", "copy", "convert"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledOp:
    """The scheduled instruction of a collective: itself, or the start or fusion around it.

    `result` holds its result in the schedule, e.g. the done of a start; None if a fusion uses the
    result itself.
    """

    context: CallContext
    instruction: Instruction
    result: Instruction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One array of a collective; a combined collective has several."""

    site: CallSite
    scheduled_op: ScheduledOp
    groups: Groups
    is_pairs: bool
    index: int
    array: ArrayShape  # of the result
    result: Instruction | None  # holds the array in the schedule
    is_combined: bool

    @property
    def group_size(self) -> int:
        """Devices in one group; a (source, target) pair counts as 2."""
        return size_of_groups(self.groups, is_pairs=self.is_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """The kind of an element by its effect, its opcode, and the kind by which it executes."""

    kind: Kind
    opcode: str
    executed_as: Kind


def semantics_of(flow: Dataflow, element: Element) -> Semantics:
    """The effect of a collective, by the producers of its operand and the users of its result."""
    opcode = element.site.instruction.opcode.removesuffix("-start")
    kind = effect = KIND_OF_OPCODE[opcode]
    if kind is Kind.ALL_REDUCE and element.group_size > 1:
        n, sizes = prod(element.array.dims), kept_sizes(flow, element)
        if _sums_disjoint_shards(flow, element):
            effect = Kind.ALL_GATHER
        # Every user slices the device's shard out of the result.
        elif sizes and all(size * element.group_size == n for size in sizes):
            effect = Kind.REDUCE_SCATTER
            if any("AllReduceScatter" in caller.attributes for caller in wrappers(element.site)):
                kind, opcode = Kind.REDUCE_SCATTER, ALL_REDUCE_SCATTER
    return Semantics(kind=effect, opcode=opcode, executed_as=kind)


def scheduled_op_of(flow: Dataflow, site: CallSite) -> ScheduledOp:
    """The scheduled instruction of a collective and the one that holds its result."""
    context, instruction = site.context, site.instruction
    result: Instruction | None = _done(flow, context, instruction)
    while (caller := context.caller) and is_wrapper(caller.instruction):
        is_result = (
            result is not None and flow.skip_moves(context, context.computation.root) is result
        )
        context, instruction = caller.context, caller.instruction
        result = _done(flow, context, instruction) if is_result else None
    if starts_async_chain(site) and (chain := async_chain_of(site.instruction)):
        end = flow.async_chain_ends.get(chain)
        result = context.computation.get(end.name) if end else None
    return ScheduledOp(context=context, instruction=instruction, result=result)


def is_wrapper(caller: Instruction) -> bool:
    """Whether a caller only wraps what it calls: a fusion, a call, an asynchronous start."""
    return caller.opcode in {"fusion", "call", "custom-call"} or caller.opcode.endswith("-start")


def wrappers(site: CallSite) -> tuple[Instruction, ...]:
    """The fusions, calls and starts directly around a collective, innermost first."""
    callers = [caller.instruction for caller in reversed(site.context.callers)]
    return tuple(takewhile(is_wrapper, callers))


def _done(flow: Dataflow, context: CallContext, start: Instruction) -> Instruction:
    """The done of a start, after its updates; the instruction itself if it is not a start."""
    while start.opcode.endswith(("-start", "-update")):
        users = flow.users(context.computation, start)
        following = [u for u in users if u.opcode.endswith(("-update", "-done"))]
        if not following:
            break
        start = following[0]
    return start


def operand_of(
    flow: Dataflow, site: CallSite, index: int
) -> tuple[CallContext, Instruction] | None:
    """The producer of a collective's operand, outside the wrappers around the collective."""
    context = site.context
    producer = context.computation.producer(site.instruction, index)
    while producer and producer.opcode == "parameter":
        if not context.caller or not is_wrapper(context.caller.instruction):
            break
        inputs = flow.inputs(context, producer)
        if not inputs:
            break
        context, producer = inputs[0]
    return (context, producer) if producer else None


def _sums_disjoint_shards(flow: Dataflow, element: Element) -> bool:
    """Whether each device contributes its shard, padded with zeros: the sum is an all-gather."""
    if (operand := operand_of(flow, element.site, element.index)) is None:
        return False
    context, update = flow.origin(*operand)
    inputs = context.computation.producers(update)
    if update.opcode != "dynamic-update-slice" or len(inputs) < 3:
        return False
    base, part, *offsets = inputs
    is_shard = _size(part) * element.group_size == prod(element.array.dims)
    is_by_device = any(flow.depends_on(context, offset, _PARTITION) for offset in offsets)
    return is_shard and _is_zero(flow, context, base) and is_by_device


def kept_sizes(flow: Dataflow, element: Element) -> frozenset[int]:
    """The elements of each slice that users take of the result by the device's ID; empty if one takes it whole."""
    inner = element.site.context
    if element.scheduled_op.context is not inner and flow.users(
        inner.computation, element.site.instruction
    ):
        return _sliced(flow, inner, element.site.instruction)
    if element.result is None:
        return frozenset()
    return _sliced(flow, element.scheduled_op.context, element.result)


def _sliced(flow: Dataflow, context: CallContext, used: Instruction) -> frozenset[int]:
    sizes: set[int] = set()
    for user in flow.users(context.computation, used):
        taken = frozenset[int]()
        if user.opcode == "dynamic-slice":
            source, *offsets = context.computation.producers(user)
            if source is used and any(flow.depends_on(context, o, _PARTITION) for o in offsets):
                taken = frozenset({_size(user)})
        elif flow.keeps_values(user):
            taken = _sliced(flow, context, user)
        elif (prefetched := flow.joined_slices(context.computation, user)) is not None:
            taken = _sliced(flow, context, prefetched)
        elif user.opcode == "fusion":
            inner = flow.inside(context, user)
            parameter = inner.computation.parameters.get(user.operands.index(used.name))
            taken = frozenset() if parameter is None else _sliced(flow, inner, parameter)
        if not taken:  # it takes the result whole
            return frozenset()
        sizes |= taken
    return frozenset(sizes)


def _is_zero(flow: Dataflow, context: CallContext, base: Instruction) -> bool:
    for _ in range(8):  # a broadcast constant, possibly passed into fusions
        if base.opcode == "constant":
            return base.operand_text in _ZERO
        inputs = flow.inputs(context, base) if base.opcode in _PASSED_ON else ()
        if not inputs:
            return False
        context, base = inputs[0]
    return False


def _size(instruction: Instruction) -> int:
    arrays = instruction.arrays
    return prod(arrays[0].dims) if len(arrays) == 1 else 0
