"""The kind of a collective by its effect, whatever opcode the compiler chose, and its origin.

The origin is its op_name, who inserted it, and the algorithm that the compiler chose.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from meshscope.events.collective import REMATERIALIZATION, Groups, size_of_groups
from meshscope.events.enums import Kind, OpClass, Part
from meshscope.readers.hlo.attribution import NO_SCOPE, leaf, scope_of
from meshscope.readers.hlo.dataflow import Dataflow, Location
from meshscope.readers.hlo.executions import (
    CallContext,
    CallSite,
    async_chain_of,
    starts_async_chain,
)
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

T = TypeVar("T")

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


class Semantics(NamedTuple):
    """The kind of an element by its effect, its opcode, and the kind by which it executes."""

    kind: Kind
    opcode: str
    executed_as: Kind


def semantics_of(flow: Dataflow, element: Element) -> Semantics:
    """The effect of a collective, by the producers of its operand and the users of its result."""
    opcode = element.site.instruction.opcode.removesuffix("-start")
    kind = effect = KIND_OF_OPCODE[opcode]
    if kind is Kind.ALL_REDUCE and element.group_size > 1:
        kept = kept_slices(flow, element)
        if _sums_disjoint_shards(flow, element):
            effect = Kind.ALL_GATHER
        # Every user slices the device's shard out of the result.
        elif kept and all(one.is_of_device and _is_shard(element, one) for one in kept):
            effect = Kind.REDUCE_SCATTER
            if any("AllReduceScatter" in caller.attributes for caller in wrappers(element.site)):
                kind, opcode = Kind.REDUCE_SCATTER, ALL_REDUCE_SCATTER
    return Semantics(effect, opcode, kind)


def scheduled_op_of(flow: Dataflow, site: CallSite) -> ScheduledOp:
    """The scheduled instruction of a collective and the one that holds its result."""
    context, instruction = site.context, site.instruction
    result: Instruction | None = _done(flow, context, instruction)
    while (caller := context.caller) and is_wrapper(caller.instruction):
        is_result = result and flow.skip_moves(context, context.computation.root) is result
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


def operand_of(flow: Dataflow, site: CallSite, index: int) -> Location | None:
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


class KeptSlice(NamedTuple):
    """A part of a result that users take: by the device's ID, or the same on all devices, at a place.

    `starts` [n_devices, dim] are the first indices of a part of each device, if they are known.
    """

    is_of_device: bool
    place: str
    whole: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    starts: tuple[tuple[int, ...], ...] | None = None


def kept_slices(flow: Dataflow, element: Element) -> dict[KeptSlice, int]:
    """The slices that users take of the result, with their elements; empty if one takes it whole."""
    inner, outer = element.site.context, element.scheduled_op.context
    if outer is not inner and flow.users(inner.computation, element.site.instruction):
        return _sliced(flow, inner, element.site.instruction)
    return {} if element.result is None else _sliced(flow, outer, element.result)


def kept_frac(slices: Mapping[KeptSlice, int], n_elements: int) -> Fraction | None:
    """The fraction of a result that some user on a device takes; None if it may be all."""
    of_device = [size for one, size in slices.items() if one.is_of_device]
    common = [size for one, size in slices.items() if not one.is_of_device]
    kept = max(of_device, default=0) + sum(common)
    return Fraction(kept, n_elements) if 0 < kept < n_elements else None


def _sliced(flow: Dataflow, context: CallContext, used: Instruction) -> dict[KeptSlice, int]:
    slices: dict[KeptSlice, int] = {}
    for user in flow.users(context.computation, used):
        taken = dict[KeptSlice, int]()  # nothing: it takes the result whole
        if user.opcode == "dynamic-slice":
            source, *offsets = context.computation.producers(user)
            if source is used:
                is_of_device = any(flow.depends_on(context, o, _PARTITION) for o in offsets)
                starts = _starts(flow, context, offsets) if is_of_device else None
                one = KeptSlice(is_of_device, user.name, _dims(source), _dims(user), starts)
                taken[one] = _size(user)
        elif user.opcode == "slice":
            place = user.braced("slice") or user.name
            taken[KeptSlice(is_of_device=False, place=place)] = _size(user)
        elif flow.keeps_values(user):
            taken = _sliced(flow, context, user)
        elif (prefetched := flow.joined_slices(context.computation, user)) is not None:
            taken = _sliced(flow, context, prefetched)
        elif user.opcode == "fusion":
            inner = flow.inside(context, user)
            parameter = inner.computation.parameters.get(user.operands.index(used.name))
            taken = _sliced(flow, inner, parameter) if parameter else taken
        if not taken:
            return {}
        slices |= taken
    return slices


def _is_shard(element: Element, taken: KeptSlice) -> bool:
    """Whether the devices of a group take parts of different shards of the array.

    The compiler merges the slice of a reduce-scatter with one that follows, such as the last position.
    """
    n = element.group_size
    if taken.starts is None or not element.groups:
        return prod(taken.sizes) * n == prod(element.array.dims)
    every = np.array(taken.starts)
    for group in element.groups:
        starts = every[[device % len(every) for device in group]]
        in_own = False
        for dim, (size, part) in enumerate(zip(taken.whole, taken.sizes, strict=True)):
            shard, first = size // n, starts[:, dim]
            if size % n == 0 and 0 < part <= shard:
                of_first, of_last = first // shard, (first + part - 1) // shard
                in_own |= (of_first == of_last).all() and sorted(of_first) == list(range(n))
        is_split = prod(taken.sizes) * n == prod(taken.whole)  # over several dimensions
        if not in_own and not (is_split and len(set(map(tuple, starts.tolist()))) == n):
            return False
    return True


def _starts(
    flow: Dataflow, context: CallContext, offsets: Iterable[Instruction]
) -> tuple[tuple[int, ...], ...] | None:
    known = [flow.by_device(context, offset) for offset in offsets]
    numbers = [start for start in known if start is not None and start.ndim == 1]
    if not numbers or len(numbers) < len(known):
        return None
    return tuple(map(tuple, np.stack(numbers, axis=1).tolist()))


def _dims(instruction: Instruction) -> tuple[int, ...]:
    return instruction.arrays[0].dims if len(instruction.arrays) == 1 else (0,)


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


# JAX primitives (jax/_src/lax/parallel.py, all versions) and torch_xla ops for explicit collectives.
_PROGRAM_PRIMITIVES = frozenset(
    {"psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin", "all_gather", "pgather"}
    | {"all_gather_invariant", "all_gather_reduced", "reduce_scatter", "psum_scatter"}
    | {"unreduced_reduce_scatter", "all_to_all", "ragged_all_to_all", "ppermute", "psend"}
    | {"precv", "pbroadcast", "all_reduce", "collective_permute", "xla__all_gather"}
    | {"xla__all_to_all", "xla__all_reduce", "xla__collective_permute"}
    | {"xla__cross_replica_sum", "xla__reduce_scatter"}
)
# XLA names a repeated instruction all-gather.69.remat, and the next ones .remat2 and so on.
_REMATERIALIZED = re.compile(r"\.remat\d*(?:$|\.)")
_BY_PARTITIONER = ("is_spmd_generated", "from-cross-replica-sharding")
_GATHERS = frozenset({Kind.ALL_GATHER, Kind.BROADCAST, Kind.RECV})
_MAX_NEIGHBORS = 200  # instructions to search for a name

_ALGORITHM = re.compile(
    r'"collective_algorithm_config":\{(?:"emitter":"(\w+)")?,?(?:"strategy":"(\w+)")?'
)
_RENDEZVOUS = re.compile(r"([\w-]*?)(?:\.\d+)?(?:_\d+)?")
_COLORS = re.compile(r"colors:(\d+)")
_MULTISTEP = re.compile(r"is_multistep:([\d,]+)")  # of each phase: in steps (1) or in one shot (0)
_GPU_KERNEL = re.compile(r'"kernel_strategy":"KERNEL_STRATEGY_(\w+)"')
_LIBRARY_KERNELS = frozenset({"DEFAULT", "INVALID", "UNSPECIFIED"})  # NCCL chooses
# On GPUs every collective has a start and a done, even if it is synchronous.
_SYNCHRONOUS = '"is_sync":true'
_OFFLOADED_RING = re.compile(r'"ring_type":"ICI_RING_TYPE_(\w+)"')


def attributed_op_name(flow: Dataflow, element: Element, kind: Kind) -> str | None:
    """The op_name of a collective, or of the operation it serves if its own names no scope.

    A gather serves its users, a reduction its operand. A combined collective has the name of only
    one of its arrays, so each array takes the name of its operand.
    """
    original = original_op_name(flow, element)
    if not element.is_combined and scope_of(original) != NO_SCOPE:
        return original
    before, after = _name_before(flow, element), None
    if element.result is not None:
        computation = element.scheduled_op.context.computation
        users = _nearest([element.result], lambda i: flow.users(computation, i))
        after = next((user.op_name for user in users if scope_of(user.op_name) != NO_SCOPE), None)
    # The sampler uses the logits, but the output head gathers them.
    is_for_sampler = scope_of(after).part is Part.SAMPLE
    is_gather = kind in _GATHERS and not element.is_combined and not is_for_sampler
    # An all-to-all of expert outputs belongs to the combine step after the experts.
    is_combine = kind is Kind.ALL_TO_ALL and scope_of(before).part is Part.MOE_EXPERTS
    names = (after, before) if is_gather or is_combine else (before, after)
    return names[0] or names[1] or original


def _nearest(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """What follows, breadth first, from at most _MAX_NEIGHBORS of them."""
    queue = deque(start)
    for _ in range(_MAX_NEIGHBORS):
        if not queue:
            return
        neighbors = list(following(queue.popleft()))
        yield from neighbors
        queue += neighbors


def _name_before(flow: Dataflow, element: Element) -> str | None:
    if (operand := operand_of(flow, element.site, element.index)) is None:
        return None
    # A fusion has the name of its costliest instruction, which may not be its root.
    _, computed = flow.origin(*operand)
    producers = (one for _, one in _nearest([operand], lambda place: flow.inputs(*place)))
    names = (one.op_name for one in (computed, operand[1], *producers))
    return next((name for name in names if scope_of(name) != NO_SCOPE), None)


def original_op_name(flow: Dataflow, element: Element) -> str | None:
    """The op_name of a collective; if a rewrite dropped it, its reducer's or result's.

    The name of a move of the result counts if it names a collective, or equals the operand's name.
    """
    explicit = explicit_op_name(element.site)
    if scope_of(explicit) != NO_SCOPE:
        return explicit
    if (reducer_name := _reducer_name(flow, element)) is not None:
        return reducer_name
    if element.result is None:
        return explicit
    computation = element.scheduled_op.context.computation
    for moved in _nearest([element.result], lambda i: flow.moving_users(computation, i)):
        if scope_of(name := moved.op_name) != NO_SCOPE:
            is_its = _is_of_program(name) or name == _name_before(flow, element)
            return name if is_its else explicit
    return explicit


def _reducer_name(flow: Dataflow, element: Element) -> str | None:
    """The op_name in the reducer of a reduction; None if it names no scope.

    JAX lowers each reduction with a separate reducer whose parameters have its op_name.
    """
    instruction = element.site.instruction
    computation = flow.module.computations.get(instruction.called.get("to_apply", ("",))[0])
    if computation is None or element.is_combined:
        return None
    names = (i.op_name for i in computation.instructions if i.opcode == "parameter")
    return next((n for n in names if _is_of_program(n) and scope_of(n) != NO_SCOPE), None)


def explicit_op_name(site: CallSite) -> str | None:
    """The op_name of the instruction, else of the start or fusion around it."""
    names = (i.op_name for i in (site.instruction, *wrappers(site)))
    return next((name for name in names if name is not None), None)


def inserted_by(flow: Dataflow, element: Element) -> str | None:
    """Who inserted the collective; None if unknown.

    `program`, `partitioner`, or `rematerialization` for one that the compiler repeats to save memory.
    """
    instructions = (element.site.instruction, *wrappers(element.site))
    if any(_REMATERIALIZED.search(i.name) for i in instructions):
        return REMATERIALIZATION
    attributes = "".join(i.braced("frontend_attributes") or "" for i in instructions)
    if any(mark in attributes for mark in _BY_PARTITIONER):
        return "partitioner"
    # A collective across slices loses its op_name, but its rendezvous is named after it.
    rendezvous = _RENDEZVOUS.fullmatch(element.site.instruction.rendezvous or "?")
    name = rendezvous[1] if rendezvous else original_op_name(flow, element)
    if name is None:
        return None
    return "program" if _is_of_program(name) else "partitioner"


def _is_of_program(op_name: str | None) -> bool:
    primitive = leaf(op_name) or ""
    return primitive.removesuffix("_start").removesuffix("_done") in _PROGRAM_PRIMITIVES


def is_asynchronous(site: CallSite) -> bool:
    """Whether a start issues the collective and a done waits for it."""
    instructions = (site.instruction, *wrappers(site))
    if any(_SYNCHRONOUS in i.attributes for i in instructions):
        return False
    return any(i.opcode.endswith("-start") for i in instructions) or starts_async_chain(site)


def algorithm_of(site: CallSite) -> str | None:
    """The emitter, strategy and colors that the compiler chose; None if the text has none.

    For example `RotatedPincerEmitter/UniDirection1DRingStrategy, 2 colors`. Short rings add for each
    phase whether it is in steps (1) or in one shot (0): `multistep 1,0`. On GPUs, the name of an
    XLA kernel that replaces the library's, such as `TRITON_TWO_SHOT`.
    """
    for text in (i.attributes for i in (site.instruction, *wrappers(site))):
        if (match := _ALGORITHM.search(text)) and (match[1] or match[2]):
            colors = _COLORS.search(text, match.end())
            steps = _MULTISTEP.search(text, match.end())
            name = "/".join(filter(None, match.groups()))
            name += f", {colors[1]} colors" if colors else ""
            return name + (f", multistep {steps[1]}" if steps else "")
        if '"collective_offload_config"' in text:
            rings = _OFFLOADED_RING.findall(text)
            directions = "+".join(dict.fromkeys(rings)) or "unknown ring"
            return f"SparseCore/{directions}, {len(rings)} colors"
        if (kernel := _GPU_KERNEL.search(text)) and kernel[1] not in _LIBRARY_KERNELS:
            return kernel[1]
    return None


# Both operands of an einsum have the batch, so neither is a weight: queries and keys, or weights and values.
_TWO_ACTIVATIONS = re.compile(r"/\w*b\w*,\w*b\w*->")
_TWO_BATCH_DIMS = re.compile(
    r"lhs_batch_dim(?:s=\{|ensions\":\[\")\d+\D{1,3}\d|dim_labels=\w*\d\w*\d\w*_"
)


def op_class(flow: Dataflow, computation: Computation, instruction: Instruction) -> OpClass:
    """What an instruction that is no collective does.

    Attention is a kernel of the part `attn`, or a product there with two batch dims (sequences and heads), or of
    two arrays with the batch.
    """
    part, opcode = scope_of(instruction.op_name).part, instruction.opcode
    target = instruction.custom_call_target or ""
    if opcode == "custom-call" and not target.startswith("__cublas$"):
        if part is Part.ATTN:
            return OpClass.ATTENTION
        return OpClass.EXPERTS if part is Part.MOE_EXPERTS else OpClass.KERNEL
    if opcode.startswith(("copy", "slice-start", "async-start")):
        return OpClass.COPY
    inner = [(computation, instruction)]
    if opcode == "fusion":
        inner = list(flow.inner(flow.fused(instruction)))
    products = [i for _, i in inner if i.opcode in {"dot", "convolution", "custom-call"}]
    if not products:
        return OpClass.OTHER
    names = {instruction.op_name, *(product.op_name for product in products)}
    is_attention = any(_TWO_ACTIVATIONS.search(name or "") for name in names)
    is_attention |= any(_TWO_BATCH_DIMS.search(product.attributes) for product in products)
    return OpClass.ATTENTION if part is Part.ATTN and is_attention else OpClass.MATMUL
