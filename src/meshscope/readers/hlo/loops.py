"""Trip counts of `while` loops, from the start, bound and step of their counters."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshscope.plans.dispatch import ROUNDS_SCOPE
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_DIRECTION = re.compile(r"\bdirection=([A-Z]{2})")
_INDEX = re.compile(r"\bindex=(\d+)")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
# Instructions whose value is that of their first operand.
_FORWARDING = frozenset(
    {"copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier"}
)
# Definitions visited for one loop. Real loops need a handful; crafted text must not hang.
_MAX_STEPS = 2_000
_MAX_DEPTH = 100


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopTuple:
    """The loop's tuple as a whole."""


_Value = Linear | _LoopTuple | None  # None: neither is known from the text
_Scope = Mapping[int, Callable[[int], _Value]]  # parameter number -> its value, given a depth
_LOOP: _Scope = {0: lambda _: _LoopTuple()}


def trip_count(module: HloModule, loop: Instruction, computation: Computation) -> TripCount:
    """How often the body runs in one execution of `loop`, an instruction of `computation`."""
    known = _KNOWN.search(loop.attributes)
    is_round_of_balanced_routing = f"/{ROUNDS_SCOPE}/" in (loop.op_name or "")
    if known or is_round_of_balanced_routing:
        return TripCount(count=int(known[1]) if known else 1)
    called = loop.called
    if "condition" not in called or "body" not in called:
        return _unknown(loop, "it names no condition or no body")
    condition = module.computation(called["condition"][0], loop)
    body = module.computation(called["body"][0], loop)
    evaluator = _Evaluator(module)
    comparisons = evaluator.comparisons(condition)
    if comparisons is None:
        return _unknown(loop, "its condition compares no counter with a bound")
    for counter, direction, bound in comparisons:
        step = evaluator.next_element(body, counter.element)
        if isinstance(step, Linear) and step.element == counter.element and step.offset:
            start = evaluator.initial(computation, loop, counter.element)
            limit = _limit(evaluator, computation, loop, body, bound)
            if start is None or limit is None:
                return _unknown(loop, "its start or its bound is not a constant")
            count = _count(start + counter.offset, limit, step.offset, direction)
            return TripCount(count=count) if count is not None else _unknown(loop, "it never ends")
    return _unknown(loop, "its body does not step a counter by a constant")


def _limit(
    evaluator: "_Evaluator",
    computation: Computation,
    loop: Instruction,
    body: Computation,
    bound: Linear,
) -> int | None:
    """The bound as a number: a constant, or a loop-invariant element with a constant start."""
    if bound.element is None:
        return bound.offset
    initial = evaluator.initial(computation, loop, bound.element)
    is_invariant = evaluator.next_element(body, bound.element) == replace(bound, offset=0)
    return initial + bound.offset if initial is not None and is_invariant else None


def _unknown(loop: Instruction, why: str) -> TripCount:
    return TripCount(count=None, reason=f"the trip count of loop '{loop.name}' is unknown: {why}")


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations of `for (i = start; i DIRECTION bound; i += step)`; None if it does not end."""
    distance = bound - start
    match direction:
        case "LT":
            return max(0, -(-distance // step)) if step > 0 else (0 if distance <= 0 else None)
        case "LE":
            return _count(start, bound + 1, step, "LT")
        case "GT" | "GE":
            return _count(-start, -bound, -step, "LT" if direction == "GT" else "LE")
        case "NE":
            n_steps, rest = divmod(distance, step) if step else (0, distance)
            return n_steps if not rest and n_steps >= 0 else None
        case _:
            return None


class _Evaluator:
    """Evaluates scalar definitions symbolically; gives up after `_MAX_STEPS` of them."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._n_steps = 0

    def comparisons(self, condition: Computation) -> list[tuple[Linear, str, Linear]] | None:
        """The condition as (counter, direction, bound), for each side that may be the counter."""
        comparison = self._root_comparison(condition, _LOOP, 0)
        if comparison is None:
            return None
        left, direction, right = comparison
        sides = [(left, direction, right), (right, _MIRRORED[direction], left)]
        return [side for side in sides if side[0].element is not None]

    def next_element(self, body: Computation, element: int | None) -> _Value:
        """An element of the tuple that the body returns to the next iteration."""
        return self._tuple_element(body, body.root, element, _LOOP)

    def initial(
        self, computation: Computation, loop: Instruction, element: int | None
    ) -> int | None:
        """The constant with which an element enters the loop; None if it is not constant."""
        start = computation.producer(loop)
        value = self._tuple_element(computation, start, element, {}) if start else None
        return value.offset if isinstance(value, Linear) and value.element is None else None

    def _tuple_element(
        self, computation: Computation, source: Instruction, element: int | None, scope: _Scope
    ) -> _Value:
        root = _skip_forwarding(computation, source)
        if element is None or root.opcode != "tuple":
            return None
        value = computation.producer(root, element)
        return self._value(computation, value, scope, 0) if value else None

    def _root_comparison(
        self, computation: Computation, scope: _Scope, depth: int
    ) -> tuple[Linear, str, Linear] | None:
        root = _skip_forwarding(computation, computation.root)
        if root.opcode == "fusion" and depth < _MAX_DEPTH:
            called, inner = self._enter(computation, root, scope)
            return self._root_comparison(called, inner, depth + 1)
        direction = _DIRECTION.search(root.attributes)
        sides = computation.producers(root)
        if root.opcode != "compare" or direction is None or len(sides) != 2:
            return None
        left, right = (self._value(computation, side, scope, depth) for side in sides)
        if direction[1] not in _MIRRORED or not isinstance(left, Linear):
            return None
        return (left, direction[1], right) if isinstance(right, Linear) else None

    def _enter(
        self, computation: Computation, fusion: Instruction, scope: _Scope
    ) -> tuple[Computation, _Scope]:
        """The fused computation, with its parameters bound to values of the calling computation."""
        called = self._module.fused(fusion)

        def bound_to(operand: Instruction) -> Callable[[int], _Value]:
            return lambda depth: self._value(computation, operand, scope, depth)

        return called, dict(enumerate(map(bound_to, computation.producers(fusion))))

    def _value(  # noqa: PLR0911  one return for each opcode
        self, computation: Computation, instruction: Instruction, scope: _Scope, depth: int
    ) -> _Value:
        """An instruction as a constant, or as an element of the loop's tuple plus a constant."""
        self._n_steps += 1
        if depth > _MAX_DEPTH or self._n_steps > _MAX_STEPS:
            return None
        inputs = computation.producers(instruction)
        match instruction.opcode:
            case "constant":
                return _constant(instruction.operand_text)
            case "parameter":
                bound = scope.get(instruction.parameter_number)
                return bound(depth + 1) if bound else None
            case "add" | "subtract" if len(inputs) == 2:
                left, right = (self._value(computation, i, scope, depth + 1) for i in inputs)
                return _sum(left, right, -1 if instruction.opcode == "subtract" else 1)
            case "fusion":
                called, inner = self._enter(computation, instruction, scope)
                return self._value(called, called.root, inner, depth + 1)
            case "get-tuple-element" if inputs:
                index = _INDEX.search(instruction.attributes)
                whole = self._value(computation, inputs[0], scope, depth + 1)
                if index is None or not isinstance(whole, _LoopTuple):
                    return None
                return Linear(element=int(index[1]), offset=0)
            case opcode if opcode in _FORWARDING and inputs:
                return self._value(computation, inputs[0], scope, depth + 1)
            case _:
                return None


def _skip_forwarding(computation: Computation, instruction: Instruction) -> Instruction:
    """The instruction that computes the value, behind any copies."""
    while instruction.opcode in _FORWARDING and (source := computation.producer(instruction)):
        instruction = source
    return instruction


def _constant(text: str) -> Linear | None:
    try:
        return Linear(element=None, offset=int(text))
    except ValueError:
        return None


def _sum(left: _Value, right: _Value, sign: int) -> Linear | None:
    if not isinstance(left, Linear) or not isinstance(right, Linear):
        return None
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    element = left.element if left.element is not None else right.element
    return Linear(element=element, offset=left.offset + sign * right.offset)
