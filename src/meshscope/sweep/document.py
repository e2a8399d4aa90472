"""Reads a sweep file: YAML of plain values, limited in size and depth.

Scalars follow YAML 1.2: `on`, `off`, `yes`, `no` and `1:30` are text, not booleans or numbers.
Repeated keys, aliases and tags are refused.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from meshscope.errors import ParseError
from meshscope.files import read_file

MAX_BYTES = 1_000_000
MAX_DEPTH = 8  # of nested lists and mappings; a sweep file needs 5

_TAG = "tag:yaml.org,2002:"
# Tag, pattern and possible first characters of scalars that are not text.
_FORMS = (
    (f"{_TAG}bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (f"{_TAG}int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        f"{_TAG}float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    (f"{_TAG}null", r"~|null|Null|NULL", "~nN"),
    (f"{_TAG}null", r"", ("",)),
)


def read_document(path: Path) -> dict[str, Any]:
    """The contents of the file; ParseError with file and line if it is not a sweep file."""
    text = _text(path)
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


def _text(path: Path) -> str:
    try:
        content = read_file(path, MAX_BYTES)
    except OSError as error:
        raise ParseError(f"cannot read '{path}': {error.strerror}. Give a sweep file.") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ParseError(
            f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from error


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The patterns by first character, as PyYAML looks them up; the first match counts."""
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, form, firsts in _FORMS:
        for first in firsts:
            resolvers.setdefault(first, []).append((tag, re.compile(rf"^(?:{form})$")))
    return resolvers


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses aliases, tags, deep nesting and repeated keys."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes the next node, one level deeper."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused(
                event, "aliases (*name) are not allowed; use 'defaults', or repeat the values"
            )
        if getattr(event, "tag", None) is not None:
            raise _refused(event, f"tags ({event.tag}) are not allowed")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(event, f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        """A mapping whose keys are text and unique."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be text", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key.value}' is repeated",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        mapping = super().construct_mapping(node, deep=deep)
        return {str(key): value for key, value in mapping.items()}


def _refused(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
