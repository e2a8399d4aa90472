"""How the result of an operation on one device is held, by its opcode."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.lint import arithmetic, dims
from meshscope.readers.lint.arithmetic import dims_of
from meshscope.readers.lint.log import Log
from meshscope.readers.lint.states import (
    A_PART,
    HIDDEN,
    LOOKUP,
    PARTIAL,
    REPLICATED,
    SUMS,
    UNKNOWN,
    Value,
    is_split,
    joined,
    local,
    may_be_sum,
    settled,
    split,
    split_dims,
)

_SPLAT = re.compile(r"[{\s]*(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|true|false|-?inf|-?nan)[}\s]*")
_DIRECTION = re.compile(r"direction=(\w+)")
_INTEGERS: Mapping[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shift-left": lambda a, b: a << b,
    "shift-right-logical": lambda a, b: a >> b,
    "remainder": lambda a, b: a % b if b else 0,
    "maximum": max,
    "minimum": min,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}

Rule = Callable[[Log, Instruction, Sequence[Value]], Value]


def _negate(_log: Log, _at: Instruction, values: Sequence[Value]) -> Value:
    value = values[0]
    constant = None if value.constant is None else -value.constant
    known = arithmetic.on_each(lambda n: -n, value)
    return value._replace(known=known, constant=constant, weight=None)


def _constant(log: Log, at: Instruction, _values: Sequence[Value]) -> Value:
    shape = dims_of(at, ())
    if (match := _SPLAT.fullmatch(at.operand_text)) is None:
        numbers = at.operand_text.strip("{} ").split(",")
        is_table = len(shape) == 1 and all(one.strip().isdecimal() for one in numbers)
        table = tuple(map(int, numbers)) if is_table else None
        return log.replicated(shape)._replace(table=table)
    number = float({"true": "1", "false": "0"}.get(match[1], match[1]))
    value = log.replicated(shape, number)
    is_whole = abs(number) < 2**53 and number.is_integer()
    return value._replace(known=(int(number),) * log.factors.mesh.n_devices if is_whole else None)


def known(log: Log, shape: tuple[int, ...], numbers: Sequence[int]) -> Value:
    """A scalar whose value on each device is known."""
    factors = log.factors
    differs = [factors.along(f, numbers) for f in range(len(factors.all))]
    return Value(
        dims=shape,
        held=tuple(A_PART if d else REPLICATED for d in differs),
        known=tuple(numbers),
        constant=None if any(differs) else float(numbers[0]),
    )


def _nonlinear(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    name = at.opcode
    if name == "compare" and (direction := _DIRECTION.search(at.attributes)):
        name = direction[1]
    one, other = values[0].known, values[-1].known
    if len(values) == 2 and one and other and name in _INTEGERS and min(*one, *other) >= 0:
        pairs = zip(one, other, strict=True)
        return known(log, dims_of(at, values), [int(_INTEGERS[name](a, b)) for a, b in pairs])
    return arithmetic.nonlinear(log, at, *values)


def _dynamic_slice(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    first, *offsets = values
    place = offsets[0].known if first.table and offsets else None
    if first.table and place and max(place) < len(first.table):
        return known(log, dims_of(at, values), [first.table[number] for number in place])
    # A start returns its operands, too.
    shapes = [a.dims for a in at.arrays if len(a.dims) == len(first.dims)]
    shape = shapes[at.opcode.endswith("-start") and len(shapes) > 1]
    held, parts = list[int](), dict[int, int]()
    for f, h in enumerate(first.held):
        moving = [d for d, offset in enumerate(offsets) if offset.held[f] != REPLICATED]
        numbers = offsets[moving[0]].known if len(moving) == 1 else None
        if not moving or h in SUMS:
            held.append(h)
        elif may_be_sum(h):  # a part that the device chooses of a sum completes no sum
            held.append(PARTIAL)
        elif h == REPLICATED and numbers and log.factors.along(f, numbers):
            held.append(h)
            parts[f] = split([*moving, *[HIDDEN for d in moving if shape[d] == 1]])
        elif is_split(h) and {*split_dims(h)} <= {*moving} and first.weight is not None:
            held.append(LOOKUP)
        else:
            held.append(local([h, *(offset.held[f] for offset in offsets if offset.known is None)]))
    log.slice(first, tuple(parts), shape)
    cut = dims.sliced(first._replace(held=tuple(held)), shape)
    return cut._replace(held=tuple(parts.get(f, h) for f, h in enumerate(cut.held)))


def _update(_log: Log, _at: Instruction, values: Sequence[Value]) -> Value:
    base, update, *offsets = values
    merged = joined(base, update._replace(dims=base.dims))
    assert isinstance(merged, Value)
    held = list(merged.held)
    for f, (b, u) in enumerate(zip(base.held, update.held, strict=True)):
        if any(offset.held[f] != REPLICATED for offset in offsets):
            held[f] = local([b, u, *(o.held[f] for o in offsets if o.known is None)])
        elif is_split(b) and held[f] == UNKNOWN and (is_split(u) or u == REPLICATED):
            held[f] = b
    reason = merged.reason or "an update at a place that depends on the device"
    return merged._replace(held=tuple(held), constant=None, reason=reason)


def _pad(_log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    value, filling = values
    value = value._replace(dims=dims_of(at, values), known=None)
    if filling.is_zero:
        return value
    held = tuple(UNKNOWN if h in SUMS else h for h in value.held)
    return value._replace(held=held, constant=None, doubles=frozenset())


def _concatenate(_log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    whole = functools.reduce(joined, (v._replace(dims=values[0].dims) for v in values))
    assert isinstance(whole, Value)
    return whole._replace(dims=dims_of(at, values), known=None)


def _window(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    """A reduction of windows, over the dims in which they are larger than one element."""
    sizes = re.search(r"size=([\dx]+)", at.attributes)
    if len(values) != 2 or sizes is None:
        return together(log, at, values)
    wide = {dim for dim, size in enumerate(sizes[1].split("x")) if size != "1"}
    value = arithmetic.nonlinear(log, at, values[0])
    held = tuple(local([h]) if {*split_dims(h)} & wide else h for h in value.held)
    return value._replace(held=held)


def joined_slices(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    """The array that libtpu prefetched in slices."""
    whole = _concatenate(log, at, values)
    if len(whole.dims) == len(values[0].dims):
        return whole
    return whole._replace(held=tuple(UNKNOWN if is_split(h) else h for h in whole.held))


def _convolution(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    one, other = values
    of_product = dims.convolution_dims(at, one, other)
    if of_product is None:
        return together(log, at, values)
    return dims.contract(log, at, of_product, one, other)


def together(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    """Replicated where all operands are, else a part of each device."""
    held = tuple(local(v.held[f] for v in values) for f in range(len(log.factors.all)))
    name = at.custom_call_target or at.opcode
    reason = next(
        (v.reason for v in values if v.reason), f"{name} of what devices hold differently"
    )
    return Value(dims=dims_of(at, values), held=held, reason=reason if UNKNOWN in held else "")


def kernel(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value]:
    """The results of a kernel of one device: replicated where its operands are, or split like an operand of equal shape."""
    whole, results = together(log, at, values), list[Value]()
    for array in at.arrays:
        held = list(whole.held)
        for f, h in enumerate(held):
            states = {settled(v.held[f]) for v in values} - {REPLICATED}
            alike = {settled(v.held[f]) for v in values if v.dims == array.dims} & states
            if is_split(h) and len(alike) == 1:
                held[f] = alike.pop()
        results.append(whole._replace(dims=array.dims, held=tuple(held)))
    return results


def sort(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value]:
    """The results of a sort along a dim."""
    result = arithmetic.nonlinear(log, at, *values)
    held = tuple(local([h]) if {*split_dims(h)} & {*at.dimensions} else h for h in result.held)
    return [result._replace(held=held, dims=array.dims) for array in at.arrays]


def reduce(log: Log, at: Instruction, values: Sequence[Value], reducer: str | None) -> list[Value]:
    """The results of a reduction, one for each array; the second half of the operands are its starts."""
    arrays = values[: max(len(values) // 2, 1)]
    return [
        dims.reduced(log, at, [one, *(v for v in arrays if v is not one)], reducer)
        for one in arrays
    ]


def reducer_of(module: HloModule, at: Instruction) -> str | None:
    """The opcode of a reducer of one operation, else None."""
    computation = module.computations.get(at.called.get("to_apply", ("",))[0])
    passive = {"parameter", "convert", "copy"}
    every = (i.opcode for i in (computation.instructions if computation else ()))
    opcodes = [opcode for opcode in every if opcode not in passive]
    return opcodes[0] if len(opcodes) == 1 else None


def array(
    log: Log, computation: Computation, at: Instruction, values: Sequence[Value]
) -> Value | None:
    """The result of an operation with one array; None if its opcode or its operands are not known."""
    if at.opcode == "bitcast" and values:
        return dims.bitcast(at, values[0], computation.producer(at))
    rule, n = _RULES.get(at.opcode, (None, 0))
    if rule is None or len(values) < n or (n == 0 and len(at.arrays) > 1):
        return None
    return rule(log, at, values)


_NONLINEAR = (
    "abs and atan2 bitcast-convert cbrt ceil clamp clz compare cosine count-leading-zeros erf erf-inv exponential "
    "exponential-minus-one floor is-finite log log-plus-one logistic maximum minimum not or popcnt power remainder "
    "round-nearest-afz round-nearest-even rsqrt shift-left shift-right-arithmetic shift-right-logical sign sine "
    "sqrt stochastic-convert tan tanh xor"
)
_TOGETHER = "scatter select-and-scatter rng-bit-generator map fft triangular-solve cholesky"
# Of each opcode: its rule, and the least number of its operands.
_RULES: Mapping[str, tuple[Rule, int]] = {
    "constant": (_constant, 0),
    "iota": (lambda log, at, _: log.replicated(dims_of(at, ())), 0),
    "after-all": (lambda log, _at, _: log.replicated(()), 0),
    **dict.fromkeys(("convert", "reduce-precision", "reverse"), (lambda _, _at, v: v[0], 1)),
    "negate": (_negate, 1),
    "add": (lambda log, at, v: arithmetic.add(log, at, *v[:2]), 2),
    "subtract": (lambda log, at, v: arithmetic.add(log, at, *v[:2]), 2),
    "multiply": (lambda log, at, v: arithmetic.multiply(log, at, *v[:2]), 2),
    "divide": (lambda log, at, v: arithmetic.divide(log, at, *v[:2]), 2),
    "select": (lambda log, at, v: arithmetic.select(log, at, *v[:3]), 3),
    "broadcast": (lambda _, at, v: dims.moved(at, v[0], dict(enumerate(at.dimensions))), 1),
    "reshape": (lambda _, at, v: dims.reshape(at, v[0]), 1),
    "transpose": (
        lambda _, at, v: dims.moved(at, v[0], {old: n for n, old in enumerate(at.dimensions)}),
        1,
    ),
    "slice": (lambda _, at, v: dims.sliced(v[0], dims_of(at, v)), 1),
    **dict.fromkeys(("slice-start", "dynamic-slice", "dynamic-slice-start"), (_dynamic_slice, 1)),
    "dynamic-update-slice": (_update, 2),
    "pad": (_pad, 2),
    "reduce-window": (_window, 2),
    "concatenate": (_concatenate, 1),
    "dot": (lambda log, at, v: dims.contract(log, at, dims.dot_dims(at, *v[:2]), *v[:2]), 2),
    "convolution": (_convolution, 2),
    "gather": (lambda _, at, v: dims.gathered(at, v[0], v[1]), 2),
    **dict.fromkeys(_NONLINEAR.split(), (_nonlinear, 1)),
    **dict.fromkeys(_TOGETHER.split(), (together, 1)),
}
