"""How the result of an operation is held, by its opcode: first on one device, then over several."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf, prod

import numpy as np

from meshscope.plans.mesh import Groups
from meshscope.readers.hlo.dataflow import ARITHMETIC
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.readers.hlo.shapes import result_arrays
from meshscope.readers.lint import arithmetic, dims
from meshscope.readers.lint.arithmetic import dims_of
from meshscope.readers.lint.log import Fault, Log
from meshscope.readers.lint.states import (
    A_PART,
    BIASED,
    EXCHANGED,
    HIDDEN,
    LISTED,
    LOOKUP,
    MIXED,
    PARTIAL,
    REPLICATED,
    SUMS,
    UNKNOWN,
    Double,
    Value,
    is_hidden,
    is_inverse,
    is_placed,
    is_split,
    joined,
    local,
    may_be_sum,
    settled,
    split,
    split_dims,
)

_SPLAT = re.compile(r"[{\s]*(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|true|false|-?inf|-?nan)[}\s]*")
_MOST = 2**31  # of integers that are followed
COLLECTIVES = frozenset(
    {"all-reduce", "cross-replica-sum", "reduce-scatter", "all-gather", "all-to-all"}
    | {"ragged-all-to-all", "collective-broadcast", "collective-permute"}
)
Rule = Callable[[Log, Instruction, Sequence[Value]], Value | list[Value]]


def _constant(log: Log, at: Instruction, _values: Sequence[Value]) -> Value:
    shape = dims_of(at, ())
    if (match := _SPLAT.fullmatch(at.operand_text)) is None:
        numbers = at.operand_text.strip("{} ").split(",")
        is_table = len(shape) == 1 and all(one.strip().isdecimal() for one in numbers)
        table = tuple(map(int, numbers)) if is_table else None
        return log.replicated(shape)._replace(table=table)
    number = float({"true": "1", "false": "0"}.get(match[1], match[1]))
    value = log.replicated(shape, number)
    is_index = at.shape_text.startswith(arithmetic.INDICES) and abs(number) < _MOST
    return value._replace(known=(int(number),) * log.factors.mesh.n_devices if is_index else None)


def _dynamic_slice(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    first, *offsets = values
    if first.table and offsets and (place := offsets[0].known):
        last = len(first.table) - 1
        numbers = tuple(first.table[min(max(number, 0), last)] for number in place)
        return Value(dims=dims_of(at, values), held=(), known=numbers)
    # A start returns its operands, too.
    shapes = [a.dims for a in at.arrays if len(a.dims) == len(first.dims)]
    shape = shapes[at.opcode.endswith("-start") and len(shapes) > 1]
    is_index = at.shape_text.lstrip("(").startswith(arithmetic.INDICES)
    held, parts = list[int](), dict[int, int]()
    for f, h in enumerate(first.held):
        moving = [d for d, offset in enumerate(offsets) if offset.held[f] != REPLICATED]
        numbers = offsets[moving[0]].known if len(moving) == 1 else None
        if not moving or h in SUMS:
            held.append(h)
        elif (
            h == A_PART
            and is_index
            and prod(shape) > 1
            and numbers
            and _is_of_axes(log, numbers, first.dims[moving[0]])
        ):
            log.note(Fault.UNGATHERED, at, [f])  # its row of a table that is its own already
            held.append(h)
        elif may_be_sum(h):  # a part that the device chooses of a sum completes no sum
            held.append(PARTIAL)
        elif h == REPLICATED and f in log.factors.along(numbers or ()):
            held.append(h)
            parts[f] = split([*moving, *[HIDDEN for d in moving if shape[d] == 1]])
        elif is_split(h) and {*split_dims(h)} <= {*moving} and first.weight is not None:
            held.append(LOOKUP)
        else:
            held.append(local([h, *(offset.held[f] for offset in offsets if offset.known is None)]))
    log.slice(first, tuple(parts), shape)
    cut = dims.sliced(first._replace(held=tuple(held)), shape)
    rows = frozenset(() if first.is_plain or is_index else ((f, False) for f in parts))
    return cut._replace(
        held=tuple(parts.get(f, h) for f, h in enumerate(cut.held)), origins=cut.origins | rows
    )


def _is_of_axes(log: Log, numbers: Sequence[int], n_rows: int) -> bool:
    """Whether devices along whole axes have rows of their own, one each."""
    factors = log.factors
    axes = {factors.all[f].axis for f in factors.along(numbers)}
    n = prod(factor.size for factor in factors.all if factor.axis in axes)
    return n == n_rows == max(numbers) + 1 > 1


def _update(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    base, update, *offsets = values
    if base.is_plain and base.constant is None:  # an argument, such as a cache
        log.misused(at, update)
        pairs = enumerate(zip(base.held, update.held, strict=True))
        alike = [f for f, (b, u) in pairs if is_placed(b) and u == REPLICATED]
        if alike and not update.is_plain:
            log.note(Fault.MISMATCH, at, alike)
    merged = joined(base, update._replace(dims=base.dims))
    assert isinstance(merged, Value)
    held = list(merged.held)
    for f, (b, u) in enumerate(zip(base.held, update.held, strict=True)):
        if any(offset.held[f] != REPLICATED for offset in offsets):
            held[f] = local([b, u, *(o.held[f] for o in offsets)])
        elif is_split(b) and (is_split(u) or u == REPLICATED):
            held[f] = b if held[f] == UNKNOWN or not is_hidden(b) else held[f]
    reason = merged.reason or "an update at a place that depends on the device"
    return merged._replace(held=tuple(held), constant=None, reason=reason)


def _pad(_log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    value, filling = values
    value = value._replace(dims=dims_of(at, values), known=None)
    if filling.constant == 0:
        return value
    if filling.constant == -inf and (padding := at.attribute("padding")):
        edges = (map(int, pair.split("_")[:2]) for pair in padding.split("x"))
        box = ((low, size - high) for (low, high), size in zip(edges, value.dims, strict=False))
        return value._replace(constant=None, box=tuple(box))  # the sum of the filling is -inf
    held = tuple(UNKNOWN if h in SUMS else h for h in value.held)
    return value._replace(held=held, constant=None, doubles=frozenset())


def _maximum(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    """The larger of two values; XLA also lays arrays side by side as the maximum of what it pads with -inf."""
    one, other = (v.box if v.by is not None and v.by.opcode == "pad" else None for v in values[:2])
    pairs = zip(one or (), other or (), strict=False)
    if any(max(a, c) >= min(b, d) for (a, b), (c, d) in pairs):  # they share no place
        return _concatenate(log, at, values)
    return arithmetic.nonlinear(log, at, *values)


def _concatenate(log: Log, at: Instruction, values: Sequence[Value]) -> Value:
    if len(values) > 1 and len({*at.operands}) == 1:
        log.ungathered(at, values[0])
    whole = functools.reduce(joined, (v._replace(dims=values[0].dims) for v in values))
    assert isinstance(whole, Value)
    states = [{v.held[f] for v in values} for f in range(len(whole.held))]
    is_sum = [bool(one & {*SUMS}) and one <= {*SUMS, REPLICATED} for one in states]
    held = (PARTIAL if is_sum[f] else h for f, h in enumerate(whole.held))
    return whole._replace(dims=dims_of(at, values), known=None, held=tuple(held))


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
    """The array that libtpu prefetched in slices, mostly of its bytes."""
    of_bytes = values[0].of_bytes
    if of_bytes is not None and {(v.of_bytes, of_bytes.dims) for v in values} == {
        (of_bytes, at.arrays[0].dims)
    }:
        return of_bytes
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
    return Value(
        dims=dims_of(at, values),
        held=held,
        reason=reason if UNKNOWN in held else "",
        origins=values[-1].origins if at.opcode == "scatter" else frozenset(),
    )


def kernel(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value]:
    """The results of a kernel of one device: replicated where its operands are, or split like an operand of equal shape."""
    if at.custom_call_target == "TopK":
        log.misused(at, values[0])
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


def _reducer_of(module: HloModule, at: Instruction) -> str | None:
    """The opcode of a reducer of one operation, else None."""
    computation = module.computations.get(at.called.get("to_apply", ("",))[0])
    passive = {"parameter", "convert", "copy"}
    every = (i.opcode for i in (computation.instructions if computation else ()))
    opcodes = [opcode for opcode in every if opcode not in passive]
    return opcodes[0] if len(opcodes) == 1 else None


def _numbers(at: Instruction, values: Sequence[Value]) -> tuple[int, ...] | None:
    """What an operation of integers is on each device; None if an operand is not known."""
    name = at.attribute("direction") if at.opcode == "compare" else at.opcode
    operands = [np.array(value.known) for value in values if value.known is not None]
    is_followed = name in ARITHMETIC and len(operands) == len(values) == len(at.operands)
    if not is_followed or not at.shape_text.startswith(arithmetic.INDICES):
        return None
    numbers = ARITHMETIC[name or ""](*operands)
    wrapped = numbers.astype(np.uint32 if at.shape_text.startswith("u32") else np.int64)
    return tuple(wrapped.tolist())


def results(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value] | None:
    """The results of an operation, one for each array; None if its opcode or its operands are not known."""
    if (numbers := _numbers(at, values)) is not None:
        return [Value(dims=dims_of(at, values), held=(), known=numbers)]
    rule, n = _RULES.get(at.opcode) or _RULES.get(at.opcode.removesuffix("-start"), (None, 0))
    if rule is None or len(values) < n or (n == 0 and len(at.arrays) > 1):
        return None
    result = rule(log, at, values)
    return [result] if isinstance(result, Value) else result


def _reduce(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value]:
    """The second half of the operands are the starts of the results."""
    reducer, arrays = _reducer_of(log.devices.module, at), values[: max(len(values) // 2, 1)]
    each = ([one, *(v for v in arrays if v is not one)] for one in arrays)
    return [dims.reduced(log, at, ordered, reducer) for ordered in each]


def _sort(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value]:
    one = arithmetic.nonlinear(log, at, *values)
    held = tuple(local([h]) if {*split_dims(h)} & {*at.dimensions} else h for h in one.held)
    return [one._replace(held=held, dims=array.dims) for array in at.arrays]


def _collective(log: Log, at: Instruction, values: Sequence[Value]) -> list[Value]:
    groups, is_pairs = log.devices.groups(at)
    over = log.factors.of_pairs(groups) if is_pairs else log.factors.of_groups(groups)
    shapes = [array.dims for array in result_arrays(at)]
    if at.opcode.startswith("ragged"):  # only its first operand moves
        values = values[:1]
    if over is None:
        for value in values:
            if sums := [f for f, h in enumerate(value.held) if h in SUMS]:
                log.note(Fault.GROUPS, at, sums, value.sums)
        reason = "groups of devices that are no groups over axes"
        return [log.unknown(at, shape, reason) for shape in shapes]
    if is_pairs:
        results = [_permuted(log, at, over, groups, value) for value in values]
    else:
        reducer = _reducer_of(log.devices.module, at)
        results = [_result(log, at, over, value, reducer) for value in values]
    log.order.append((at, tuple(over)))
    return [result._replace(dims=shape) for result, shape in zip(results, shapes, strict=False)]


def _result(
    log: Log, at: Instruction, over: Sequence[int], value: Value, reducer: str | None
) -> Value:
    match at.opcode.removesuffix("-start"):
        case "all-gather":
            log.opened(at, over, value, Fault.UNGATHERED)
            _copies(log, at, over, value)
            log.ungathered(at, value, over)
            whole = _with(value, over, REPLICATED)
            open_on = [f in over and h in (PARTIAL, MIXED) for f, h in enumerate(value.held)]
            pairs = zip(open_on, whole.held, strict=True)
            held = tuple(LISTED if is_open else h for is_open, h in pairs)
            sums = value.sums if LISTED in held else whole.sums
            return whole._replace(
                held=held, sums=sums, weight=value.weight, is_plain=value.is_plain
            )
        case "all-to-all" | "ragged-all-to-all":
            log.opened(at, over, value, Fault.UNGATHERED)
            _copies(log, at, over, value)
            held = (
                h if f not in over or h == UNKNOWN else EXCHANGED if may_be_sum(h) else A_PART
                for f, h in enumerate(value.held)
            )
            origins = frozenset(one for one in value.origins if one[0] not in over)
            return value.spread(held)._replace(is_plain=False, moved=None, origins=origins)
        case "collective-broadcast":
            return _with(value, over, REPLICATED)
        case opcode:
            log.opened(at, over, value)
            whole = _summed(log, at, over, value, is_sum=reducer == "add")
            if opcode != "reduce-scatter":
                return _with(whole, over, REPLICATED)
            parts = _with(whole, over, split(at.dimensions))
            return parts._replace(origins=parts.origins | {(f, False) for f in over})


def _copies(log: Log, at: Instruction, over: Sequence[int], value: Value) -> None:
    """A collective that lays out parts has equal copies of them."""
    if same := [f for f in over if value.held[f] == REPLICATED]:
        log.note(Fault.GATHERED if value.constant is None else Fault.CONSTANT, at, same)


def _permuted(log: Log, at: Instruction, over: Sequence[int], pairs: Groups, value: Value) -> Value:
    """What each target has from its source; devices that are no target get zeros."""
    source_of, factors = {target: source for source, target in pairs}, log.factors
    devices = range(factors.mesh.n_devices)
    if len(pairs) < len(devices):  # the addends of the other devices are lost
        log.missing(at, {f: False for f in over if value.held[f] in SUMS}, value.sums)
    held = list(value.held)
    is_shift = len({target - source for source, target in pairs}) == 1  # to the next stage
    for f in over:
        sources = [
            g
            for g, factor in enumerate(factors.all)
            if f in factors.along([factor.part(source_of.get(d, d)) for d in devices])
        ]
        states = {value.held[g] for g in sources}
        is_exchange = len(sources) == 1 and f not in sources and len(pairs) == len(devices)
        is_alike = len(states) == 1 or (is_shift and all(map(is_split, states)))
        if not is_exchange and (any(map(may_be_sum, states)) or not is_alike):
            held[f] = UNKNOWN
        else:
            held[f] = states.pop() if len(states) == 1 else A_PART
    for f in factors.along([device in source_of for device in devices]):
        held[f] = A_PART if held[f] == REPLICATED else held[f]
    log.rings |= {*over}
    before = value.moved or devices
    moved = tuple(before[source_of.get(device, device)] for device in devices)
    return value.spread(held)._replace(
        constant=0.0 if value.constant == 0 else None,
        reason=value.reason or "a permute over the axis",
        is_plain=False,
        moved=None if moved == (*devices,) or held != [*value.held] else moved,
        origins=frozenset(one for one in value.origins if one[0] not in over),
    )


def _with(value: Value, over: Sequence[int], state: int) -> Value:
    """The value with another state over the factors of a collective."""
    held = tuple(state if f in over else h for f, h in enumerate(value.held))
    constant = 0.0 if value.constant == 0 else None
    sums = value.sums if any(map(may_be_sum, held)) else frozenset[Instruction]()
    return value.spread(held)._replace(
        constant=constant,
        sums=sums,
        is_plain=False,
        moved=None,
        origins=frozenset(one for one in value.origins if one[0] not in over),
    )


def _summed(log: Log, at: Instruction, over: Sequence[int], value: Value, *, is_sum: bool) -> Value:
    """The operand of a reduction, with what the reduction shows about it."""
    summed = {log.factors.all[f].axis for f in over if is_sum and may_be_sum(value.held[f])}
    parts = [
        f
        for f in over
        if is_placed(h := value.held[f])
        or (is_sum and h == LOOKUP)
        or (summed and log.factors.all[f].axis not in summed and is_split(h))
    ]
    if parts:
        log.note(Fault.PARTS, at, parts)
    if not is_sum:
        if not any(h in SUMS for h in value.held):
            return value
        return arithmetic.nonlinear(log, at, value)._replace(dims=value.dims)
    for state in (MIXED, BIASED):
        if counted := [f for f in over if value.held[f] == state]:
            log.note(Fault.COUNTED, at, counted, value.sums, is_certain=state == MIXED)
    same = [f for f in over if value.held[f] == REPLICATED]
    n = prod(log.factors.all[f].size for f in same)
    if n == 1 or value.constant == 0:
        return value
    double = Double(at, n, tuple(same), is_part=len(same) < len(over))
    log.mark([double], "undone" if is_inverse(value.scale, n) else "seen")
    is_open = value.scale == 1 and value.dims and value.constant is None
    return value._replace(doubles=value.doubles | {double}) if is_open else value


_NONLINEAR = (
    "abs and atan2 bitcast-convert cbrt ceil clamp clz compare cosine count-leading-zeros erf erf-inv exponential "
    "exponential-minus-one floor is-finite log log-plus-one logistic minimum not or popcnt power remainder "
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
    "negate": (lambda log, at, v: arithmetic.scaled(log, at, v[0], -1, v[0]), 1),
    "add": (lambda log, at, v: arithmetic.add(log, at, *v[:2]), 2),
    "subtract": (lambda log, at, v: arithmetic.add(log, at, *v[:2]), 2),
    "multiply": (lambda log, at, v: arithmetic.multiply(log, at, *v[:2]), 2),
    "divide": (lambda log, at, v: arithmetic.divide(log, at, *v[:2]), 2),
    "select": (lambda log, at, v: arithmetic.select(log, at, *v[:3]), 3),
    "broadcast": (lambda _, at, v: dims.broadcast(at, v[0]), 1),
    "reshape": (lambda _, at, v: dims.reshape(at, v[0]), 1),
    "transpose": (
        lambda _, at, v: dims.moved(at, v[0], {old: n for n, old in enumerate(at.dimensions)}),
        1,
    ),
    "slice": (lambda _, at, v: dims.sliced(v[0], dims_of(at, v)), 1),
    **dict.fromkeys(("slice-start", "dynamic-slice"), (_dynamic_slice, 1)),
    **dict.fromkeys(COLLECTIVES, (_collective, 1)),
    "reduce": (_reduce, 1),
    "sort": (_sort, 1),
    "dynamic-update-slice": (_update, 2),
    "pad": (_pad, 2),
    "maximum": (_maximum, 2),
    "reduce-window": (_window, 2),
    "concatenate": (_concatenate, 1),
    "dot": (lambda log, at, v: dims.contract(log, at, dims.dot_dims(at, *v[:2]), *v[:2]), 2),
    "convolution": (_convolution, 2),
    "gather": (lambda log, at, v: dims.gathered(log, at, v[0], v[1]), 2),
    **dict.fromkeys(_NONLINEAR.split(), (lambda log, at, v: arithmetic.nonlinear(log, at, *v), 1)),
    **dict.fromkeys(_TOGETHER.split(), (together, 1)),
}
