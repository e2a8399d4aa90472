"""The call sites of instructions, how often each executes, and collectives that libtpu spreads over fusions.

Every fusion that carries the collective holds a copy of its instruction with the same `chain_id`.
The first fusion passes it to a custom call `AsyncCollectiveStart`, the last one takes it from
`AsyncCollectiveDone`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshscope.errors import ParseError
from meshscope.readers.hlo.loops import trip_count
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

MAX_DEPTH = 64  # of nested calls; real programs nest a handful of loops
MAX_SITES = 1_000_000

# The beginning of the caveat about a branch.
BRANCH_CAVEAT = "a branch of conditional"

# Opcodes that run the computations they name. Reducers (of all-reduce, sort) hold no collectives.
_CALLERS = frozenset({"fusion", "while", "call", "conditional", "custom-call"})

Predicate = Callable[[Instruction], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """A computation with its chain of callers, outermost first."""

    computation: Computation
    callers: tuple["CallSite", ...] = ()

    @property
    def caller(self) -> "CallSite | None":
        """The site that calls this computation; None for the entry."""
        return self.callers[-1] if self.callers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """An instruction in one call context, with its number of executions per run of the module.

    `caveats` name the factors of `count` that the text does not show; `count` leaves them out.
    """

    instruction: Instruction
    context: CallContext
    count: int
    caveats: tuple[str, ...]


class _Entered(NamedTuple):
    """A called computation, its executions per run of the module, and the caveats of that count."""

    context: CallContext
    n_runs: int
    caveats: tuple[str, ...]


def call_sites(module: HloModule, is_wanted: Predicate) -> list[CallSite]:
    """Every call site of the wanted instructions, in schedule order."""
    relevant = _computations_reaching(module, is_wanted)
    sites: list[CallSite] = []
    for root in _roots(module, relevant):
        for site in _walk(module, root, relevant, is_wanted):
            sites.append(site)
            if len(sites) > MAX_SITES:
                computation = root.context.computation
                raise ParseError(
                    f"{module.origin}:{computation.line}: more than {MAX_SITES} collectives are "
                    f"reachable from '{computation.name}'. Real programs have thousands; is the "
                    "text damaged?"
                )
    return sites


def runs_called_computations(instruction: Instruction) -> bool:
    """Whether the computations that the instruction names run when it does."""
    return instruction.opcode in _CALLERS or instruction.opcode.endswith("-start")


def _callees_of(instruction: Instruction) -> tuple[str, ...]:
    if not runs_called_computations(instruction):
        return ()
    return tuple(name for names in instruction.called.values() for name in names)


def _computations_reaching(module: HloModule, is_wanted: Predicate) -> frozenset[str]:
    """Names of the computations that hold a wanted instruction, directly or through calls."""
    callers: dict[str, list[str]] = {}
    pending: list[str] = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if is_wanted(instruction):
                pending.append(computation.name)
            for name in _callees_of(instruction):
                callers.setdefault(name, []).append(computation.name)
    reaching: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in reaching:
            reaching.add(name)
            pending += callers.get(name, ())
    return frozenset(reaching)


def _roots(module: HloModule, relevant: frozenset[str]) -> Iterator[_Entered]:
    """The entry; in a truncated text, every relevant computation without a caller."""
    if module.cut_off_at is None:
        assert module.entry is not None
        yield _Entered(CallContext(computation=module.entry), 1, ())
        return
    instructions = (i for c in module.computations.values() for i in c.instructions)
    called = {name for instruction in instructions for name in _callees_of(instruction)}
    for name, computation in module.computations.items():
        if name in relevant and name not in called:
            cut = f"the text is cut off at line {module.cut_off_at}: how often '{name}' runs is unknown"
            yield _Entered(CallContext(computation=computation), 1, (cut,))


def _walk(
    module: HloModule, entered: _Entered, relevant: frozenset[str], is_wanted: Predicate
) -> Iterator[CallSite]:
    context, count, caveats = entered
    if context.computation.name not in relevant:
        return
    if len(context.callers) > MAX_DEPTH:
        raise ParseError(
            f"{module.origin}:{context.computation.line}: calls nest deeper than {MAX_DEPTH} at "
            f"'{context.computation.name}'. Does a computation call itself? The text is damaged."
        )
    for instruction in context.computation.instructions:
        site = CallSite(instruction=instruction, context=context, count=count, caveats=caveats)
        if is_wanted(instruction):
            yield site
        if not runs_called_computations(instruction):
            continue
        for key, name in ((key, n) for key, names in instruction.called.items() for n in names):
            if name in relevant:
                n_runs, unknown = 1, ()
                if instruction.opcode == "while":
                    loop = trip_count(module, instruction, context.computation)
                    # The last check of the condition ends the loop.
                    n_runs = 1 if loop.count is None else loop.count + (key == "condition")
                    unknown = () if loop.reason is None else (loop.reason,)
                elif instruction.opcode == "conditional":
                    unknown = (f"{BRANCH_CAVEAT} '{instruction.name}', counted as taken",)
                callee = CallContext(
                    computation=module.computation(name, instruction),
                    callers=(*context.callers, site),
                )
                inner = _Entered(callee, count * n_runs, caveats + unknown)
                yield from _walk(module, inner, relevant, is_wanted)


AsyncChain = tuple[str, int | None]  # chain_id and channel_id

_CHAIN_ID = re.compile(r'\bchain_id="([^"]*)"')


def starts_async_chain(site: CallSite) -> bool:
    """Whether the collective feeds an `AsyncCollectiveStart` in its computation."""
    return async_chain_of(site.instruction) is not None and any(
        call.custom_call_target == "AsyncCollectiveStart" and site.instruction.name in call.operands
        for call in site.context.computation.instructions
        if call.opcode == "custom-call"
    )


def first_of_each_chain(sites: Iterable[CallSite]) -> list[CallSite]:
    """The sites without those that continue an asynchronous chain."""
    chain_of_site = [(site, async_chain_of(site.instruction)) for site in sites]
    started = {
        chain for site, chain in chain_of_site if chain is not None and starts_async_chain(site)
    }
    return [
        site for site, chain in chain_of_site if chain not in started or starts_async_chain(site)
    ]


def async_chain_of(instruction: Instruction) -> AsyncChain | None:
    """The chain that a collective belongs to; None if it belongs to none."""
    match = _CHAIN_ID.search(instruction.attributes)
    return (match[1], instruction.channel_id) if match else None


def async_chain_ends(module: HloModule) -> dict[AsyncChain, Instruction]:
    """The last fusion of every chain, which holds the result of the collective."""
    chain_in: dict[str, AsyncChain] = {}
    for computation in module.computations.values():
        for call in computation.instructions:
            if call.opcode == "custom-call" and call.custom_call_target == "AsyncCollectiveDone":
                for producer in computation.producers(call):
                    if (chain := async_chain_of(producer)) is not None:
                        chain_in[computation.name] = chain
                break
    return {
        chain_in[name]: instruction
        for computation in (module.computations.values() if chain_in else ())
        for instruction in computation.instructions
        if instruction.opcode == "fusion"
        for name in instruction.called.get("calls", ())
        if name in chain_in
    }
