"""From the lists of a sweep file to its experiments: every combination once, without those excluded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from meshscope.errors import SpecError, nearest

MAX_EXPERIMENTS = 10_000
SECTIONS = ("defaults", "grid", "experiments", "exclude")
ALIASES = {"slice": "topology"}
COMMAND = "command"

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One experiment as the file has it: the options of its command; `where` it stands."""

    where: str
    values: Mapping[str, Scalar]

    def __str__(self) -> str:
        """What was asked for, as the file writes it."""
        told = ", ".join(f"{name}: {value}" for name, value in self.values.items())
        return f"{self.where} ({told})"


def experiments_of(document: Mapping[str, Any], *, known: Sequence[str]) -> list[Asked]:
    """The experiments that the file asks for, in its order; `known` are the options of all commands.

    SpecError where the file holds anything else.
    """
    unknown = next((name for name in document if name not in SECTIONS), None)
    if unknown is not None:
        raise SpecError(f"sweep file: '{unknown}' is no section. {nearest(unknown, SECTIONS)}")
    names = (*known, COMMAND)
    defaults = _named(document.get("defaults") or {}, "defaults", names)
    if any(not _is_plain(value) for value in defaults.values()):
        raise SpecError("sweep file, defaults: must be plain values; lists stand under 'grid'.")
    entries = list(_entries(document, names))
    for where, entry in entries:
        _check_values(where, entry, names)
    n = sum(prod(len(_choices(value)) for value in entry.values()) for _, entry in entries)
    if not 1 <= n <= MAX_EXPERIMENTS:
        raise SpecError(
            f"sweep file: it asks for {n:,} experiments; 1 to {MAX_EXPERIMENTS:,} can be. List some "
            "under 'experiments', or lists of values under 'grid'."
        )
    asked = [
        Asked(where=where, values=defaults | values)
        for where, entry in entries
        for values in _combinations(where, entry)
    ]
    left = list(_without(asked, _exclusions(document, names)))
    if not left:
        raise SpecError("sweep file: what is excluded is all there is. Take an exclusion out.")
    return left


def _entries(
    document: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What stands under `grid` and `experiments`, each with its place."""
    for section in ("grid", "experiments"):
        found = document.get(section) or []
        listed: list[Any] = found if isinstance(found, list) else [found]
        for number, entry in enumerate(listed, start=1):
            where = section if isinstance(found, dict) else f"{section} {number}"
            yield where, _named(entry, where, names)


def _named(entry: Any, where: str, names: Sequence[str]) -> dict[str, Any]:
    """The entry with the names that the options have here."""
    if not isinstance(entry, dict):
        raise SpecError(f"sweep file, {where}: must hold names with values, not '{entry}'.")
    found: dict[str, Any] = {}
    for written, value in entry.items():
        name = _option(str(written))
        if name in found:
            raise SpecError(f"sweep file, {where}: '{written}' is given twice, as '{name}', too.")
        if name not in names and not _is_bundle(value):
            raise SpecError(f"sweep file, {where}: no option '{written}'. {nearest(name, names)}")
        found[name] = value
    return found


def _option(written: str) -> str:
    """The option that is meant: `weight-dtype` is `weight_dtype`, `slice` is `topology`."""
    name = written.replace("-", "_")
    return ALIASES.get(name, name)


def _is_bundle(value: Any) -> bool:
    """Whether these are options that go together: a list of mappings, under any name."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _choices(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_values(where: str, entry: Mapping[str, Any], names: Sequence[str]) -> None:
    """SpecError unless the values are plain, lists of plain ones, or options that go together."""
    for name, value in entry.items():
        if name not in names:
            for bundle in _choices(value):
                inner = _named(bundle, f"{where}, {name}", names)
                if any(not _is_plain(v) for v in inner.values()):
                    raise SpecError(f"sweep file, {where}, {name}: must hold plain values alone.")
        elif value == [] or not all(map(_is_plain, _choices(value))):
            raise SpecError(
                f"sweep file, {where}: '{name}' must be a plain value or a list of such, not '{value}'."
            )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _combinations(where: str, entry: Mapping[str, Any]) -> Iterator[dict[str, Scalar]]:
    """Every combination of the values in lists."""
    for chosen in product(*map(_choices, entry.values())):
        values: dict[str, Scalar] = {}
        for name, value in zip(entry, chosen, strict=True):
            together = value if isinstance(value, dict) else {name: value}
            more = {_option(str(own)): scalar for own, scalar in together.items()}
            twice = next((n for n in more if n in values), None)
            if twice is not None:
                raise SpecError(
                    f"sweep file, {where}: '{twice}' is set twice, the second time in '{name}'. "
                    "Keep one."
                )
            values |= more
        yield values


def _exclusions(document: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    found = document.get("exclude") or []
    if not isinstance(found, list):
        raise SpecError("sweep file, exclude: must be a list; begin each with '-'.")
    listed = [_named(entry, f"exclude {i}", names) for i, entry in enumerate(found, start=1)]
    for number, entry in enumerate(listed, start=1):
        _check_values(f"exclude {number}", entry, names)
    return listed


def _without(asked: Sequence[Asked], exclusions: Sequence[Mapping[str, Any]]) -> Iterator[Asked]:
    """Those that no exclusion meets; SpecError where an exclusion meets none."""
    met = [False] * len(exclusions)
    for one in asked:
        hits = [i for i, exclusion in enumerate(exclusions) if _meets(exclusion, one)]
        for i in hits:
            met[i] = True
        if not hits:
            yield one
    if not all(met):
        raise SpecError(
            f"sweep file: exclude {met.index(False) + 1} meets no experiment. Write its values as the "
            "experiments do, or take it out."
        )


def _meets(exclusion: Mapping[str, Any], asked: Asked) -> bool:
    return all(
        name in asked.values and asked.values[name] in _choices(value)
        for name, value in exclusion.items()
    )
