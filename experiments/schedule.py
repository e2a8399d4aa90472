"""Overlap in a schedule: the compiler's cycle estimates, and how many are between start and done.

The compiler writes `estimated_cycles` on most instructions, in cycles of the chip's clock. Collectives,
kernels (custom calls), sorts and gathers have none; they are counted. The sums are not times: a
collective with more cycles in its window overlaps with more work, which may or may not be enough.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshscope.readers.hlo.communication import is_communicating_kernel
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import (
    CallContext,
    CallSite,
    call_sites,
    first_of_each_chain,
    trip_count,
)
from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.hlo.semantics import (
    KIND_OF_OPCODE,
    explicit_op_name,
    is_asynchronous,
    scheduled_op_of,
)
from meshscope.readers.hlo.transfers import is_host_transfer, is_peer_transfer

# Bookkeeping, calls (their work is that of the called computation), and address computations.
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"}
    | {"partition-id", "replica-id", "while", "call", "conditional"}
)
_FREE_CALLS = frozenset({"AllocateBuffer", "ConcatBitcast"})
_BESIDE_THE_CORE = ("-start", "-update", "-done")  # their work runs outside the core


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A collective in the schedule; `count` is how often it runs.

    A synchronous one (`is_async` false) overlaps with nothing. For an asynchronous one, `hidden_cycles`
    is the estimated work between its start and its done in each execution, and `n_unestimated` the
    number of instructions in between without an estimate.
    """

    instruction: Instruction
    op_name: str | None
    count: int
    is_async: bool
    hidden_cycles: int
    n_unestimated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One execution of a module in the compiler's cycles, including every iteration of its loops.

    `covered_cycles` of the `cycles` are in the window of at least one collective. `unestimated`
    counts executions of instructions without an estimate by opcode, without collectives.
    """

    cycles: int
    covered_cycles: int
    unestimated: Mapping[str, int]
    windows: tuple[Window, ...]


def schedule_of(module: HloModule) -> Schedule:
    """The schedule of a module that has an entry."""
    assert module.entry is not None
    flow = Dataflow(module)
    extents = [(site, _extent(flow, site)) for site in _collectives(module)]
    costs = _Costs(module, [extent for _, extent in extents if extent is not None])
    source_ops = {caller.instruction for site, _ in extents for caller in site.context.callers}
    unestimated: Counter[str] = Counter()
    for site in call_sites(module, _is_unestimated):
        if not _is_inside(site.context) and site.instruction not in source_ops:
            unestimated[site.instruction.opcode] += site.count
    return Schedule(
        cycles=costs.total(module.entry),
        covered_cycles=costs.covered(module.entry),
        unestimated=dict(unestimated.most_common()),
        windows=tuple(_window(costs, site, extent) for site, extent in extents),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """The positions that a computation issues between a start and a done, excluding both."""

    computation: Computation
    between: range


class _Costs:
    """Cycles of computations, cached."""

    def __init__(self, module: HloModule, extents: Iterable[_Extent]) -> None:
        self._module = module
        self._totals: dict[str, int] = {}
        self._in_windows: dict[str, set[int]] = {}
        for extent in extents:
            positions = self._in_windows.setdefault(extent.computation.name, set())
            positions.update(extent.between)

    def total(self, computation: Computation) -> int:
        """Cycles of one execution of a computation."""
        if computation.name not in self._totals:
            works = (self.of(computation, i) for i in computation.instructions)
            self._totals[computation.name] = sum(works)
        return self._totals[computation.name]

    def covered(self, computation: Computation) -> int:
        """The part of `total` within the window of a collective."""
        positions = self._in_windows.get(computation.name, set[int]())
        return sum(
            self.of(computation, instruction)
            if position in positions
            else sum(n * self.covered(c) for c, n in self._called(computation, instruction))
            for position, instruction in enumerate(computation.instructions)
        )

    def of(self, computation: Computation, instruction: Instruction) -> int:
        """Cycles of an instruction: its own estimate, and those of the computations that it calls."""
        estimate = instruction.estimated_cycles or 0
        return estimate + sum(n * self.total(c) for c, n in self._called(computation, instruction))

    def _called(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[Computation, int]]:
        """The scheduled computations that an instruction runs, with their counts.

        Takes the costliest branch of a conditional; a loop of unknown length runs once. Computations
        called by a fusion are not scheduled: the fusion's estimate includes them.
        """
        called = {
            key: [self._module.computation(name, instruction) for name in names]
            for key, names in instruction.called.items()
        }
        match instruction.opcode:
            case "while":
                n = trip_count(self._module, instruction, computation).count
                n = 1 if n is None else n
                times = {"body": n, "condition": n + 1}
                return [(c, times.get(key, 0)) for key, group in called.items() for c in group]
            case "conditional":
                branches = [c for group in called.values() for c in group]
                return [(max(branches, key=self.total), 1)] if branches else []
            case "call":
                return [(c, 1) for c in called.get("to_apply", ())]
            case _:
                return []


def _collectives(module: HloModule) -> list[CallSite]:
    """The call site of each collective, once."""

    def is_wanted(instruction: Instruction) -> bool:
        is_one = instruction.opcode.removesuffix("-start") in KIND_OF_OPCODE
        is_sent = is_host_transfer(instruction) or is_peer_transfer(instruction)
        return is_one or is_sent or is_communicating_kernel(instruction)

    return first_of_each_chain(call_sites(module, is_wanted))


def _extent(flow: Dataflow, site: CallSite) -> _Extent | None:
    """The instructions issued while a collective is in flight; None if it is synchronous."""
    anchor = scheduled_op_of(flow, site)
    if not is_asynchronous(site) or anchor.result is None:
        return None
    computation = anchor.context.computation
    start, done = (computation.instructions.index(i) for i in (anchor.instruction, anchor.result))
    return _Extent(computation=computation, between=range(start + 1, done))


def _window(costs: _Costs, site: CallSite, extent: _Extent | None) -> Window:
    inside = [extent.computation.instructions[i] for i in extent.between] if extent else []
    return Window(
        instruction=site.instruction,
        op_name=explicit_op_name(site),
        count=site.count,
        is_async=is_asynchronous(site),
        hidden_cycles=sum(costs.of(extent.computation, i) for i in inside) if extent else 0,
        n_unestimated=sum(map(_is_unestimated, inside)),
    )


def _is_unestimated(instruction: Instruction) -> bool:
    """Whether the core executes it and the compiler has no estimate."""
    opcode = instruction.opcode
    is_free = opcode in _FREE or instruction.custom_call_target in _FREE_CALLS
    is_beside = opcode.endswith(_BESIDE_THE_CORE) or opcode in KIND_OF_OPCODE
    is_scalar = all(not array.dims for array in instruction.arrays)
    return instruction.estimated_cycles is None and not (is_free or is_beside or is_scalar)


def _is_inside(context: CallContext) -> bool:
    """Whether a call context is inside an instruction of the schedule, such as a fusion."""
    return any(
        c.instruction.opcode not in {"while", "call", "conditional"} for c in context.callers
    )
