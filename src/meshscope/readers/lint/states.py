"""How the devices along a mesh axis hold a value: replicated, split along a dim, as a partial sum, or unknown.

A mesh axis is followed by its prime factors, so that a reduction over a part of an axis is seen as one. `held`
has one number for each factor: a constant of this file, or `split(dims)`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isclose, nan, prod
from operator import mul
from typing import NamedTuple

from meshscope.plans.mesh import Groups, Mesh
from meshscope.readers.hlo.module import Instruction

REPLICATED = 0  # equal on all devices: a fact
PARTIAL = 1  # the sum over the devices is the value of the program
MIXED = 2  # a partial sum to which a replicated value was added that the program computed
UNKNOWN = 3
LOOKUP = 4  # rows of a split argument, read by an index that may be of another device
BIASED = 5  # a partial sum to which an argument or a constant was added, as each device may add a bias to its own part
SUMS = (PARTIAL, MIXED, BIASED)
LISTED = 6  # the addends of all devices, which all devices have side by side
EXCHANGED = 7  # the addends of all devices to the part of each
WHOLE = "devices"  # the axis of a text whose mesh is not known
_SPLIT = 3  # dims are bits above this one
HIDDEN = 24  # instead of a dim: one that has one local element, and that a reshape dropped
SUMMED = 25  # with HIDDEN or OWN: a product may have summed over that dim, and be a partial sum
OWN = 26  # instead of a dim: what a device computed from its parts in another way


def split(dims: Iterable[int]) -> int:
    """Held in parts along one of these dims; several if their local sizes leave it open."""
    return sum(1 << (dim + _SPLIT) for dim in set(dims))


def split_dims(held: int) -> tuple[int, ...]:
    """The dims along one of which a value is split; empty if it is not."""
    bits = held >> _SPLIT
    return tuple(dim for dim in range(bits.bit_length()) if bits >> dim & 1)


def is_split(held: int) -> bool:
    """Whether a value is held in parts."""
    return held >> _SPLIT > 0


A_PART, PART_OR_SUM = split([OWN]), split([OWN, SUMMED])
ADDENDS = {LISTED: REPLICATED, EXCHANGED: A_PART}  # what a sum makes of them


class Double(NamedTuple):
    """A sum over `n` devices that hold the same value; `is_part` if it is also over devices that do not."""

    instruction: Instruction
    n: int
    factors: tuple[int, ...]
    is_part: bool


class Value(NamedTuple):
    """The local array of a device, abstracted.

    `reason` says why a factor is unknown. `sums` are the instructions where partial sums arose, and `doubles` the
    sums of equal copies that the value contains as a linear factor. `scale` is the product of the constants that
    multiplied it since its last nonlinear operation, NaN if they differ. `known` has a scalar integer of each
    device, and `table` the integers of a constant. `weight` names the argument of which the value is a part, `by` is
    the instruction that computed or sent it, and `is_plain` is true of arguments and constants, and of what follows
    from them element by element. `moved` has the device of whose part each device computes after permutes, as a ring
    of attention sends keys and values. `origins` has factors with what they split: rows of the data, or (if true)
    weights. `of_bytes` is the array of which it is the bytes, or some of them.
    `box` has the first and the last place of each dim between which a `pad` left it; around them, it has -inf.
    """

    dims: tuple[int, ...]
    held: tuple[int, ...]
    reason: str = ""
    sums: frozenset[Instruction] = frozenset()
    doubles: frozenset[Double] = frozenset()
    scale: float = 1.0
    constant: float | None = None
    known: tuple[int, ...] | None = None
    table: tuple[int, ...] | None = None
    weight: str | None = None
    by: Instruction | None = None
    is_plain: bool = False
    moved: tuple[int, ...] | None = None
    origins: frozenset[tuple[int, bool]] = frozenset()
    of_bytes: "Value | None" = None
    box: tuple[tuple[int, int], ...] | None = None

    def spread(self, held: Iterable[int], dims: tuple[int, ...] | None = None) -> "Value":
        """The value held in another way, after an operation that computes."""
        dims = self.dims if dims is None else dims
        return self._replace(held=tuple(held), dims=dims, known=None, weight=None)


Tree = Value | tuple["Tree", ...]  # tuples of HLO nest


def leaves(tree: Tree) -> list[Value]:
    """The arrays of a tuple, in order."""
    if isinstance(tree, Value):
        return [tree]
    return [leaf for part in tree for leaf in leaves(part)]


def mapped(tree: Tree, change: Callable[[Value], Value]) -> Tree:
    """The tuple with every array changed."""
    if isinstance(tree, Value):
        return change(tree)
    return tuple(mapped(part, change) for part in tree)


def joined(one: Tree, other: Tree) -> Tree:
    """What is true of both, where two paths of a program meet."""
    if isinstance(one, Value) and isinstance(other, Value):
        return _joined(one, other)
    if isinstance(one, Value) or isinstance(other, Value) or len(one) != len(other):
        first = leaves(one)[0]
        held = (UNKNOWN,) * len(first.held)
        return Value(dims=first.dims, held=held, reason="paths return tuples of different forms")
    return tuple(joined(a, b) for a, b in zip(one, other, strict=True))


def _joined(one: Value, other: Value) -> Value:
    if one.constant == 0 or other.constant == 0:  # zeros are any kind of sum or part
        kept = other if one.constant == 0 else one
        is_same = one.constant == 0 and other.constant == 0
        return kept._replace(constant=0.0 if is_same else None, known=None, weight=None)
    if one == other:
        return one
    pairs = list(zip(one.held, other.held, strict=True))
    held = (both(a, b) for a, b in pairs)
    return Value(
        dims=one.dims,
        held=tuple(local(pair) if h == UNKNOWN else h for h, pair in zip(held, pairs, strict=True)),
        reason=one.reason or other.reason or "two paths of the program hold it differently",
        sums=one.sums | other.sums,
        doubles=one.doubles | other.doubles,
        scale=one.scale if one.scale == other.scale else nan,
        weight=one.weight if one.weight == other.weight else None,
        is_plain=one.is_plain and other.is_plain,
        moved=one.moved if one.moved == other.moved else None,
        origins=one.origins & other.origins,
    )


def is_hidden(held: int) -> bool:
    """Whether the dim of a split may not be seen."""
    return bool(held & split([HIDDEN, OWN]))


def is_placed(held: int) -> bool:
    """Whether a value is split along a dim that is known, or that a reshape dropped, and is no sum."""
    return is_split(held) and min(split_dims(held)) < HIDDEN and not held & PART_OR_SUM


def settled(held: int) -> int:
    """The state that an operand of a nonlinear operation has if the program is correct: no partial sum."""
    return held & ~split([SUMMED])


def may_be_sum(held: int) -> bool:
    """Whether a value may be a partial sum."""
    return held in SUMS or bool(held & split([SUMMED]))


def local(states: Iterable[int]) -> int:
    """The state of what a device computes in any way from arrays in these states: a part of its own, if no sum is open."""
    kept = {settled(held) for held in states} - {REPLICATED}
    if not kept:
        return REPLICATED
    return A_PART if all(map(is_split, kept)) else UNKNOWN


def both(one: int, other: int) -> int:
    """A state that both are; a split must agree on a dim."""
    if one == other:
        return one
    if {one, other} in ({REPLICATED, MIXED}, {REPLICATED, BIASED}):
        return max(one, other)  # a loop that adds a partial sum to what it carries
    if PARTIAL in (one, other) and may_be_sum(one) and may_be_sum(other):
        return max(one, other) if one in SUMS and other in SUMS else PARTIAL
    if not (is_split(one) and is_split(other)):
        return UNKNOWN
    # A broadcast shows a hidden dim again, or the two are split along dims of their own.
    return one & other or ((one | other) if is_hidden(one | other) else UNKNOWN)


def is_inverse(scale: float, n: int) -> bool:
    """Whether a constant undoes a sum of `n` equal copies."""
    return isclose(scale * n, 1.0, rel_tol=1e-2)  # bf16 constants have 8 bits


def reshaped(held: int, before: Sequence[int], after: Sequence[int]) -> int:
    """The split of a reshaped array: the parts stay at the same place of the row-major order."""
    if not is_split(held):
        return held
    prefixes = list(accumulate(after, mul, initial=1))[: len(after)]
    dims: set[int] = set()
    for dim in split_dims(held):
        outer, size = prod(before[:dim]), before[dim] if dim < len(before) else 1
        # A dropped dim may be one that an earlier reshape merged with this one.
        end = outer * size if held & split([HIDDEN]) else outer + 1
        places = [new for new, prefix in enumerate(prefixes) if outer <= prefix < end]
        if dim >= HIDDEN:
            places = [dim]
        elif size == 1:  # a dim of one local element remains one if it can
            places = [new for new in places if after[new] == 1] or [*places, HIDDEN]
        elif not places:  # merged into a dim of which it is not the outermost part
            inside = [n for n, at in enumerate(prefixes) if at <= outer < at * after[n]]
            places = [*inside, HIDDEN]
        dims |= set(places)
    if HIDDEN in dims:  # it may show up again as any dim of one element
        dims |= {dim for dim, size in enumerate(after) if size == 1}
    return split(dims) if dims else UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A prime factor of a mesh axis: devices that differ in it are `stride` apart."""

    axis: str
    size: int
    stride: int

    def part(self, device: int) -> int:
        """The number of the part that a device is in."""
        return device // self.stride % self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The prime factors of a mesh, outermost first, over positions of devices."""

    mesh: Mesh
    all: tuple[Factor, ...]

    def along(self, values: Sequence[int]) -> set[int]:
        """The factors along which the values of the devices differ; none if they are not known."""
        firsts = ((n, f.part, f.stride) for n, f in enumerate(self.all) if len({*values}) > 1)
        return {
            n
            for n, part, stride in firsts
            if any(value != values[at - part(at) * stride] for at, value in enumerate(values))
        }

    def of_groups(self, groups: Groups) -> tuple[int, ...] | None:
        """The factors over which these groups extend; None if they are no groups over factors."""
        group_of = {device: number for number, group in enumerate(groups) for device in group}
        numbers = [group_of.get(device, -1) for device in range(self.mesh.n_devices)]
        varied = tuple(n for n in range(len(self.all)) if n not in self.along(numbers))
        size = prod(self.all[n].size for n in varied)
        return varied if -1 not in numbers and {*map(len, groups)} == {size} else None

    def of_pairs(self, pairs: Groups) -> tuple[int, ...]:
        """The factors that (source, target) pairs cross."""
        return tuple(
            number
            for number, factor in enumerate(self.all)
            if any(factor.part(a) != factor.part(b) for a, b in pairs)
        )

    def text(self, numbers: Iterable[int]) -> str:
        """The axes of factors: `tp`, `dp+tp`, or `4 of 8 tp` for a part of an axis."""
        sizes: dict[str, int] = {}
        for number in numbers:
            factor = self.all[number]
            sizes[factor.axis] = sizes.get(factor.axis, 1) * factor.size
        whole = dict(self.mesh.axes)
        return "+".join(
            name if size == whole[name] else f"{size} of {whole[name]} {name}"
            for name, size in sizes.items()
        )


def factors_of(mesh: Mesh) -> Factors:
    """The prime factors of the axes of a mesh."""
    factors: list[Factor] = []
    stride = mesh.n_devices
    for axis, size in mesh.axes:
        rest, prime = size, 2
        while rest > 1:
            while rest % prime:
                prime += 1
            stride, rest = stride // prime, rest // prime
            factors.append(Factor(axis=axis, size=prime, stride=stride))
    return Factors(mesh=mesh, all=tuple(factors))
