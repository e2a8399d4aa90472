"""Where the dims of a value go: matrix products, reductions, reshapes, gathers and slices."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product as product_of
from math import prod

from meshscope.readers.hlo.groups import integers
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.lint.arithmetic import common, dims_of, nonlinear, product, products
from meshscope.readers.lint.log import Fault, Log
from meshscope.readers.lint.states import (
    A_PART,
    ADDENDS,
    HIDDEN,
    LOOKUP,
    OWN,
    PART_OR_SUM,
    PARTIAL,
    REPLICATED,
    SUMMED,
    SUMS,
    UNKNOWN,
    Value,
    is_hidden,
    is_split,
    local,
    may_be_sum,
    reshaped,
    settled,
    split,
    split_dims,
)


def _numbers(instruction: Instruction, name: str) -> tuple[int, ...]:
    """The numbers of an attribute such as `dimensions={0,1}`."""
    return integers((instruction.attribute(name) or "").strip("{}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """Which dims a dot contracts, and where the others go in its result, by dim of each operand."""

    contracted: frozenset[tuple[int, int]]
    left: Mapping[int, int]
    right: Mapping[int, int]

    def of_splits(self, a: int, b: int) -> int:
        """How the product of two split operands is held."""
        lefts, rights = ({dims[at] for dims in self.contracted} for at in (0, 1))
        places, hidden = set[int](), set[int]()
        for i, j in product_of(split_dims(settled(a)), split_dims(settled(b))):
            if i in self.left and self.left[i] == self.right.get(j):
                places.add(self.left[i])
            elif (i, j) in self.contracted:
                places.add(SUMMED)
            elif max(i, j) >= HIDDEN and (i in lefts or j in rights or min(i, j) >= HIDDEN):
                places |= {max(i, j), SUMMED}  # a dropped dim may be merged with the one after it
            elif max(i, j) >= HIDDEN:  # it may be the free dim of the other operand
                hidden |= {max(i, j), self.left[i] if i in self.left else self.right[j]}
        if not places or min(places) >= HIDDEN:
            places |= hidden
        return PARTIAL if places == {SUMMED} else split(places) if places else UNKNOWN


def contract(log: Log, at: Instruction, dims: Contraction, one: Value, other: Value) -> Value:
    """A matrix product."""
    one, other = (
        v._replace(held=tuple(UNKNOWN if h == LOOKUP else h for h in v.held)) for v in (one, other)
    )
    held = list(products(log, at, one, other, dims.of_splits))
    is_new, alone = False, [REPLICATED] * len(held)
    for f, (a, b) in enumerate(zip(one.held, other.held, strict=True)):
        if REPLICATED in (a, b) and is_split(a | b):
            rest, places = (other, dims.left) if is_split(a) else (one, dims.right)
            # A replicated operand adds parts of a dim only if it is a constant.
            kept = _placed(a | b, places)
            held[f] = PARTIAL if kept == UNKNOWN and rest.constant is not None else kept
            alone[f] = a | b
        is_new |= may_be_sum(held[f]) and not (may_be_sum(a) or may_be_sum(b))
    log.mismatch(at, zip(alone, alone, held, strict=True))
    alike = [f for f, (a, b) in enumerate(zip(one.held, other.held, strict=True)) if a == b == 0]
    if alike and not (one.is_plain and other.is_plain):
        log.note(Fault.ALIKE, at, alike)
    one, other = (_with_origins(v, rest, held) for v, rest in ((one, other), (other, one)))
    result = product(log, at, one, other)._replace(held=tuple(held), is_plain=False)
    return result._replace(sums=result.sums | {at}) if is_new else result


def _with_origins(value: Value, other: Value, product_held: Sequence[int]) -> Value:
    """A weight with the factors that split it, unless the other operand is split in the same way."""
    if not value.is_plain or value.origins:
        return value
    is_alike = [
        is_split(o) and (p == PARTIAL or (is_split(p) and not is_hidden(p)))
        for o, p in zip(other.held, product_held, strict=True)
    ]
    split_by = (f for f, h in enumerate(value.held) if is_split(h) and not is_alike[f])
    return value._replace(origins=frozenset((f, True) for f in split_by))


def dot_dims(at: Instruction, one: Value, other: Value) -> Contraction:
    """The dims of a `dot`: batch, then the free dims of the left and of the right."""
    left, right = _numbers(at, "lhs_contracting_dims"), _numbers(at, "rhs_contracting_dims")
    batches = _numbers(at, "lhs_batch_dims"), _numbers(at, "rhs_batch_dims")
    places: list[dict[int, int]] = []
    free = len(batches[0])
    for value, contracted, batch in ((one, left, batches[0]), (other, right, batches[1])):
        place = {dim: number for number, dim in enumerate(batch)}
        for dim in range(len(value.dims)):
            if dim not in contracted and dim not in batch:
                place[dim] = free
                free += 1
        places.append(place)
    return Contraction(
        contracted=frozenset(zip(left, right, strict=False)), left=places[0], right=places[1]
    )


_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def convolution_dims(at: Instruction, one: Value, other: Value) -> Contraction | None:
    """The dims of a convolution that is a matrix product; None for another one.

    XLA's DotToConvolution makes batch, contracted and free dims spatial ones, which the window tells apart.
    """
    labels = _LABELS.search(at.attributes)
    if labels is None or "group_count" in at.attributes:
        return None
    lhs, rhs, out = labels.groups()
    left, right = {lhs.index("b"): out.index("b")}, {rhs.index("o"): out.index("f")}
    contracted = {(lhs.index("f"), rhs.index("i"))}
    match = _WINDOW.search(at.attributes)
    window = dict(part.split("=", 1) for part in match[1].split()) if match else {}
    n_spatial = len(lhs) - 2
    sizes = window.get("size", "x".join("1" * n_spatial)).split("x")
    dilations = window.get("lhs_dilate", "x".join("1" * n_spatial)).split("x")
    for spatial in range(n_spatial):
        i, j, k = (text.index(str(spatial)) for text in (lhs, rhs, out))
        n_left, n_right, n_out = one.dims[i], other.dims[j], dims_of(at, (one,))[k]
        if int(sizes[spatial]) != n_right:
            return None
        if n_right == 1:
            left[i], right[j] = k, HIDDEN
        elif n_left == 1 and n_out == n_right:
            left[i], right[j] = HIDDEN, k
        elif n_left == n_right == n_out and int(dilations[spatial]) > 1:
            left[i] = right[j] = k
        elif n_left == n_right and n_out == 1:
            contracted.add((i, j))
        else:
            return None
    return Contraction(contracted=frozenset(contracted), left=left, right=right)


def moved(at: Instruction, value: Value, places: Mapping[int, int]) -> Value:
    """A value whose dims go to other places; a split along a dim without one is unknown."""
    held = tuple(_placed(h, places) for h in value.held)
    return value._replace(dims=dims_of(at, (value,)), held=held)


def broadcast(at: Instruction, value: Value) -> Value:
    """A value with more dims; new ones of one element before a split dim may be what the devices split."""
    whole = moved(at, value, dict(enumerate(at.dimensions)))
    held = list[int]()
    for h in whole.held:
        dims = {*split_dims(h)}
        for dim in sorted(dims):
            while (
                dim < HIDDEN and dim - 1 not in at.dimensions and whole.dims[dim - 1 : dim] == (1,)
            ):
                dims.add(dim := dim - 1)
        held.append(split(dims) if is_split(h) else h)
    return whole._replace(held=tuple(held))


def _placed(held: int, places: Mapping[int, int]) -> int:
    if not is_split(held):
        return held
    dims = {places.get(dim, dim) for dim in split_dims(held) if dim in places or dim >= HIDDEN}
    return split(dims) if dims else UNKNOWN


def reshape(at: Instruction, value: Value) -> Value:
    """A reshaped value."""
    dims = dims_of(at, (value,))
    held = tuple(reshaped(h, value.dims, dims) for h in value.held)
    return value._replace(dims=dims, held=held)


_LAYOUT = re.compile(r"\]\{([\d,]*)")


def bitcast(at: Instruction, value: Value, source: Instruction | None) -> Value:
    """A reinterpreted array: a reshape of its dims in the order of their memory, or its bytes."""
    dims = dims_of(at, (value,))
    before = _layout(source, value.dims) if source is not None else None
    after = _layout(at, dims)
    if before is None or after is None or prod(dims) != prod(value.dims):
        parts = (PART_OR_SUM if may_be_sum(h) else A_PART for h in value.held)
        each = zip(value.held, parts, strict=True)
        as_bytes = tuple(part if is_split(h) else h for h, part in each)
        return value._replace(dims=dims, held=as_bytes, of_bytes=value)
    to_memory = {dim: place for place, dim in enumerate(before)}
    from_memory = dict(enumerate(after))
    in_memory, out_memory = [value.dims[d] for d in before], [dims[d] for d in after]
    held: list[int] = []
    for h in value.held:
        lying = _placed(reshaped(_placed(h, to_memory), in_memory, out_memory), from_memory)
        # A unit dim that appears may be the split one, wherever it lies.
        may_hide = {*split_dims(lying)} - {OWN, SUMMED} and dims.count(1) > value.dims.count(1)
        units = [dim for dim, size in enumerate(dims) if size == 1]
        held.append(split([*split_dims(lying), *units, HIDDEN]) if may_hide else lying)
    of_bytes = value if len(dims) == 1 < len(value.dims) else None
    return value._replace(dims=dims, held=tuple(held), of_bytes=of_bytes)


def _layout(instruction: Instruction, dims: Sequence[int]) -> list[int] | None:
    """The dims from the outermost in memory to the innermost; in their order if the text has no layout."""
    match = _LAYOUT.search(instruction.shape_text)
    order = [int(d) for d in match[1].split(",") if d] if match else list(range(len(dims)))[::-1]
    return order[::-1] if len(order) == len(dims) else None


def reduced(log: Log, at: Instruction, values: Sequence[Value], reducer: str | None) -> Value:
    """One result of a reduction over dims of an array."""
    value, dims = values[0], _numbers(at, "dimensions")
    kept = [dim for dim in range(len(value.dims)) if dim not in dims]
    places = {dim: new for new, dim in enumerate(kept)}
    is_sum = reducer == "add"
    if not is_sum:
        value = nonlinear(log, at, *values)._replace(dims=value.dims)
    held: list[int] = []
    is_new = False
    for h in value.held:
        gone = {*split_dims(h)} & {*dims}
        if h in ADDENDS and is_sum:
            held.append(ADDENDS[h])
        elif not gone:
            held.append(_placed(h, places))
        elif is_sum and {*split_dims(h)} == gone and all(value.dims[dim] != 1 for dim in gone):
            held.append(PARTIAL)
            is_new = True
        elif not is_sum and any(value.dims[dim] != 1 for dim in gone):
            held.append(local([h]))
        else:  # the sum over one local element is a reshape, to the compiler
            left = {places.get(dim, max(dim, HIDDEN)) for dim in split_dims(h)} - {SUMMED}
            held.append(split({*left, HIDDEN, *([SUMMED] if is_sum else [])}))
            is_new |= is_sum
    shape = tuple(value.dims[dim] for dim in kept)
    result = value.spread(held, shape)._replace(constant=None)
    return result._replace(sums=result.sums | {at}) if is_new else result


def gathered(log: Log, at: Instruction, table: Value, rows: Value) -> Value:
    """Rows of an array, by their indices."""
    offsets, collapsed = _numbers(at, "offset_dims"), _numbers(at, "collapsed_slice_dims")
    started, sizes = _numbers(at, "start_index_map"), _numbers(at, "slice_sizes")
    taken = [dim for dim in range(len(table.dims)) if dim not in collapsed]
    places = dict(zip(taken, offsets, strict=False))
    dims = dims_of(at, (table,))
    batch = [dim for dim in range(len(dims)) if dim not in offsets]
    vector = int(at.attribute("index_vector_dim") or -1)
    index_places = dict(zip([d for d in range(len(rows.dims)) if d != vector], batch, strict=False))
    held: list[int] = []
    for t, r in zip(table.held, rows.held, strict=True):
        whole = [d for d in split_dims(t) if d in places and sizes[d : d + 1] == (table.dims[d],)]
        if t == REPLICATED:
            rows_held = _placed(r, index_places)
            held.append(local([r]) if rows_held == UNKNOWN else settled(rows_held))
        elif is_split(t) and whole and r == REPLICATED:
            held.append(split(places[d] for d in whole))
        elif is_split(t) and {*split_dims(t)} <= {*started} and table.weight is not None:
            held.append(LOOKUP)
        elif t in SUMS and r == REPLICATED:
            held.append(t)
        else:
            held.append(local([t, r]))
    if not table.is_plain:
        rows = rows._replace(origins=frozenset())
    return common(log, at, table, rows)._replace(
        held=tuple(held), doubles=table.doubles, scale=table.scale, is_plain=False
    )


def sliced(value: Value, dims: tuple[int, ...]) -> Value:
    """A part of a value. What is cut out of a split dim may have been one element of a dim that a reshape merged."""
    held = tuple(
        split([*split_dims(h), HIDDEN])
        if any(dims[d] < value.dims[d] for d in split_dims(h) if d < HIDDEN)
        else h
        for h in value.held
    )
    return value._replace(dims=dims, held=held, known=None)
