"""The call sites of instructions, how often each executes, and collectives that libtpu spreads over fusions.

Trip counts of `while` loops follow from the start, bound and step of their counters.

Every fusion that carries the collective holds a copy of its instruction with the same `chain_id`.
The first fusion passes it to a custom call `AsyncCollectiveStart`, the last one takes it from
`AsyncCollectiveDone`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from meshscope.errors import ParseError
from meshscope.plans.dispatch import ROUNDS_SCOPE
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d{1,18})"?\}')
_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d{1,18}\s*")  # Python refuses numbers of thousands of digits
_DIRECTION = re.compile(r"\bdirection=([A-Z]{2})")
_INDEX = re.compile(r"\bindex=(\d+)")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
# Instructions with the value of their first operand.
_FORWARDING = frozenset(
    {"copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier"}
)
# Definitions visited for one loop. Real loops need a handful; crafted text must not hang.
_MAX_STEPS = 2_000
_MAX_NESTING = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TripCount:
    """How often a loop body runs; if unknown, `count` is None and `reason` says why."""

    count: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """An element of the loop's tuple plus `offset`; a constant if `element` is None."""

    element: int | None
    offset: int


class _Whole(Enum):
    LOOP_TUPLE = auto()


_Value = Linear | _Whole | None  # None: neither is known from the text
_Bindings = Mapping[int, Callable[[int], _Value]]  # parameter number -> its value, given a depth
_LOOP: _Bindings = {0: lambda _: _Whole.LOOP_TUPLE}


def trip_count(module: HloModule, loop: Instruction, computation: Computation) -> TripCount:
    """How often the body runs in one execution of `loop`, an instruction of `computation`."""
    known = _KNOWN.search(loop.attributes)
    is_round_of_balanced_routing = f"/{ROUNDS_SCOPE}/" in (loop.op_name or "")
    if known or is_round_of_balanced_routing:
        return TripCount(count=int(known[1]) if known else 1)
    count = _counted(module, loop, computation)
    if isinstance(count, int):
        return TripCount(count=count)
    reason = f"the trip count of loop '{loop.name}' is unknown: {count}"
    return TripCount(count=None, reason=reason)


def _counted(module: HloModule, loop: Instruction, computation: Computation) -> int | str:
    """The trips of a loop that steps a counter to a bound, or why they are unknown."""
    called = loop.called
    if "condition" not in called or "body" not in called:
        return "it names no condition or no body"
    condition = module.computation(called["condition"][0], loop)
    body = module.computation(called["body"][0], loop)
    evaluator = _Evaluator(module)
    comparison = evaluator.comparison(condition, _LOOP)
    if comparison is None:
        return "its condition compares no counter with a bound"
    left, direction, right = comparison
    start = computation.producer(loop)

    def initial(element: int) -> int | None:
        """The constant with which an element enters the loop."""
        value = None if start is None else evaluator.element(computation, start, element, {})
        return value.offset if isinstance(value, Linear) and value.element is None else None

    for counter, relation, bound in (left, direction, right), (right, _MIRRORED[direction], left):
        if counter.element is None:
            continue
        step = evaluator.element(body, body.root, counter.element, _LOOP)
        if isinstance(step, Linear) and step.element == counter.element and step.offset:
            first, limit = initial(counter.element), bound.offset
            if bound.element is not None:  # a loop-invariant element with a constant start
                value, after = initial(bound.element), replace(bound, offset=0)
                is_fixed = evaluator.element(body, body.root, bound.element, _LOOP) == after
                limit = value + bound.offset if value is not None and is_fixed else None
            if first is None or limit is None:
                return "its start or its bound is not a constant"
            n = _n_trips(first + counter.offset, limit, step.offset, relation)
            return "it never ends" if n is None else n
    if left.element is None and right.element is None:
        return "its condition compares no counter with a bound"
    return "its body does not step a counter by a constant"


def _n_trips(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations of `for (i = start; i DIRECTION bound; i += step)`; None if it does not end."""
    distance = bound - start
    match direction:
        case "LT":
            return max(0, -(-distance // step)) if step > 0 else (0 if distance <= 0 else None)
        case "LE":
            return _n_trips(start, bound + 1, step, "LT")
        case "GT" | "GE":
            return _n_trips(-start, -bound, -step, "LT" if direction == "GT" else "LE")
        case _:
            n_steps, rest = divmod(distance, step)
            return n_steps if not rest and n_steps >= 0 else None


class _Evaluator:
    """Evaluates scalar definitions symbolically; gives up after `_MAX_STEPS` of them."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._n_steps = 0

    def element(
        self, computation: Computation, source: Instruction, element: int, bindings: _Bindings
    ) -> _Value:
        """An element of a tuple, through any copies."""
        root = _computed(computation, source)
        value = computation.producer(root, element) if root.opcode == "tuple" else None
        return self._value(computation, value, bindings, 0) if value else None

    def comparison(
        self, computation: Computation, bindings: _Bindings, depth: int = 0
    ) -> tuple[Linear, str, Linear] | None:
        """The comparison at the root of a condition: (left, direction, right)."""
        root = _computed(computation, computation.root)
        if root.opcode == "fusion" and depth < _MAX_NESTING:
            inner = self._bound(computation, root, bindings)
            return self.comparison(self._module.fused(root), inner, depth + 1)
        direction = _DIRECTION.search(root.attributes)
        sides = computation.producers(root)
        if root.opcode != "compare" or direction is None or len(sides) != 2:
            return None
        left, right = (self._value(computation, side, bindings, depth) for side in sides)
        if direction[1] not in _MIRRORED or not isinstance(left, Linear):
            return None
        return (left, direction[1], right) if isinstance(right, Linear) else None

    def _bound(
        self, computation: Computation, fusion: Instruction, bindings: _Bindings
    ) -> _Bindings:
        """The parameters of a fused computation, bound to values of the calling computation."""
        return {
            number: partial(self._value, computation, operand, bindings)
            for number, operand in enumerate(computation.producers(fusion))
        }

    def _value(  # noqa: PLR0911  one return for each opcode
        self, computation: Computation, instruction: Instruction, bindings: _Bindings, depth: int
    ) -> _Value:
        """An instruction as a constant, or as an element of the loop's tuple plus a constant."""
        self._n_steps += 1
        if depth > _MAX_NESTING or self._n_steps > _MAX_STEPS:
            return None
        inputs = computation.producers(instruction)
        match instruction.opcode:
            case "constant" if _WHOLE_NUMBER.fullmatch(instruction.operand_text):
                return Linear(element=None, offset=int(instruction.operand_text))
            case "parameter":
                bound = bindings.get(instruction.parameter_number)
                return bound(depth + 1) if bound else None
            case "add" | "subtract" if len(inputs) == 2:
                left, right = (self._value(computation, i, bindings, depth + 1) for i in inputs)
                return _sum(left, right, -1 if instruction.opcode == "subtract" else 1)
            case "fusion":
                called = self._module.fused(instruction)
                inner = self._bound(computation, instruction, bindings)
                return self._value(called, called.root, inner, depth + 1)
            case "get-tuple-element" if inputs:
                index = _INDEX.search(instruction.attributes)
                whole = self._value(computation, inputs[0], bindings, depth + 1)
                if index is None or whole is not _Whole.LOOP_TUPLE:
                    return None
                return Linear(element=int(index[1]), offset=0)
            case opcode if opcode in _FORWARDING and inputs:
                return self._value(computation, inputs[0], bindings, depth + 1)
            case _:
                return None


def _computed(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _FORWARDING and (source := computation.producer(instruction)):
        instruction = source
    return instruction


def _sum(left: _Value, right: _Value, sign: int) -> Linear | None:
    if not isinstance(left, Linear) or not isinstance(right, Linear):
        return None
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    element = left.element if left.element is not None else right.element
    return Linear(element=element, offset=left.offset + sign * right.offset)


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
