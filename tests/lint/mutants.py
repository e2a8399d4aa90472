"""Faults planted in the text of a program: each collective removed, doubled, and over other groups of devices."""

import re
from collections.abc import Iterator
from itertools import combinations
from math import prod
from typing import NamedTuple

from meshscope.readers.hlo.groups import Groups, parse_groups

REDUCTIONS = ("all-reduce", "reduce-scatter")
_COLLECTIVE = re.compile(
    r"( *(?:ROOT )?(%\S+) = )(\(.*?\)|\S+) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)"
    r"(-start)?\((%[^)]*)\), (.*)"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{[^=]*?\}\}|\[[^,]*,[^\]]*\]<=\S+?|mesh\[[^\]]*\][^{]*\{[^}]*\})(?=, |$)"
)
_DIMENSION = re.compile(r"dimensions=\{(\d+)\}")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Mutant(NamedTuple):
    """A program with one fault: the kind of the collective, its name, what was done to it, and the text."""

    kind: str
    name: str
    change: str
    text: str

    @property
    def is_reduction(self) -> bool:
        return self.kind in REDUCTIONS


def groups_of(sizes: tuple[int, ...]) -> tuple[Groups, ...]:
    """The groups over every subset of the prime factors of a mesh with these sizes of its axes."""
    primes = [p for size in sizes for p in _primes(size)]
    strides = [prod(primes[at + 1 :]) for at in range(len(primes))]
    every: list[Groups] = []
    for count in range(1, len(primes) + 1):
        for chosen in combinations(range(len(primes)), count):
            groups: dict[int, list[int]] = {}
            for device in range(prod(sizes)):
                base = device - sum(device // strides[f] % primes[f] * strides[f] for f in chosen)
                groups.setdefault(base, []).append(device)
            every.append(tuple(map(tuple, groups.values())))
    return tuple(every)


def _primes(size: int) -> Iterator[int]:
    prime = 2
    while size > 1:
        while size % prime:
            prime += 1
        yield prime
        size //= prime


def mutants(text: str, sizes: tuple[int, ...]) -> Iterator[Mutant]:
    """The program with one fault each; `sizes` are the sizes of the axes of its mesh."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if (match := _COLLECTIVE.fullmatch(line)) is None:
            continue
        _, name, shape, kind, is_start, operand, attributes = match.groups()
        removed = _removed(match, sizes)
        if removed is not None:
            changed = [*lines[:number], *removed, *lines[number + 1 :]]
            if is_start:
                changed = [one.replace(f"{kind}-done({name})", f"copy({name})") for one in changed]
            yield Mutant(kind, name, "removed", "\n".join(changed))
        if kind == "all-reduce" and not shape.startswith("("):
            doubled = _doubled(lines, number, attributes, is_start)
            yield Mutant(kind, name, "doubled", "\n".join(doubled))
        if kind == "reduce-scatter":
            first = f"  {name}.first = {_shape_of(lines, number, operand)} all-reduce({operand}), "
            first += re.sub(r"dimensions=\{\d+\}, ", "", attributes)
            again = line.replace(f"reduce-scatter({operand})", f"reduce-scatter({name}.first)")
            doubled = [*lines[:number], first, again, *lines[number + 1 :]]
            yield Mutant(kind, name, "doubled", "\n".join(doubled))
        if (known := _GROUPS.search(line)) is not None:
            groups = _parsed(known[0], sizes)
            for other in groups_of(sizes):
                if other != groups and (kind == "all-reduce" or len(other[0]) == len(groups[0])):
                    regrouped = lines[:]
                    regrouped[number] = _GROUPS.sub(shown := _shown(other), line)
                    change = f"over {shown.removeprefix('replica_groups=')}"
                    yield Mutant(kind, name, change, "\n".join(regrouped))


def with_listed_groups(text: str, n_devices: int) -> str:
    """The text whose groups of devices are lists, which need no mesh."""

    def listed(match: re.Match[str]) -> str:
        form = match[0].removeprefix("replica_groups=")
        return _shown(parse_groups(form, n_devices=n_devices, where="text"))

    return _GROUPS.sub(listed, text)


def _shown(groups: Groups) -> str:
    return "replica_groups={" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


def _parsed(text: str, sizes: tuple[int, ...]) -> Groups:
    form = text.removeprefix("replica_groups=")
    return tuple(sorted(parse_groups(form, n_devices=prod(sizes), where="text")))


def _shape_of(lines: list[str], number: int, operand: str) -> str:
    """The shape of an operand, which is defined before."""
    made = next(
        one
        for one in reversed(lines[:number])
        if one.lstrip().removeprefix("ROOT ").startswith(f"{operand} = ")
    )
    return made.split(" = ", 1)[1].split(" ")[0]


def _removed(match: re.Match[str], sizes: tuple[int, ...]) -> list[str] | None:
    """Lines that give a result of the same shape without communication."""
    start, _, shape, kind, _, operand, attributes = match.groups()
    if kind == "all-to-all" and shape.startswith("("):
        return [f"{start}{shape} tuple({operand})"]
    if shape.startswith("("):
        return None
    if kind in {"all-reduce", "collective-permute", "all-to-all"}:
        return [f"{start}{shape} copy({operand})"]
    dimension = _DIMENSION.search(attributes)
    groups = _GROUPS.search(attributes)
    assert dimension
    assert groups
    members, at = _parsed(groups[0], sizes), int(dimension[1])
    if kind == "all-gather":
        copies = ", ".join([operand] * len(members[0]))
        return [f"{start}{shape} concatenate({copies}), dimensions={{{at}}}"]
    return _own_part(match, members, at)


def _own_part(match: re.Match[str], groups: Groups, at: int) -> list[str] | None:
    """The device's slice of its own operand: its place in its group, from its number."""
    start, name, shape, _, _, operand, _ = match.groups()
    stride, size = groups[0][1] - groups[0][0], len(groups[0])
    dims = [int(d) for d in _SHAPE.match(shape)[2].split(",")]
    if any(tuple(g[0] + stride * i for i in range(size)) != g for g in groups):
        return None
    sizes = ",".join(map(str, dims))
    steps = [
        f"  {name}.id = u32[] partition-id()",
        f"  {name}.n1 = u32[] constant({stride})",
        f"  {name}.row = u32[] divide({name}.id, {name}.n1)",
        f"  {name}.n2 = u32[] constant({size})",
        f"  {name}.place = u32[] remainder({name}.row, {name}.n2)",
        f"  {name}.n3 = u32[] constant({dims[at]})",
        f"  {name}.offset = u32[] multiply({name}.place, {name}.n3)",
        f"  {name}.zero = u32[] constant(0)",
    ]
    offsets = ", ".join(f"{name}.offset" if d == at else f"{name}.zero" for d in range(len(dims)))
    last = f"{start}{shape} dynamic-slice({operand}, {offsets}), dynamic_slice_sizes={{{sizes}}}"
    return [*steps, last]


def _doubled(lines: list[str], number: int, attributes: str, is_start: str | None) -> list[str]:
    is_root = lines[number].lstrip().startswith("ROOT ")
    name = lines[number].removeprefix("  ROOT ").split()[0]
    if is_start:
        number = next(n for n, one in enumerate(lines) if f"all-reduce-done({name})" in one)
        is_root = lines[number].lstrip().startswith("ROOT ")
    words = lines[number].lstrip().removeprefix("ROOT ").split()
    result, shape = words[0], words[2]
    later = re.compile(rf"{re.escape(result)}(?=[,)])")
    end = next(n for n in range(number, len(lines)) if lines[n] == "}")
    changed = [later.sub(f"{result}.again", one) for one in lines[number + 1 : end]]
    root = "ROOT " if is_root else ""
    again = f"  {root}{result}.again = {shape} all-reduce({result}), {attributes}"
    first = lines[number].replace("ROOT ", "")
    return [*lines[:number], first, again, *changed, *lines[end:]]
