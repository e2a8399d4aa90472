"""Expands the lists of a sweep file to its experiments: every combination, minus the excluded ones."""

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
class SweepEntry:
    """One experiment of the file: its section, and the options of its command."""

    section: str
    values: Mapping[str, Scalar]

    def __str__(self) -> str:
        """The entry in the words of the file."""
        values = ", ".join(f"{name}: {value}" for name, value in self.values.items())
        return f"{self.section} ({values})"


def entries_of(document: Mapping[str, Any], *, known: Sequence[str]) -> list[SweepEntry]:
    """The experiments of the file, in its order; `known` are the options of all commands.

    SpecError if the file holds anything else.
    """
    unknown = next((name for name in document if name not in SECTIONS), None)
    if unknown is not None:
        raise SpecError(f"sweep file: unknown section '{unknown}'. {nearest(unknown, SECTIONS)}")
    names = (*known, COMMAND)
    defaults = _options(document.get("defaults") or {}, "defaults", names)
    if any(not _is_plain(value) for value in defaults.values()):
        raise SpecError("sweep file, defaults: values must be plain. Move lists to 'grid'.")
    sections = list(_sections(document, names))
    for section, options in sections:
        _check_values(section, options, names)
    _check_size(sections)
    entries = [
        SweepEntry(section=section, values=defaults | values)
        for section, options in sections
        for values in _combinations(section, options)
    ]
    kept = list(_without(entries, _exclusions(document, names)))
    if not kept:
        raise SpecError("sweep file: 'exclude' removes every experiment. Remove one.")
    return kept


def _check_size(sections: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    n = sum(prod(len(_choices(value)) for value in options.values()) for _, options in sections)
    if not 1 <= n <= MAX_EXPERIMENTS:
        raise SpecError(
            f"sweep file: {n:,} experiments; 1 to {MAX_EXPERIMENTS:,} are allowed. List some "
            "under 'experiments', or lists of values under 'grid'."
        )


def _sections(
    document: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings under `grid` and `experiments`, each with its place in the file."""
    for section in ("grid", "experiments"):
        content = document.get(section) or []
        items: list[Any] = content if isinstance(content, list) else [content]
        for number, item in enumerate(items, start=1):
            place = section if isinstance(content, dict) else f"{section} {number}"
            yield place, _options(item, place, names)


def _options(mapping: Any, place: str, names: Sequence[str]) -> dict[str, Any]:
    """The mapping by option names."""
    if not isinstance(mapping, dict):
        raise SpecError(f"sweep file, {place}: must be a mapping of options, not '{mapping}'.")
    options: dict[str, Any] = {}
    for written, value in mapping.items():
        name = _option_name(str(written))
        if name in options:
            raise SpecError(f"sweep file, {place}: '{written}' repeats '{name}'. Keep one.")
        if name not in names and not _is_bundle(value):
            raise SpecError(f"sweep file, {place}: no option '{written}'. {nearest(name, names)}")
        options[name] = value
    return options


def _option_name(written: str) -> str:
    """The option of a key: `weight-dtype` is `weight_dtype`, `slice` is `topology`."""
    name = written.replace("-", "_")
    return ALIASES.get(name, name)


def _is_bundle(value: Any) -> bool:
    """Whether this is a bundle of options that vary together: a list of mappings, under any name."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _choices(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_values(place: str, options: Mapping[str, Any], names: Sequence[str]) -> None:
    """SpecError unless the values are plain, lists of plain values, or bundles."""
    for name, value in options.items():
        if name not in names:
            for bundle in _choices(value):
                inner = _options(bundle, f"{place}, {name}", names)
                if any(not _is_plain(v) for v in inner.values()):
                    raise SpecError(f"sweep file, {place}, {name}: values must be plain.")
        elif value == [] or not all(map(_is_plain, _choices(value))):
            raise SpecError(
                f"sweep file, {place}: '{name}' must be a plain value or a list of them, not '{value}'."
            )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _combinations(place: str, options: Mapping[str, Any]) -> Iterator[dict[str, Scalar]]:
    """Every combination of the listed values."""
    for chosen in product(*map(_choices, options.values())):
        values: dict[str, Scalar] = {}
        for name, value in zip(options, chosen, strict=True):
            bundle = value if isinstance(value, dict) else {name: value}
            added = {_option_name(str(key)): scalar for key, scalar in bundle.items()}
            repeated = next((n for n in added if n in values), None)
            if repeated is not None:
                raise SpecError(
                    f"sweep file, {place}: '{repeated}' is set twice, again in '{name}'. Keep one."
                )
            values |= added
        yield values


def _exclusions(document: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    content = document.get("exclude") or []
    if not isinstance(content, list):
        raise SpecError("sweep file, exclude: must be a list. Start each item with '-'.")
    items = [_options(item, f"exclude {i}", names) for i, item in enumerate(content, start=1)]
    for number, options in enumerate(items, start=1):
        _check_values(f"exclude {number}", options, names)
    return items


def _without(
    entries: Sequence[SweepEntry], exclusions: Sequence[Mapping[str, Any]]
) -> Iterator[SweepEntry]:
    """The entries that no exclusion matches; SpecError for an exclusion without a match."""
    is_used = [False] * len(exclusions)
    for entry in entries:
        matches = [i for i, exclusion in enumerate(exclusions) if _matches(exclusion, entry)]
        for i in matches:
            is_used[i] = True
        if not matches:
            yield entry
    if not all(is_used):
        raise SpecError(
            f"sweep file: exclude {is_used.index(False) + 1} matches no experiment. Write its values "
            "as the experiments do, or remove it."
        )


def _matches(exclusion: Mapping[str, Any], entry: SweepEntry) -> bool:
    return all(
        name in entry.values and entry.values[name] in _choices(value)
        for name, value in exclusion.items()
    )
