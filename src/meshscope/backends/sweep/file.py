"""Reads a sweep file: YAML of plain values, limited in size and depth, whose lists expand to experiments.

Scalars follow YAML 1.2: `on`, `off`, `yes`, `no` and `1:30` are text, not booleans or numbers.
Repeated keys, aliases and tags are refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml

from meshscope.errors import ParseError, SpecError, nearest
from meshscope.files import read_text

MAX_BYTES = 1_000_000
MAX_DEPTH = 8  # of nested lists and mappings; a sweep file needs 5
MAX_EXPERIMENTS = 10_000
SECTIONS = ("defaults", "grid", "experiments", "exclude")
ALIASES = {"slice": "topology"}
COMMAND = "command"

_TAG = "tag:yaml.org,2002:"
# Tag, pattern and possible first characters of scalars that are not text.
_FORMS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL", "~nN"),
    ("null", r"", ("",)),
)


def read_document(path: Path) -> dict[str, Any]:
    """The contents of the file; ParseError with file and line if it is not a sweep file."""
    text = read_text(path, "Give a sweep file.", MAX_BYTES)
    try:
        document = yaml.load(text, _Loader)  # noqa: S506  a SafeLoader, and stricter
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ParseError(f"{where}: {error.problem or 'not understood'}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ParseError(f"{path}: not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise ParseError(f"{path}:1: a sweep file is a mapping, such as 'experiments:'.")
    return document


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses aliases, tags, deep nesting and repeated keys."""

    # The patterns by first character, as PyYAML looks them up; the first match counts.
    yaml_implicit_resolvers = {  # noqa: RUF012  as in PyYAML
        first: [
            (_TAG + tag, re.compile(rf"^(?:{form})$"))
            for tag, form, firsts in _FORMS
            if first in tuple(firsts)
        ]
        for first in {first for *_, firsts in _FORMS for first in firsts}
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._depth += 1
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not allowed; use 'defaults', or repeat the values"
        elif getattr(event, "tag", None) is not None:
            problem = f"tags ({event.tag}) are not allowed"
        elif self._depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep. Give a sweep file"
        else:
            node = super().compose_node(parent, index)
            self._depth -= 1
            return node
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        """A mapping whose keys are text and unique."""
        seen: set[str] = set()
        for key, _ in node.value:
            is_text = isinstance(key, yaml.ScalarNode)
            if not is_text or key.value in seen:
                problem = f"'{key.value}' is repeated" if is_text else "a key must be text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        mapping = super().construct_mapping(node, deep=deep)
        return {str(key): value for key, value in mapping.items()}


Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEntry:
    """One experiment of the file: its section, and the options of its command."""

    section: str
    values: Mapping[str, Scalar]

    def __str__(self) -> str:
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
    defaults = _options(document.get("defaults") or {}, "defaults", names, is_plain=True)
    sections: list[tuple[str, dict[str, Any]]] = []  # places in the file, and what they hold
    for section in ("grid", "experiments"):
        content = document.get(section) or []
        for number, item in enumerate(_choices(content), start=1):
            place = section if isinstance(content, dict) else f"{section} {number}"
            sections.append((place, _options(item, place, names)))
    n = sum(prod(len(_choices(value)) for value in options.values()) for _, options in sections)
    if not 1 <= n <= MAX_EXPERIMENTS:
        raise SpecError(
            f"sweep file: {n:,} experiments; 1 to {MAX_EXPERIMENTS:,} are allowed. List some "
            "under 'experiments', or lists of values under 'grid'."
        )
    entries = [
        SweepEntry(section=section, values=defaults | values)
        for section, options in sections
        for values in _combinations(section, options)
    ]
    excluded = document.get("exclude") or []
    if not isinstance(excluded, list):
        raise SpecError("sweep file, exclude: must be a list. Start each item with '-'.")
    kept = entries
    for number, item in enumerate(excluded, start=1):
        exclusion = _options(item, f"exclude {number}", names)
        if not any(_matches(exclusion, entry) for entry in entries):
            raise SpecError(
                f"sweep file: exclude {number} matches no experiment. Write its values as the experiments "
                "do, or remove it."
            )
        kept = [entry for entry in kept if not _matches(exclusion, entry)]
    if not kept:
        raise SpecError("sweep file: 'exclude' removes every experiment. Remove one.")
    return kept


def _options(
    mapping: Any, place: str, names: Sequence[str], *, is_plain: bool = False
) -> dict[str, Any]:
    """The mapping by option names; options that vary together are a list of mappings under any other name."""
    if not isinstance(mapping, dict):
        raise SpecError(f"sweep file, {place}: must be a mapping of options, not '{mapping}'.")
    options: dict[str, Any] = {}
    for written, value in mapping.items():
        name = str(written).replace("-", "_")
        name = ALIASES.get(name, name)
        is_bundle = isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
        if name in options:
            raise SpecError(f"sweep file, {place}: '{written}' repeats '{name}'. Keep one.")
        if name not in names and not is_bundle:
            raise SpecError(f"sweep file, {place}: no option '{written}'. {nearest(name, names)}")
        if is_plain and isinstance(value, list | dict):
            raise SpecError(
                f"sweep file, {place}: values must be plain. Move lists to options of 'grid'."
            )
        if name not in names:
            value = [_options(one, f"{place}, {name}", names, is_plain=True) for one in value]  # noqa: PLW2901
        elif value == [] or any(isinstance(one, list | dict) for one in _choices(value)):
            raise SpecError(
                f"sweep file, {place}: '{name}' must be a plain value or a list of them, not '{value}'."
            )
        options[name] = value
    return options


def _choices(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _combinations(place: str, options: Mapping[str, Any]) -> Iterator[dict[str, Scalar]]:
    for chosen in product(*map(_choices, options.values())):
        values: dict[str, Scalar] = {}
        for name, value in zip(options, chosen, strict=True):
            added = value if isinstance(value, dict) else {name: value}
            if repeated := [one for one in added if one in values]:
                raise SpecError(
                    f"sweep file, {place}: '{repeated[0]}' is set twice, again in '{name}'. Keep one."
                )
            values |= added
        yield values


def _matches(exclusion: Mapping[str, Any], entry: SweepEntry) -> bool:
    return all(
        name in entry.values and entry.values[name] in _choices(value)
        for name, value in exclusion.items()
    )
