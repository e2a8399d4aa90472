"""The call sites of instructions, how often each executes, and collectives that libtpu spreads over fusions.

Trip counts of `while` loops follow from the start, bound and step of their counters.

Every fusion that carries the collective holds a copy of its instruction with the same `chain_id`.
The first fusion passes it to a custom call `AsyncCollectiveStart`, the last one takes it from
`AsyncCollectiveDone`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from meshscope.errors import ParseError
from meshscope.plans.dispatch import ROUNDS_SCOPE
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d{1,18})"?\}')
_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d{1,18}\s*")  # Python refuses numbers of thousands of digits
_DIRECTION = re.compile(r"\bdirection=([A-Z]{2})")

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
# Instructions with the value of their first operand.
_FORWARDING = frozenset(
    {"copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier"}
)
# Definitions visited for one loop. Real loops need a handful; crafted text must not hang.
_MAX_STEPS = 2_000
_MAX_NESTING = 100


@dataclass(frozen=True, slots=True)
class Linear:
    """An element of the loop's tuple plus `offset`; a constant if `element` is None."""

    element: int | None
    offset: int


_LOOP_TUPLE = Linear(-1, 0)
_Callers = tuple[tuple[Computation, Instruction], ...]  # the fusions around a definition


def trip_count(module: HloModule, loop: Instruction, computation: Computation) -> int | str:
    """How often the body runs in one execution of `loop`, an instruction of `computation`, or why that is unknown."""
    known = _KNOWN.search(loop.attributes)
    is_round_of_balanced_routing = f"/{ROUNDS_SCOPE}/" in (loop.op_name or "")
    if known or is_round_of_balanced_routing:
        return int(known[1]) if known else 1
    count = _counted(module, loop, computation)
    if isinstance(count, int):
        return count
    return f"the trip count of loop '{loop.name}' is unknown: {count}"


def _counted(module: HloModule, loop: Instruction, computation: Computation) -> int | str:
    """The trips of a loop that steps a counter to a bound, or why they are unknown."""
    called, evaluator = loop.called, _Evaluator(module)
    if "condition" not in called or "body" not in called:
        return "it names no condition or no body"
    condition = module.computation(called["condition"][0], loop)
    body = module.computation(called["body"][0], loop)
    comparison = evaluator.comparison(condition)
    if comparison is None or comparison[0].element is comparison[2].element is None:
        return "its condition compares no counter with a bound"
    left, direction, right = comparison
    start = computation.producer(loop)

    def initial(element: int) -> int | None:
        """The constant with which an element enters the loop."""
        value = None if start is None else evaluator.element(computation, start, element)
        return value.offset if value is not None and value.element is None else None

    for counter, relation, bound in (left, direction, right), (right, _MIRRORED[direction], left):
        if counter.element is None:
            continue
        step = evaluator.element(body, body.root, counter.element)
        if step is not None and step.element == counter.element and step.offset:
            first, limit = initial(counter.element), bound.offset
            if bound.element is not None:  # a loop-invariant element with a constant start
                value, after = initial(bound.element), replace(bound, offset=0)
                is_fixed = evaluator.element(body, body.root, bound.element) == after
                limit = value + bound.offset if value is not None and is_fixed else None
            if first is None or limit is None:
                return "its start or its bound is not a constant"
            n = _n_trips(first + counter.offset, limit, step.offset, relation)
            return "it never ends" if n is None else n
    return "its body does not step a counter by a constant"


def _n_trips(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations of `for (i = start; i DIRECTION bound; i += step)`; None if it does not end."""
    distance = bound - start
    match direction:
        case "LT":
            if distance <= 0:
                return 0
            return -(-distance // step) if step > 0 else None
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

    def element(self, computation: Computation, source: Instruction, element: int) -> Linear | None:
        """An element of a tuple, through any copies; parameter 0 is the loop's tuple."""
        root = _computed(computation, source)
        value = computation.producer(root, element) if root.opcode == "tuple" else None
        return self._value(computation, value, ()) if value else None

    def comparison(
        self, computation: Computation, callers: _Callers = ()
    ) -> tuple[Linear, str, Linear] | None:
        """The comparison at the root of a condition: (left, direction, right)."""
        root = _computed(computation, computation.root)
        if root.opcode == "fusion" and len(callers) < _MAX_NESTING:
            return self.comparison(self._module.fused(root), (*callers, (computation, root)))
        direction = _DIRECTION.search(root.attributes)
        sides = computation.producers(root)
        if root.opcode != "compare" or direction is None or len(sides) != 2:
            return None
        left, right = (self._value(computation, side, callers) for side in sides)
        if left is None or right is None or _LOOP_TUPLE in {left, right}:
            return None
        return (left, direction[1], right) if direction[1] in _MIRRORED else None

    def _value(  # noqa: PLR0911  one return for each opcode
        self, computation: Computation, instruction: Instruction, callers: _Callers, depth: int = 0
    ) -> Linear | None:
        self._n_steps += 1
        if depth > _MAX_NESTING or self._n_steps > _MAX_STEPS:
            return None
        inputs = computation.producers(instruction)
        values = (self._value(computation, i, callers, depth + 1) for i in inputs)
        match instruction.opcode:
            case "constant" if _WHOLE_NUMBER.fullmatch(instruction.operand_text):
                return Linear(None, int(instruction.operand_text))
            case "parameter" if callers:
                *outer, (around, fusion) = callers
                operands, number = around.producers(fusion), instruction.parameter_number
                if not 0 <= number < len(operands):
                    return None
                return self._value(around, operands[number], tuple(outer), depth + 1)
            case "parameter" if instruction.parameter_number == 0:
                return _LOOP_TUPLE
            case "add" | "subtract" if len(inputs) == 2:
                sign = -1 if instruction.opcode == "subtract" else 1
                return _sum(next(values), next(values), sign)
            case "fusion":
                called = self._module.fused(instruction)
                inside = (*callers, (computation, instruction))
                return self._value(called, called.root, inside, depth + 1)
            case "get-tuple-element" if inputs:
                index, whole = instruction.tuple_index, next(values)
                return Linear(index, 0) if index is not None and whole == _LOOP_TUPLE else None
            case opcode if opcode in _FORWARDING and inputs:
                return next(values)
            case _:
                return None


def _computed(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _FORWARDING and (source := computation.producer(instruction)):
        instruction = source
    return instruction


def _sum(left: Linear | None, right: Linear | None, sign: int) -> Linear | None:
    if left is None or right is None or _LOOP_TUPLE in (left, right):
        return None
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    element = left.element if left.element is not None else right.element
    return Linear(element, left.offset + sign * right.offset)


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


def call_sites(module: HloModule, is_wanted: Predicate) -> list[CallSite]:
    """Every call site of the wanted instructions, in schedule order."""
    relevant = _computations_reaching(module, is_wanted)
    sites: list[CallSite] = []

    def walk(context: CallContext, count: int, caveats: tuple[str, ...]) -> None:
        computation = context.computation
        for instruction in computation.instructions:
            site = CallSite(instruction=instruction, context=context, count=count, caveats=caveats)
            if is_wanted(instruction):
                sites.append(site)
                _check_limits(module, context, len(sites))
            for key, name in _callees_of(instruction):
                if name in relevant:
                    n_runs, unknown = _n_runs(module, instruction, computation, key)
                    callee = module.computation(name, instruction)
                    inside = CallContext(computation=callee, callers=(*context.callers, site))
                    _check_limits(module, inside, len(sites))
                    walk(inside, count * n_runs, caveats + unknown)

    if module.entry.name in relevant:
        walk(CallContext(computation=module.entry), 1, ())
    return sites


def _check_limits(module: HloModule, context: CallContext, n_sites: int) -> None:
    at = context.computation
    root = context.callers[0].context.computation if context.callers else at
    if len(context.callers) > MAX_DEPTH:
        raise ParseError(
            f"{module.origin}:{at.line}: calls nest deeper than {MAX_DEPTH} at '{at.name}'. "
            "Does a computation call itself? The text is damaged."
        )
    if n_sites > MAX_SITES:
        raise ParseError(
            f"{module.origin}:{root.line}: more than {MAX_SITES} collectives are reachable from "
            f"'{root.name}'. Real programs have thousands; is the text damaged?"
        )


def _computations_reaching(module: HloModule, is_wanted: Predicate) -> set[str]:
    """The computations that hold a wanted instruction, directly or through calls."""
    callers, pending = defaultdict[str, list[str]](list), list[str]()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if is_wanted(instruction):
                pending.append(computation.name)
            for _, name in _callees_of(instruction):
                callers[module.computation(name, instruction).name].append(computation.name)
    reaching: set[str] = set()
    while pending:
        if (name := pending.pop()) not in reaching:
            reaching.add(name)
            pending += callers.get(name, ())
    return reaching


def _n_runs(
    module: HloModule, caller: Instruction, computation: Computation, key: str
) -> tuple[int, tuple[str, ...]]:
    """How often a caller runs what it calls as `key`, and what is unknown about that."""
    if caller.opcode == "while":
        trips = trip_count(module, caller, computation)
        # The last check of the condition ends the loop.
        return (1, (trips,)) if isinstance(trips, str) else (trips + (key == "condition"), ())
    is_branch = caller.opcode == "conditional"
    return 1, (f"{BRANCH_CAVEAT} '{caller.name}', counted as taken",) if is_branch else ()


def _callees_of(instruction: Instruction) -> list[tuple[str, str]]:
    called = instruction.called if runs_called_computations(instruction) else {}
    return [(key, name) for key, names in called.items() for name in names]


def runs_called_computations(instruction: Instruction) -> bool:
    """Whether the computations that the instruction names run when it does."""
    return instruction.opcode in _CALLERS or instruction.opcode.endswith("-start")


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
        targets = (i for i in computation.instructions if i.opcode == "custom-call")
        done = next((i for i in targets if i.custom_call_target == "AsyncCollectiveDone"), None)
        for producer in computation.producers(done) if done else ():
            if (chain := async_chain_of(producer)) is not None:
                chain_in[computation.name] = chain
    return {
        chain_in[name]: instruction
        for instruction in (module.instructions if chain_in else ())
        if instruction.opcode == "fusion"
        for name in instruction.called.get("calls", ())
        if name in chain_in
    }
