"""How the result of a collective is held, and what its operand says about it."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.shapes import result_arrays
from meshscope.readers.lint import arithmetic
from meshscope.readers.lint.log import Fault, Log
from meshscope.readers.lint.operations import reducer_of
from meshscope.readers.lint.states import (
    A_PART,
    BIASED,
    HIDDEN,
    MIXED,
    REPLICATED,
    SUMS,
    UNKNOWN,
    Double,
    Value,
    is_inverse,
    may_be_sum,
    split,
    split_dims,
)


class _Site(NamedTuple):
    """A collective over factors; `is_sum` if it is a reduction that adds."""

    log: Log
    at: Instruction
    over: tuple[int, ...]
    is_sum: bool


_Rule = Callable[[_Site, Value], Value]


def collective(log: Log, devices: Devices, at: Instruction, values: Sequence[Value]) -> list[Value]:
    """The results of a collective, one for each array."""
    groups, is_pairs = devices.groups(at)
    over = log.factors.of_pairs(groups) if is_pairs else log.factors.of_groups(groups)
    shapes = [array.dims for array in result_arrays(at)]
    opcode = at.opcode.removesuffix("-start")
    if over is None:
        for value in values:
            log.lost(value.doubles)
            if sums := [f for f, h in enumerate(value.held) if h in SUMS]:
                log.note(Fault.GROUPS, at, sums, value.sums)
        return [
            log.unknown(shape, "groups of devices that are no groups over axes") for shape in shapes
        ]
    if opcode == "collective-permute":
        is_full = len(groups) == log.factors.mesh.n_devices
        results = [_permuted(value, over, is_full=is_full) for value in values]
    else:
        site = _Site(log, at, over, reducer_of(devices.module, at) == "add")
        results = [RULES[opcode](site, value) for value in values]
    return [result._replace(dims=shape) for result, shape in zip(results, shapes, strict=False)]


def _held(value: Value, over: Sequence[int], state: int, reason: str = "") -> Value:
    """The value with another state over the factors of a collective."""
    held = tuple(state if f in over else h for f, h in enumerate(value.held))
    constant = 0.0 if value.is_zero else None
    sums = value.sums if any(map(may_be_sum, held)) else frozenset[Instruction]()
    reason = value.reason or reason
    return value.spread(held)._replace(constant=constant, sums=sums, reason=reason, is_plain=False)


def _all_reduce(site: _Site, value: Value) -> Value:
    return _held(_summed(site, value), site.over, REPLICATED)


def _reduce_scatter(site: _Site, value: Value) -> Value:
    return _held(_summed(site, value), site.over, split(site.at.dimensions))


def _summed(site: _Site, value: Value) -> Value:
    """The operand of a reduction, with what the reduction shows about it."""
    log, at, over, is_sum = site
    if not is_sum:
        is_partial = any(h in SUMS for h in value.held)
        return (
            arithmetic.nonlinear(log, at, value)._replace(dims=value.dims) if is_partial else value
        )
    if mixed := [f for f in over if value.held[f] in (MIXED, BIASED)]:
        log.note(Fault.COUNTED, at, mixed, value.sums)
    parts = [
        f
        for f in over
        if any(dim < HIDDEN for dim in split_dims(value.held[f])) and not may_be_sum(value.held[f])
    ]
    if parts and any(may_be_sum(h) for f, h in enumerate(value.held) if f not in parts):
        log.note(Fault.PARTS, at, parts)
    same = [f for f in over if value.held[f] == REPLICATED]
    n = prod(log.factors.all[f].size for f in same)
    if n == 1 or value.is_zero:
        return value
    double = Double(at, n, tuple(same), is_part=len(same) < len(over))
    log.doubled(double)
    if is_inverse(value.scale, n):
        log.undone(frozenset({double}))
    elif value.scale == 1 and value.dims and value.constant is None:
        return value._replace(doubles=value.doubles | {double})
    return value


def _all_gather(site: _Site, value: Value) -> Value:
    if same := [f for f in site.over if value.held[f] == REPLICATED]:
        fault = Fault.GATHERED if value.constant is None else Fault.CONSTANT
        site.log.note(fault, site.at, same)
    whole = _held(value, site.over, REPLICATED)
    return whole._replace(weight=value.weight, is_plain=value.is_plain)


def _all_to_all(site: _Site, value: Value) -> Value:
    held = tuple(
        h if f not in site.over or may_be_sum(h) else UNKNOWN if h == UNKNOWN else A_PART
        for f, h in enumerate(value.held)
    )
    return value.spread(held)._replace(is_plain=False)


def _broadcast(site: _Site, value: Value) -> Value:
    return _held(value, site.over, REPLICATED)


def _permuted(value: Value, over: Sequence[int], *, is_full: bool) -> Value:
    """What devices receive; one without a source gets zeros."""
    moved = [f for f in over if may_be_sum(value.held[f])]
    kept = _held(value, moved, UNKNOWN, "a permute over the axis")
    if is_full:
        return kept
    return kept._replace(held=tuple(UNKNOWN if h == REPLICATED else h for h in kept.held))


RULES: dict[str, _Rule] = {
    "all-reduce": _all_reduce,
    "cross-replica-sum": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "ragged-all-to-all": _all_to_all,
    "collective-broadcast": _broadcast,
}
COLLECTIVES = frozenset({*RULES, "collective-permute"})
