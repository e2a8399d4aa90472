"""Faults planted in the text of a program: each all-reduce removed, doubled, and over other groups."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_REDUCE = re.compile(r"( *%\S+ = )(\S+) all-reduce(-start)?\((%[^\s,)]+)\), (.*)")
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{[^=]*\}\}|\[[^,]*,[^\]]*\]<=\S+?|mesh\[[^\]]*\] \{[^}]*\})(?=, |$)"
)


class Mutant(NamedTuple):
    """A program with a fault: what was done to which collective, and its text."""

    change: str
    name: str
    text: str


def mutants(text: str, groups: dict[str, str]) -> Iterator[Mutant]:
    """The program with one fault each; `groups` are names and texts of other replica groups."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if (match := _REDUCE.fullmatch(line)) is None:
            continue
        start, shape, is_start, operand, attributes = match.groups()
        name = start.split()[0]
        removed = lines[:]
        removed[number] = f"{start}{shape} copy({operand})"
        if is_start:
            removed = [one.replace(f"all-reduce-done({name})", f"copy({name})") for one in removed]
        yield Mutant("removed", name, "\n".join(removed))
        yield Mutant("doubled", name, "\n".join(_doubled(lines, number, attributes, is_start)))
        for label, other in groups.items():
            regrouped = lines[:]
            assert _GROUPS.search(line)
            regrouped[number] = _GROUPS.sub(f"replica_groups={other}", line)
            yield Mutant(f"over {label}", name, "\n".join(regrouped))


def _doubled(lines: list[str], number: int, attributes: str, is_start: str | None) -> list[str]:
    name = lines[number].split()[0] if not lines[number].lstrip().startswith("ROOT") else ""
    if is_start:
        number = next(n for n, one in enumerate(lines) if f"all-reduce-done({name})" in one)
    result, shape = lines[number].split()[0], lines[number].split()[2]
    later = re.compile(rf"{re.escape(result)}(?=[,)])")
    end = next(n for n in range(number, len(lines)) if lines[n] == "}")
    changed = [later.sub(f"{result}.again", one) for one in lines[number + 1 : end]]
    again = f"  {result}.again = {shape} all-reduce({result}), {attributes}"
    return [*lines[: number + 1], again, *changed, *lines[end:]]
