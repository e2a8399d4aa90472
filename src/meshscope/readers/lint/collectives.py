"""How the result of a collective is held, and what its operand says about it."""

from collections.abc import Sequence
from math import prod

from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.shapes import result_arrays
from meshscope.readers.lint import arithmetic
from meshscope.readers.lint.log import Fault, Log
from meshscope.readers.lint.operations import reducer_of
from meshscope.readers.lint.states import (
    A_PART,
    BIASED,
    MIXED,
    REPLICATED,
    SUMS,
    UNKNOWN,
    WHOLE,
    Double,
    Value,
    is_hidden,
    is_inverse,
    is_split,
    may_be_sum,
    split,
)

COLLECTIVES = frozenset(
    {"all-reduce", "cross-replica-sum", "reduce-scatter", "all-gather", "all-to-all"}
    | {"ragged-all-to-all", "collective-broadcast", "collective-permute"}
)


def collective(log: Log, devices: Devices, at: Instruction, values: Sequence[Value]) -> list[Value]:
    """The results of a collective, one for each array."""
    groups, is_pairs = devices.groups(at)
    over = log.factors.of_pairs(groups) if is_pairs else log.factors.of_groups(groups)
    shapes = [array.dims for array in result_arrays(at)]
    if over is None:
        for value in values:
            if sums := [f for f, h in enumerate(value.held) if h in SUMS]:
                log.note(Fault.GROUPS, at, sums, value.sums)
        return [
            log.unknown(shape, "groups of devices that are no groups over axes") for shape in shapes
        ]
    reducer = reducer_of(devices.module, at)
    results = [_result(log, at, over, value, reducer) for value in values]
    if is_pairs:  # devices that are no target get zeros
        targets = {target for _, target in groups}
        gets = [device in targets for device in range(log.factors.mesh.n_devices)]
        differing = [f for f in range(len(log.factors.all)) if log.factors.along(f, gets)]
        for number, one in enumerate(results):
            held = (A_PART if f in differing and h == 0 else h for f, h in enumerate(one.held))
            results[number] = one._replace(held=tuple(held))
    log.order.append((at, tuple(over)))
    return [result._replace(dims=shape) for result, shape in zip(results, shapes, strict=False)]


def _result(
    log: Log, at: Instruction, over: Sequence[int], value: Value, reducer: str | None
) -> Value:
    match at.opcode.removesuffix("-start"):
        case "collective-permute":
            moved = [f for f in over if may_be_sum(value.held[f])]
            return _held(value, moved, UNKNOWN, "a permute over the axis")
        case "all-gather":
            if same := [f for f in over if value.held[f] == REPLICATED]:
                log.note(Fault.GATHERED if value.constant is None else Fault.CONSTANT, at, same)
            whole = _held(value, over, REPLICATED)
            return whole._replace(weight=value.weight, is_plain=value.is_plain)
        case "all-to-all" | "ragged-all-to-all":
            held = (
                h if f not in over or h == UNKNOWN or may_be_sum(h) else A_PART
                for f, h in enumerate(value.held)
            )
            return value.spread(held)._replace(is_plain=False)
        case "collective-broadcast":
            return _held(value, over, REPLICATED)
        case opcode:
            whole = _summed(log, at, over, value, is_sum=reducer == "add")
            if reducer == "add":
                whole = whole._replace(held=_open(log, over, whole.held))
            is_scattered = opcode == "reduce-scatter"
            return _held(whole, over, split(at.dimensions) if is_scattered else REPLICATED)


def _open(log: Log, over: Sequence[int], held: Sequence[int]) -> tuple[int, ...]:
    """What is a sum over a part of an axis, as its reduction says, is one over the rest that is held alike."""
    summed = {(log.factors.all[f].axis, held[f]) for f in over if may_be_sum(held[f])}
    summed = {place for place in summed if place[0] != WHOLE}  # which may be several axes
    places = ((log.factors.all[f].axis, h) for f, h in enumerate(held))
    return tuple(BIASED if place in summed and is_split(place[1]) else place[1] for place in places)


def _held(value: Value, over: Sequence[int], state: int, reason: str = "") -> Value:
    """The value with another state over the factors of a collective."""
    held = tuple(state if f in over else h for f, h in enumerate(value.held))
    constant = 0.0 if value.is_zero else None
    sums = value.sums if any(map(may_be_sum, held)) else frozenset[Instruction]()
    reason = value.reason or reason
    return value.spread(held)._replace(constant=constant, sums=sums, reason=reason, is_plain=False)


def _summed(log: Log, at: Instruction, over: Sequence[int], value: Value, *, is_sum: bool) -> Value:
    """The operand of a reduction, with what the reduction shows about it."""
    if not is_sum:
        if not any(h in SUMS for h in value.held):
            return value
        return arithmetic.nonlinear(log, at, value)._replace(dims=value.dims)
    for state in (MIXED, BIASED):
        if counted := [f for f in over if value.held[f] == state]:
            log.note(Fault.COUNTED, at, counted, value.sums, is_certain=state == MIXED)
    parts = [f for f in over if is_split(value.held[f]) and not is_hidden(value.held[f])]
    if parts:
        log.note(Fault.PARTS, at, parts)
    same = [f for f in over if value.held[f] == REPLICATED]
    n = prod(log.factors.all[f].size for f in same)
    if n == 1 or value.is_zero:
        return value
    double = Double(at, n, tuple(same), is_part=len(same) < len(over))
    log.mark([double], "undone" if is_inverse(value.scale, n) else "seen")
    is_open = value.scale == 1 and value.dims and value.constant is None
    return value._replace(doubles=value.doubles | {double}) if is_open else value
