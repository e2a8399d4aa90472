"""What a collective means, whatever the compiler wrote it as."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from meshscope.events.enums import Kind
from meshscope.readers.hlo.async_fusion import async_chain_of, starts_async_chain
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallContext, CallSite
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.spec.plan.mesh import Groups

KIND_OF_OPCODE: dict[str, Kind] = {
    "all-reduce": Kind.ALL_REDUCE,
    "all-gather": Kind.ALL_GATHER,
    "reduce-scatter": Kind.REDUCE_SCATTER,
    "all-to-all": Kind.ALL_TO_ALL,
    "ragged-all-to-all": Kind.ALL_TO_ALL,
    "collective-permute": Kind.PERMUTE,
    "collective-broadcast": Kind.BROADCAST,
}
# libtpu's fusion of an all-reduce and the slice behind it: it runs the reduce-scatter phase only
# ("How to Scale Your Model", profiling chapter, reads `calls=%all-reduce-scatter` as a reduce-scatter).
ALL_REDUCE_SCATTER = "all-reduce-scatter"

_PARTITION = frozenset({"partition-id", "replica-id"})
_ZERO = frozenset({"0", "-0", "false"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledOp:
    """The instruction that stands for a collective in the schedule: itself, or the start or fusion around it.

    `result` is what holds its result there (the done of a start); None when a fusion computes on.
    """

    context: CallContext
    instruction: Instruction
    result: Instruction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One array that a collective carries; a combined collective carries several."""

    site: CallSite
    scheduled_op: ScheduledOp
    groups: Groups
    is_pairs: bool
    index: int
    array: ArrayShape  # of the result
    result: Instruction | None  # what holds the array at the scheduled_op
    is_combined: bool

    @property
    def group_size(self) -> int:
        """Devices in one group; a (source, target) pair counts as 2."""
        return len(self.groups[0]) if self.groups else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """What an element means, what carries it out, and as which kind that costs."""

    kind: Kind
    opcode: str
    executed_as: Kind


def semantics_of(flow: Dataflow, element: Element) -> Semantics:
    """The kind of a collective by what is done with its operand and its result."""
    opcode = element.site.instruction.opcode.removesuffix("-start")
    kind = KIND_OF_OPCODE[opcode]
    if kind is Kind.ALL_REDUCE and element.group_size > 1:
        if _adds_up_parts(flow, element):
            return Semantics(kind=Kind.ALL_GATHER, opcode=opcode, executed_as=kind)
        if _keeps_own_part(flow, element):
            if _runs_scatter_only(element.site):
                kind, opcode = Kind.REDUCE_SCATTER, ALL_REDUCE_SCATTER
            return Semantics(kind=Kind.REDUCE_SCATTER, opcode=opcode, executed_as=kind)
    return Semantics(kind=kind, opcode=opcode, executed_as=kind)


def scheduled_op_of(flow: Dataflow, site: CallSite) -> ScheduledOp:
    """The scheduled instruction around a collective, and the one that holds its result."""
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
    """The fusions, calls and starts right around a collective, innermost first."""
    callers = [caller.instruction for caller in reversed(site.context.callers)]
    return tuple(takewhile(is_wrapper, callers))


def _done(flow: Dataflow, context: CallContext, start: Instruction) -> Instruction:
    """The done that belongs to a start, through its updates; the instruction itself when it is no start."""
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
    """What feeds an operand of a collective, looked up outside the wrappers around it."""
    context = site.context
    producer = context.computation.producer(site.instruction, index)
    while producer and producer.opcode == "parameter":
        if not context.caller or not is_wrapper(context.caller.instruction):
            break
        found = flow.inputs(context, producer)
        if not found:
            break
        context, producer = found[0]
    return (context, producer) if producer else None


def _adds_up_parts(flow: Dataflow, element: Element) -> bool:
    """Whether each device wrote its part into its context among zeros, so that the sum is a gather."""
    if (operand := operand_of(flow, element.site, element.index)) is None:
        return False
    context, update = flow.origin(*operand)
    inputs = context.computation.producers(update)
    if update.opcode != "dynamic-update-slice" or len(inputs) < 3:
        return False
    base, part, *offsets = inputs
    is_part = _size(part) * element.group_size == prod(element.array.dims)
    return is_part and _is_zero(flow, context, base) and _is_own_place(flow, context, offsets)


def _keeps_own_part(flow: Dataflow, element: Element) -> bool:
    """Whether every use of the result takes only the device's own part of it, a scatter."""
    inner = element.site.context
    if element.scheduled_op.context is not inner and flow.users(
        inner.computation, element.site.instruction
    ):
        return _is_sliced(flow, inner, element.site.instruction, element)
    if element.result is None:
        return False
    return _is_sliced(flow, element.scheduled_op.context, element.result, element)


def _is_sliced(flow: Dataflow, context: CallContext, used: Instruction, element: Element) -> bool:
    users = flow.users(context.computation, used)
    return bool(users) and all(_takes_part(flow, context, u, used, element) for u in users)


def _takes_part(
    flow: Dataflow, context: CallContext, user: Instruction, used: Instruction, element: Element
) -> bool:
    if user.opcode == "dynamic-slice":
        inputs = context.computation.producers(user)
        is_part = _size(user) * element.group_size == prod(element.array.dims)
        is_of_it = inputs[:1] == (used,)
        return is_part and is_of_it and _is_own_place(flow, context, inputs[1:])
    if flow.keeps_values(user):
        return _is_sliced(flow, context, user, element)
    if user.opcode != "fusion":
        return False
    inner = flow.inside(context, user)
    parameter = inner.computation.parameters.get(user.operands.index(used.name))
    return parameter is not None and _is_sliced(flow, inner, parameter, element)


def _runs_scatter_only(site: CallSite) -> bool:
    return any("AllReduceScatter" in caller.attributes for caller in wrappers(site))


def _is_own_place(flow: Dataflow, context: CallContext, offsets: Iterable[Instruction]) -> bool:
    return any(flow.depends_on(context, offset, _PARTITION) for offset in offsets)


def _is_zero(flow: Dataflow, context: CallContext, base: Instruction) -> bool:
    for _ in range(8):  # a broadcast of a constant, perhaps handed in through fusions
        if base.opcode == "constant":
            return base.operand_text in _ZERO
        inputs = flow.inputs(context, base)
        if (
            base.opcode not in {"broadcast", "parameter", "bitcast", "copy", "convert"}
            or not inputs
        ):
            return False
        context, base = inputs[0]
    return False


def _size(instruction: Instruction) -> int:
    """Elements of an array; 0 for a tuple."""
    arrays = instruction.arrays
    return prod(arrays[0].dims) if len(arrays) == 1 else 0
