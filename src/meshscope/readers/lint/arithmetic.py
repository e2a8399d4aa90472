"""How the result of arithmetic on one device is held, from how its operands are."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import isnan, nan, prod

from meshscope.readers.hlo.module import Instruction
from meshscope.readers.lint.log import Fault, Log
from meshscope.readers.lint.states import (
    A_PART,
    ADDENDS,
    BIASED,
    LOOKUP,
    MIXED,
    PART_OR_SUM,
    PARTIAL,
    REPLICATED,
    SUMMED,
    SUMS,
    UNKNOWN,
    Double,
    Value,
    both,
    is_hidden,
    is_inverse,
    is_split,
    may_be_sum,
    settled,
    split,
)

INDICES = ("s", "u", "pred")  # the dtypes of indices and masks
_MASK = 1e3  # a value that was multiplied by more hides what it is added to


def add(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """The sum of two values."""
    if one.constant == 0 or other.constant == 0:
        return (other if one.constant == 0 else one)._replace(known=None, constant=None)
    is_stream = at.opcode == "add" and not at.shape_text.startswith(INDICES)
    of_weights = {f for f, is_weight in one.origins | other.origins if is_weight and is_stream}
    pairs = enumerate(zip(one.held, other.held, strict=True))
    held = tuple(
        _added(a, b, (one, other), is_stream=is_stream, of_weights=f in of_weights)
        for f, (a, b) in pairs
    )
    log.mismatch(at, zip(one.held, other.held, held, strict=True))
    if (
        at.opcode == "subtract" and at.operands[0] == at.operands[1]
    ):  # a maximum that is not one of all devices
        log.missing(at, {f: False for f, h in enumerate(held) if h != REPLICATED}, one.sums)
    scale = one.scale if one.scale == other.scale else nan
    return common(log, at, one, other)._replace(
        held=held, doubles=_doubles_of_both(log, one, other), scale=scale
    )


def _doubles_of_both(log: Log, one: Value, other: Value) -> frozenset[Double]:
    """The sums of copies in two values; if one of them has none, the scale of the other matters."""
    doubles = one.doubles | other.doubles
    if one.doubles and other.doubles:
        return doubles
    log.mark(doubles, "used")
    return frozenset()


def _added(a: int, b: int, of: tuple[Value, Value], *, is_stream: bool, of_weights: bool) -> int:
    if a == b or {a, b} & {UNKNOWN, LOOKUP, *ADDENDS}:
        return a if a == b != LOOKUP else UNKNOWN
    whole = of[1]
    if a == REPLICATED or (b in SUMS and a not in SUMS):
        a, b, whole = b, a, of[0]
    if a in SUMS:
        return _added_to_sum(a, b, whole)
    if b == REPLICATED:
        is_mask = whole.is_plain or whole.constant is not None or abs(whole.scale) > _MASK
        is_row = whole.by is None or whole.by.opcode == "broadcast"
        is_own = may_be_sum(a) or (
            is_stream and (a == A_PART or not ((is_hidden(a) and not of_weights) or is_row))
        )
        return BIASED if is_own and not is_mask else a
    return both(a, b)


def _added_to_sum(a: int, b: int, whole: Value) -> int:
    if b in SUMS or b == REPLICATED:
        if a == PARTIAL and b == REPLICATED and 0 < whole.scale <= 0.5:
            return PARTIAL  # each device may add its part of a bias
        if isnan(whole.scale):
            return BIASED
        is_of_program = MIXED in (a, b) or (a == PARTIAL and b == REPLICATED and not whole.is_plain)
        return MIXED if is_of_program else BIASED
    if is_hidden(b):
        return a if may_be_sum(b) else PART_OR_SUM
    return UNKNOWN if whole.is_plain else BIASED


def common(log: Log, at: Instruction, *values: Value) -> Value:
    """A value of this shape with what its operands have in common: reasons and sums."""
    reasons = (v.reason for v in values if v.reason)
    sums = frozenset[Instruction]().union(*(v.sums for v in values if v.sums))
    is_plain = all(value.is_plain for value in values)
    is_merge = at.opcode in {"add", "maximum", "minimum"}  # of several parts: the device's own
    moved = {v.moved for v in values if v.moved or (is_merge and any(map(is_split, v.held)))}
    return Value(
        dims=dims_of(at, values),
        held=(),
        reason=next(reasons, ""),
        sums=sums,
        is_plain=is_plain,
        moved=moved.pop() if len(moved) == 1 else None,
        origins=log.origins(
            at, () if at.shape_text.startswith(INDICES) and not is_plain else values
        ),
    )


def dims_of(at: Instruction, values: Sequence[Value]) -> tuple[int, ...]:
    """The dims of the result, or of the first operand if the text has none."""
    arrays = at.arrays
    return arrays[0].dims if arrays else values[0].dims


def multiply(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """The product of two values, element by element."""
    for constant, value in ((one, other), (other, one)):
        if constant.constant is not None:
            return scaled(log, at, value, constant.constant, constant)
    held = products(log, at, one, other, lambda a, b: both(settled(a), settled(b)))
    return product(log, at, one, other)._replace(held=held)


def product(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """What a bilinear product has of its operands, but for how it is held."""
    shared = one.doubles & other.doubles
    log.mark(shared, "used")
    if one.moved and other.moved and one.moved != other.moved:
        pairs = zip(one.moved, other.moved, strict=True)
        log.note(Fault.MISMATCH, at, log.factors.of_pairs(tuple(pairs)))
    doubles = (one.doubles | other.doubles) - shared
    return common(log, at, one, other)._replace(doubles=doubles, scale=one.scale * other.scale)


def products(
    log: Log, at: Instruction, one: Value, other: Value, of_splits: Callable[[int, int], int]
) -> tuple[int, ...]:
    """How a bilinear product is held, with a rule for two values that are both split."""
    held, wrong = list[int](), dict[int, bool]()
    for factor, (a, b) in enumerate(zip(one.held, other.held, strict=True)):
        if REPLICATED in (a, b):
            held.append(b if a == REPLICATED else a)
        elif {UNKNOWN, *ADDENDS} & {a, b}:
            held.append(PARTIAL if LOOKUP in (a, b) else UNKNOWN)
        elif (a in SUMS or b in SUMS) and is_hidden(a | b):
            held.append(PART_OR_SUM)  # perhaps the scale of a device's own part
        elif a in SUMS or b in SUMS:
            wrong[factor] = MIXED in (a, b)
            held.append(UNKNOWN)
        elif LOOKUP in (a, b):
            held.append(UNKNOWN)
        else:
            held.append(of_splits(a, b))
    log.missing(at, wrong, one.sums | other.sums)
    log.mismatch(at, zip(one.held, other.held, held, strict=True))
    return tuple(held)


def scaled(log: Log, at: Instruction, value: Value, factor: float, constant: Value) -> Value:
    """A value multiplied by a constant."""
    if factor == 0:
        return constant._replace(dims=dims_of(at, (value,)), known=None)
    undone = frozenset(double for double in value.doubles if is_inverse(factor, double.n))
    log.mark(undone, "undone")
    return value._replace(
        doubles=value.doubles - undone,
        scale=value.scale * factor,
        constant=None if value.constant is None else value.constant * factor,
        known=None,
        weight=None,
    )


def divide(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """The quotient of two values."""
    if (divisor := other.constant) is not None and divisor:
        return scaled(log, at, one, 1 / divisor, other)
    if other.doubles and one.doubles:  # a ratio of two sums of copies
        log.mark(one.doubles | other.doubles, "undone")
        one, other = one._replace(doubles=frozenset()), other._replace(doubles=frozenset())
    sums = log.misused(at, other)
    held_by = tuple(UNKNOWN if f in sums else h for f, h in enumerate(other.held))
    held = products(log, at, one, other._replace(held=held_by), both)
    return common(log, at, one, other)._replace(held=held, doubles=one.doubles, scale=one.scale)


def nonlinear(log: Log, at: Instruction, *values: Value) -> Value:
    """A function of values that is not linear in them, element by element."""
    held, wrong = list[int](), dict[int, bool]()
    for factor in range(len(values[0].held)):
        states = {settled(v.held[factor]) for v in values}
        held.append(_agreed(states))
        if UNKNOWN not in states and states & {*SUMS, *ADDENDS}:
            wrong[factor] = MIXED in states
    result = common(log, at, *values)
    log.missing(at, wrong, result.sums)
    log.mismatch(at, zip(values[0].held, values[-1].held, held, strict=True))
    for value in values:
        log.mark(value.doubles, "used")
    sums = result.sums if any(map(may_be_sum, held)) else frozenset[Instruction]()
    return result._replace(held=tuple(held), sums=sums)


def select(log: Log, at: Instruction, which: Value, one: Value, other: Value) -> Value:
    """One of two values, by a predicate."""
    if one.constant == 0 or other.constant == 0:
        chosen = other if one.constant == 0 else one
        is_index = at.shape_text.startswith(INDICES)
        pairs = zip(which.held, chosen.held, strict=True)
        held = tuple(_masked(p, h, is_index=is_index) for p, h in pairs)
        if which.known is not None and chosen.known is None:
            is_kept = [bool(number) != (one.constant == 0) for number in which.known]
            alone = _of_one_device(log, at, chosen, is_kept)
            # The copy of a replicated value may also be the input of a first stage.
            state = PARTIAL if all(is_split(chosen.held[f]) for f in alone) else PART_OR_SUM
            held = tuple(state if f in alone else h for f, h in enumerate(held))
        doubles, scale = chosen.doubles, chosen.scale
    else:
        triples = zip(which.held, one.held, other.held, strict=True)
        held = tuple(
            a
            if a == b and p == REPLICATED
            else _agreed(
                {A_PART if h == LOOKUP and p == A_PART else h for h in (a, b)}
                | ({p} if not which.known and p != A_PART else set[int]())
            )
            for p, a, b in triples
        )
        doubles = _doubles_of_both(log, one, other)
        scale = one.scale if one.scale == other.scale else nan
    log.misused(at, which)
    result = common(log, at, which._replace(origins=frozenset()), one, other)
    if PARTIAL in held and not result.sums:
        result = result._replace(sums=frozenset({at}))
    return result._replace(held=held, doubles=doubles, scale=scale)


def _masked(predicate: int, held: int, *, is_index: bool) -> int:
    if predicate == REPLICATED:
        return held
    if held == LOOKUP:
        return PARTIAL  # each device has its own rows, and zeros
    if is_split(predicate) and held in SUMS and not is_index:
        return held  # a sum of rows, masked again
    if is_split(predicate) and held == REPLICATED:
        return predicate if is_index else predicate | split([SUMMED])
    return both(predicate, held) if is_split(predicate) and is_split(held) else UNKNOWN


def _of_one_device(log: Log, at: Instruction, chosen: Value, is_kept: Sequence[bool]) -> list[int]:
    """The factors along which one device keeps its value: the sum over the devices is that of one of them."""
    moving = sorted(log.factors.along(is_kept))
    n = sum(is_kept)
    if n * prod(log.factors.all[f].size for f in moving) != len(is_kept):
        return []
    log.missing(at, {f: False for f in moving if chosen.held[f] in SUMS}, chosen.sums)
    return moving


def _agreed(states: set[int]) -> int:
    """What a device has of its own from arrays in these states, along dims on which they agree."""
    parts = states - {REPLICATED}
    if not parts or not all(map(is_split, parts)):
        return UNKNOWN if parts else REPLICATED
    return reduce(both, parts)
