"""Where a collective comes from: the op_name that it serves, who wrote it, what the compiler chose for it."""

import re
from collections import deque
from collections.abc import Iterable

from meshscope.events.enums import Kind, Part
from meshscope.readers.hlo.async_fusion import starts_async_chain
from meshscope.readers.hlo.attribution import NO_SCOPE, leaf, scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.semantics import Element, operand_of, wrappers

# What JAX calls the collectives that a program writes (jax/_src/lax/parallel.py), and torch_xla's.
_PROGRAM_PRIMITIVES = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
    | {"all_gather_reduced", "reduce_scatter", "psum_scatter", "all_to_all", "ragged_all_to_all"}
    | {"ppermute", "pbroadcast", "all_reduce", "collective_permute"}
    | {"xla__all_gather", "xla__all_to_all", "xla__collective_permute", "xla__cross_replica_sum"}
)
_BY_PARTITIONER = ("is_spmd_generated", "from-cross-replica-sharding")
_GATHERS = frozenset({Kind.ALL_GATHER, Kind.BROADCAST, Kind.RECV})
_MAX_NEIGHBOURS = 200  # instructions looked at for a name

_ALGORITHM = re.compile(
    r'"collective_algorithm_config":\{(?:"emitter":"(\w+)")?,?(?:"strategy":"(\w+)")?'
)
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([\w-]*?)(?:\.\d+)?(?:_\d+)?"')
_COLORS = re.compile(r"colors:(\d+)")
_GPU_KERNEL = re.compile(r'"kernel_strategy":"KERNEL_STRATEGY_(\w+)"')
_LIBRARY_KERNELS = frozenset({"DEFAULT", "INVALID", "UNSPECIFIED"})  # NCCL chooses
# On GPUs every collective is a start and a done, even where nothing may lie between them.
_SYNCHRONOUS = '"is_sync":true'
_OFFLOADED_RING = re.compile(r'"ring_type":"ICI_RING_TYPE_(\w+)"')


def attributed_op_name(flow: Dataflow, element: Element, kind: Kind) -> str | None:
    """The op_name of a collective; where it names no scope, that of what it serves.

    A combined collective keeps the name of one of its parts, so each part is named by what feeds
    it. A gather serves its users, a reduction what it adds up.
    """
    own = original_op_name(flow, element)
    if not element.is_combined and scope_of(own) != NO_SCOPE:
        return own
    before, behind = _name_before(flow, element), _name_behind(flow, element)
    # The sampler uses the logits, but the head gathers them.
    is_for_sampler = scope_of(behind).part is Part.SAMPLE
    if kind in _GATHERS and not element.is_combined and not is_for_sampler:
        return behind or before or own
    # Experts exchange nothing: what an exchange takes from them is on its way to be combined.
    if kind is Kind.ALL_TO_ALL and scope_of(before).part is Part.MOE_EXPERTS:
        return behind or before or own
    return before or behind or own


def original_op_name(flow: Dataflow, element: Element) -> str | None:
    """The op_name of a collective, or where a rewrite took it, the one left on its sum or behind it.

    A name on a move of its result is that of the collective when it says so, or when what feeds it
    has the same.
    """
    own = explicit_op_name(element.site)
    if scope_of(own) != NO_SCOPE:
        return own
    if (of_sum := _name_of_sum(flow, element)) is not None:
        return of_sum
    if element.result is None:
        return own
    computation, queue = element.scheduled_op.context.computation, deque([element.result])
    for _ in range(_MAX_NEIGHBOURS):
        if not queue:
            break
        moved = flow.moving_users(computation, queue.popleft())
        for name in (mover.op_name for mover in moved):
            if scope_of(name) != NO_SCOPE:
                is_its_own = leaf(name) in _PROGRAM_PRIMITIVES
                return name if is_its_own or name == _name_before(flow, element) else own
        queue += moved
    return own


def _name_of_sum(flow: Dataflow, element: Element) -> str | None:
    """The op_name that the numbers have which a reduction adds up; None where it says no scope.

    JAX gives each reduction a computation of its own, whose parameters are named after it.
    """
    instruction = element.site.instruction
    computation = flow.module.computations.get(instruction.called.get("to_apply", ("",))[0])
    if computation is None or element.is_combined:
        return None
    names = (i.op_name for i in computation.instructions if i.opcode == "parameter")
    return next(
        (n for n in names if leaf(n) in _PROGRAM_PRIMITIVES and scope_of(n) != NO_SCOPE), None
    )


def explicit_op_name(site: CallSite) -> str | None:
    """The op_name of the instruction, or of the start or fusion around it."""
    names = (i.op_name for i in (site.instruction, *wrappers(site)))
    return next((name for name in names if name is not None), None)


def _name_before(flow: Dataflow, element: Element) -> str | None:
    if (operand := operand_of(flow, element.site, element.index)) is None:
        return None
    _, computed = flow.origin(
        *operand
    )  # a fusion has the name of its dearest part, not of its result
    if scope_of(computed.op_name) != NO_SCOPE:
        return computed.op_name
    queue = deque([operand])
    for _ in range(_MAX_NEIGHBOURS):
        if not queue:
            return None
        context, instruction = queue.popleft()
        if scope_of(instruction.op_name) != NO_SCOPE:
            return instruction.op_name
        queue += flow.inputs(context, instruction)
    return None


def _name_behind(flow: Dataflow, element: Element) -> str | None:
    if element.result is None:
        return None
    computation = element.scheduled_op.context.computation
    queue = deque([element.result])
    for _ in range(_MAX_NEIGHBOURS):
        if not queue:
            return None
        users = flow.users(computation, queue.popleft())
        for user in users:
            if scope_of(user.op_name) != NO_SCOPE:
                return user.op_name
        queue += users
    return None


def inserted_by(flow: Dataflow, element: Element) -> str | None:
    """`program` or `partitioner`; None when the text does not tell."""
    instructions = (element.site.instruction, *wrappers(element.site))
    if any(mark in i.frontend_attributes for i in instructions for mark in _BY_PARTITIONER):
        return "partitioner"
    # Between slices an op_name is lost, but the rendezvous is called as the operation was.
    rendezvous = _RENDEZVOUS.search(element.site.instruction.attributes)
    name = rendezvous[1] if rendezvous else original_op_name(flow, element)
    if name is None:
        return None
    return "program" if leaf(name) in _PROGRAM_PRIMITIVES else "partitioner"


def is_asynchronous(site: CallSite) -> bool:
    """Whether a start issues it and a done waits for it."""
    instructions = (site.instruction, *wrappers(site))
    if any(_SYNCHRONOUS in i.attributes for i in instructions):
        return False
    return any(i.opcode.endswith("-start") for i in instructions) or starts_async_chain(site)


def algorithm_of(site: CallSite) -> str | None:
    """Emitter, strategy and colours that the compiler chose; None when the text does not say.

    For example `RotatedPincerEmitter/UniDirection1DRingStrategy, 2 colors`; on GPUs a kernel of XLA's
    own, `TRITON_TWO_SHOT`, in place of the library's.
    """
    instructions: Iterable[Instruction] = (site.instruction, *wrappers(site))
    for text in (i.attributes for i in instructions):
        if (match := _ALGORITHM.search(text)) and (match[1] or match[2]):
            name = "/".join(piece for piece in match.groups() if piece)
            colors = _COLORS.search(text, match.end())
            return f"{name}, {colors[1]} colors" if colors else name
        if '"collective_offload_config"' in text:
            rings = _OFFLOADED_RING.findall(text)
            directions = "+".join(dict.fromkeys(rings)) or "no ring told"
            return f"SparseCore/{directions}, {len(rings)} colors"
        if (kernel := _GPU_KERNEL.search(text)) and kernel[1] not in _LIBRARY_KERNELS:
            return kernel[1]
    return None
