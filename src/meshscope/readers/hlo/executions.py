"""Where in the tree of calls an instruction executes, and how often in one run of the module."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshscope.errors import ParseError
from meshscope.readers.hlo.loops import trip_count
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

MAX_DEPTH = 64  # of calls; programs nest a handful of loops
MAX_SITES = 1_000_000

# How the caveat about a branch starts.
BRANCH_CAVEAT = "a branch of conditional"

# Opcodes whose called computations run; the reducers of all-reduce or sort hold no collectives.
_CALLERS = frozenset({"fusion", "while", "call", "conditional", "custom-call"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """A computation as reached through its callers, outermost first."""

    computation: Computation
    callers: tuple["CallSite", ...] = ()

    @property
    def caller(self) -> "CallSite | None":
        """The instruction that calls this computation here; None at the entry."""
        return self.callers[-1] if self.callers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """An instruction at a place, with the times it executes in one run of the module.

    `caveats` say what is not known of that count; then it is the count with unknown factors left out.
    """

    instruction: Instruction
    context: CallContext
    count: int
    caveats: tuple[str, ...]


def call_sites(module: HloModule, is_wanted: Callable[[Instruction], bool]) -> list[CallSite]:
    """Every execution site of the wanted instructions, in schedule order."""
    holders = _holders(module, is_wanted)
    found: list[CallSite] = []
    for root, caveats in _roots(module, holders):
        for site in _walk(
            module, CallContext(computation=root), holders, is_wanted, count=1, caveats=caveats
        ):
            found.append(site)
            if len(found) > MAX_SITES:
                raise ParseError(
                    f"{module.origin}:{root.line}: more than {MAX_SITES} collectives are reached from "
                    f"'{root.name}'. Real programs have thousands; is the text damaged?"
                )
    return found


def runs_called_computations(instruction: Instruction) -> bool:
    """Whether the computations that the instruction names run when it does."""
    return instruction.opcode in _CALLERS or instruction.opcode.endswith("-start")


def _holders(module: HloModule, is_wanted: Callable[[Instruction], bool]) -> frozenset[str]:
    """Names of the computations that hold a wanted instruction, directly or through a call."""
    callers: dict[str, list[str]] = {}
    found: list[str] = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if is_wanted(instruction):
                found.append(computation.name)
            if runs_called_computations(instruction):
                for names in instruction.called.values():
                    for name in names:
                        callers.setdefault(name, []).append(computation.name)
    holders: set[str] = set()
    while found:
        name = found.pop()
        if name not in holders:
            holders.add(name)
            found += callers.get(name, ())
    return frozenset(holders)


def _roots(module: HloModule, holders: frozenset[str]) -> list[tuple[Computation, tuple[str, ...]]]:
    """The entry; in a text that is cut off, every holder that nothing in it calls."""
    if module.cut_off_at is None:
        assert module.entry is not None
        return [(module.entry, ())]
    called = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions
        if runs_called_computations(instruction)
        for names in instruction.called.values()
        for name in names
    }
    return [
        (
            module.computations[name],
            (
                f"the text is cut off at line {module.cut_off_at}: how often '{name}' runs is unknown",
            ),
        )
        for name in module.computations
        if name in holders and name not in called
    ]


def _walk(  # noqa: PLR0913  the state of the walk
    module: HloModule,
    context: CallContext,
    holders: frozenset[str],
    is_wanted: Callable[[Instruction], bool],
    *,
    count: int,
    caveats: tuple[str, ...],
) -> Iterator[CallSite]:
    if context.computation.name not in holders:
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
        if runs_called_computations(instruction):
            for inner, times, caveat in _entered(module, site, holders):
                yield from _walk(
                    module, inner, holders, is_wanted, count=count * times, caveats=caveats + caveat
                )


def _entered(
    module: HloModule, site: CallSite, holders: frozenset[str]
) -> Iterator[tuple[CallContext, int, tuple[str, ...]]]:
    """The computations that the instruction runs: where, how often each time, and what is doubtful."""
    caller, here = site.instruction, site.context
    for key, names in caller.called.items():
        for name in names:
            if name not in holders:
                continue
            computation = module.computation(name, caller)
            times, caveat = 1, ()
            if caller.opcode == "while":
                loop = trip_count(module, caller, here.computation)
                caveat = (loop.reason,) if loop.reason else ()
                # The condition runs once more than the body, to find that it is over.
                times = 1 if loop.count is None else loop.count + (key == "condition")
            elif caller.opcode == "conditional":
                caveat = (f"{BRANCH_CAVEAT} '{caller.name}', counted as taken",)
            yield CallContext(computation=computation, callers=(*here.callers, site)), times, caveat
