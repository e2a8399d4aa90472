"""How the result of arithmetic on one device is held, from how its operands are."""

from collections.abc import Callable, Sequence
from math import prod

from meshscope.readers.hlo.module import Instruction
from meshscope.readers.lint.log import Log
from meshscope.readers.lint.states import (
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

_MASK = 1e3  # a value that was multiplied by more hides what it is added to


def add(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """The sum of two values."""
    if one.is_zero or other.is_zero:
        return (other if one.is_zero else one)._replace(known=_sum(at, one, other), constant=None)
    if one.doubles and other.doubles:
        doubles = one.doubles | other.doubles
    else:
        doubles = one.doubles | other.doubles
        if doubles:
            log.used(doubles)
            doubles = frozenset()
    held = tuple(_added(a, b, one, other) for a, b in zip(one.held, other.held, strict=True))
    scale = one.scale if one.scale == other.scale else float("nan")
    return common(at, one, other)._replace(
        held=held, doubles=doubles, scale=scale, known=_sum(at, one, other)
    )


def _sum(at: Instruction, one: Value, other: Value) -> tuple[int, ...] | None:
    if one.known is None or other.known is None:
        return None
    sign = -1 if at.opcode == "subtract" else 1
    return tuple(a + sign * b for a, b in zip(one.known, other.known, strict=True))


def _added(a: int, b: int, one: Value, other: Value) -> int:
    if a == b or {a, b} & {UNKNOWN, LOOKUP}:
        return a if a == b != LOOKUP else UNKNOWN
    whole = other
    if a == REPLICATED or (b in SUMS and a not in SUMS):
        a, b, whole = b, a, one
    if a in SUMS:
        return _added_to_sum(a, b, whole)
    if b == REPLICATED:
        is_mask = whole.is_plain or whole.constant is not None or abs(whole.scale) > _MASK
        return BIASED if may_be_sum(a) and not is_mask else a
    return both(a, b)


def _added_to_sum(a: int, b: int, whole: Value) -> int:
    if b in SUMS or b == REPLICATED:
        if a == PARTIAL and b == REPLICATED and whole.scale != 1:
            return PARTIAL  # each device may add its part of a bias
        is_of_program = MIXED in (a, b) or (a == PARTIAL and b == REPLICATED and not whole.is_plain)
        return MIXED if is_of_program else BIASED
    if is_hidden(b):
        return a if may_be_sum(b) else PART_OR_SUM
    return UNKNOWN if whole.is_plain else BIASED


def common(at: Instruction, *values: Value) -> Value:
    """A value of this shape with what its operands have in common: reasons and sums."""
    reasons = (v.reason for v in values if v.reason)
    sums = frozenset[Instruction]().union(*(v.sums for v in values if v.sums))
    is_plain = all(value.is_plain for value in values)
    return Value(
        dims=dims_of(at, values), held=(), reason=next(reasons, ""), sums=sums, is_plain=is_plain
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
    return product(log, at, one, other)._replace(held=held, known=_times(one, other))


def _times(one: Value, other: Value) -> tuple[int, ...] | None:
    if one.known is None or other.known is None:
        return None
    return tuple(a * b for a, b in zip(one.known, other.known, strict=True))


def product(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """What a bilinear product has of its operands, but for how it is held."""
    shared = one.doubles & other.doubles
    if shared:
        log.used(shared)
    scale = one.scale * other.scale
    return common(at, one, other)._replace(
        doubles=(one.doubles | other.doubles) - shared, scale=scale
    )


def products(
    log: Log, at: Instruction, one: Value, other: Value, of_splits: Callable[[int, int], int]
) -> tuple[int, ...]:
    """How a bilinear product is held, with a rule for two values that are both split."""
    held: list[int] = []
    wrong: dict[bool, list[int]] = {True: [], False: []}
    for factor, (a, b) in enumerate(zip(one.held, other.held, strict=True)):
        if REPLICATED in (a, b):
            held.append(b if a == REPLICATED else a)
        elif UNKNOWN in (a, b):
            held.append(PARTIAL if LOOKUP in (a, b) else UNKNOWN)
        elif (a in SUMS or b in SUMS) and is_hidden(a | b):
            held.append(PART_OR_SUM)  # perhaps the scale of a device's own part
        elif a in SUMS or b in SUMS:
            wrong[MIXED in (a, b)].append(factor)
            held.append(UNKNOWN)
        elif LOOKUP in (a, b):
            held.append(UNKNOWN)
        else:
            held.append(of_splits(a, b))
    for is_certain, factors in wrong.items():
        if factors:
            log.missing(at, factors, one.sums | other.sums, is_certain=is_certain)
    return tuple(held)


def scaled(log: Log, at: Instruction, value: Value, factor: float, constant: Value) -> Value:
    """A value multiplied by a constant."""
    if factor == 0:
        return constant._replace(dims=dims_of(at, (value,)), known=None)
    undone = frozenset(double for double in value.doubles if is_inverse(factor, double.n))
    if undone:
        log.undone(undone)
    elif value.doubles and factor != 1:
        log.lost(value.doubles)
    known = None
    if value.known is not None and factor == int(factor):
        known = tuple(int(factor) * number for number in value.known)
    return value._replace(
        doubles=value.doubles - undone,
        scale=value.scale * factor,
        constant=None if value.constant is None else value.constant * factor,
        known=known,
        weight=None,
    )


def divide(log: Log, at: Instruction, one: Value, other: Value) -> Value:
    """The quotient of two values."""
    if other.constant:
        return scaled(log, at, one, 1 / other.constant, other)._replace(
            known=_whole_quotients(one, other)
        )
    if other.doubles and one.doubles:  # a ratio of two sums of copies
        log.undone(one.doubles | other.doubles)
        one, other = one._replace(doubles=frozenset()), other._replace(doubles=frozenset())
    if other.doubles:
        log.lost(other.doubles)
    sums = [f for f, held in enumerate(other.held) if held in SUMS]
    if sums:
        is_certain = any(other.held[f] == MIXED for f in sums)
        log.missing(at, sums, other.sums, is_certain=is_certain)
        other = other._replace(
            held=tuple(UNKNOWN if f in sums else h for f, h in enumerate(other.held))
        )
    held = products(log, at, one, other, both)
    return common(at, one, other)._replace(held=held, doubles=one.doubles, scale=one.scale)


def _whole_quotients(one: Value, other: Value) -> tuple[int, ...] | None:
    divisor = int(other.constant or 0)
    if one.known is None or not divisor or divisor != other.constant:
        return None
    return tuple(number // divisor for number in one.known)


def nonlinear(log: Log, at: Instruction, *values: Value) -> Value:
    """A function of values that is not linear in them, element by element."""
    held: list[int] = []
    wrong: dict[bool, list[int]] = {True: [], False: []}
    for factor in range(len(values[0].held)):
        states = {settled(v.held[factor]) for v in values} - {REPLICATED}
        if not states:
            held.append(REPLICATED)
        elif len(states) == 1 and is_split(state := next(iter(states))):
            held.append(state)
        elif all(map(is_split, states)):
            first, *rest = states
            for state in rest:
                first = both(first, state)
            held.append(first)
        else:
            held.append(UNKNOWN)
            if UNKNOWN not in states and states & {*SUMS}:
                wrong[MIXED in states].append(factor)
    result = common(at, *values)
    for is_certain, factors in wrong.items():
        if factors:
            log.missing(at, factors, result.sums, is_certain=is_certain)
    doubles = frozenset[Double]().union(*(v.doubles for v in values))
    if doubles:
        log.used(doubles)
    sums = result.sums if any(map(may_be_sum, held)) else frozenset[Instruction]()
    return result._replace(held=tuple(held), sums=sums)


def select(log: Log, at: Instruction, which: Value, one: Value, other: Value) -> Value:
    """One of two values, by a predicate."""
    if one.is_zero or other.is_zero:
        chosen = other if one.is_zero else one
        held = tuple(_masked(p, h) for p, h in zip(which.held, chosen.held, strict=True))
        if which.known is not None:
            held = _of_one_device(log, chosen, which.known, held, is_inverted=one.is_zero)
        doubles, scale = chosen.doubles, chosen.scale
    else:
        triples = zip(which.held, one.held, other.held, strict=True)
        held = tuple(_chosen(p, a, b, is_known=bool(which.known)) for p, a, b in triples)
        doubles = one.doubles | other.doubles
        if doubles and not (one.doubles and other.doubles):
            log.used(doubles)
            doubles = frozenset()
        scale = one.scale if one.scale == other.scale else float("nan")
    wrong = [f for f, held_by in enumerate(which.held) if held_by in SUMS]
    if wrong:
        is_certain = any(which.held[f] == MIXED for f in wrong)
        log.missing(at, wrong, which.sums, is_certain=is_certain)
    result = common(at, which, one, other)
    if PARTIAL in held and not result.sums:
        result = result._replace(sums=frozenset({at}))
    known = None
    if which.known and one.known and other.known:
        triples = zip(which.known, one.known, other.known, strict=True)
        known = tuple(a if yes else b for yes, a, b in triples)
    return result._replace(held=held, doubles=doubles, scale=scale, known=known)


def _masked(predicate: int, held: int) -> int:
    if predicate == REPLICATED:
        return held
    if held == LOOKUP:
        return PARTIAL  # each device has its own rows, and zeros
    if is_split(predicate) and held == REPLICATED:
        return predicate | split([SUMMED])
    return both(predicate, held) if is_split(predicate) and is_split(held) else UNKNOWN


def _of_one_device(
    log: Log, chosen: Value, known: Sequence[int], held: Sequence[int], *, is_inverted: bool
) -> tuple[int, ...]:
    """One device's part and zeros on the others are a partial sum; its copy may also be the input of a first stage."""
    moving = [f for f in range(len(held)) if log.factors.along(f, known)]
    n = sum(bool(number) != is_inverted for number in known)
    if not moving or n * prod(log.factors.all[f].size for f in moving) != len(known):
        return tuple(held)
    is_split_there = all(is_split(chosen.held[f]) for f in moving)
    state = PARTIAL if is_split_there else PART_OR_SUM
    return tuple(state if f in moving else h for f, h in enumerate(held))


def _chosen(predicate: int, one: int, other: int, *, is_known: bool) -> int:
    states = {0 if is_known else predicate, one, other} - {REPLICATED}
    if not states:
        return REPLICATED
    if one == other and predicate == REPLICATED:
        return one
    if all(map(is_split, states)):  # what a device has of its own
        first, *rest = states
        for state in rest:
            first = both(first, state)
        return first
    return UNKNOWN
