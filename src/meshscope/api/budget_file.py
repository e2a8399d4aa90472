"""Reads a budget file: programs in TOML, each with limits on its communication, time and memory."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from meshscope.analysis.budget import LIMITS, OF_COLLECTIVES, Budget, Filter, Limit
from meshscope.api.request import CompileRequest
from meshscope.errors import ParseError, nearest
from meshscope.events.enums import Kind, Phase
from meshscope.files import read_file

FILTERS: dict[str, Any] = {"phase": Phase, "axis": str, "kind": Kind}
PROGRAM = "program"
BUDGET = "budget"
_OPTIONS = tuple(field.name for field in fields(CompileRequest) if field.name != "model")
_SOURCES = ("entry", "model", "run")
_HEADER = re.compile(r"\s*\[\[?\s*([\w.\s]+?)\s*\]\]?\s*(#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedProgram:
    """A program of a budget file: an entry point, a model with options, or a saved run.

    `is_predicted` is whether a model is predicted instead of compiled.
    """

    name: str
    line: int
    entry: str | None
    model: str | None
    run: str | None
    is_predicted: bool
    options: Mapping[str, Any]
    budgets: tuple[Budget, ...]


def read_budget_file(path: Path) -> tuple[BudgetedProgram, ...]:
    """The programs of the file; ParseError with file and line for anything that is not understood."""
    try:
        text = read_file(path).decode()
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParseError(f"{path}: not TOML: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ParseError(f"cannot read '{path}': {reason}. Give a budget file in TOML.") from error
    file = _File(path=path, lines=text.splitlines())
    shared = {name: value for name, value in document.items() if name != PROGRAM}
    file.check_keys(shared, _OPTIONS, "a budget file", ())
    programs = document.get(PROGRAM, [])
    if not isinstance(programs, list) or not programs:
        raise ParseError(f"{path}:1: there is no [[program]]. Add one, with entry, model or run.")
    return tuple(file.program(values, number, shared) for number, values in enumerate(programs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The text of a budget file, to find the line of a key."""

    path: Path
    lines: list[str]

    def line_of(self, key: str, at: tuple[int, ...]) -> int:
        """The line of a key in the program and budget with these numbers; of their header if inline."""
        header = start = 1
        place = (-1, -1)
        for number, line in enumerate(self.lines, start=1):
            if match := _HEADER.match(line):
                is_program = match[1] == PROGRAM
                place = (place[0] + 1, -1) if is_program else (place[0], place[1] + 1)
                start = number
            inside = place[: len(at)] == at if at else place[0] == -1
            if inside and start != header:
                header = start
            if inside and re.search(rf"\b{re.escape(key)}\s*=", line):
                return number
        return header

    def error(self, key: str, at: tuple[int, ...], message: str) -> ParseError:
        return ParseError(f"{self.path}:{self.line_of(key, at)}: {message}")

    def check_keys(
        self, values: Mapping[str, Any], known: Iterable[str], where: str, at: tuple[int, ...]
    ) -> None:
        """ParseError with line and nearest name for a key that is not known."""
        names = list(known)
        for name in values:
            if name not in names:
                raise self.error(name, at, f"'{name}' is no key of {where}. {nearest(name, names)}")

    def program(self, values: Any, number: int, shared: Mapping[str, Any]) -> BudgetedProgram:
        at = (number,)
        if not isinstance(values, dict):
            raise ParseError(f"{self.path}: write programs as [[program]] tables.")
        keys = ("name", "predict", BUDGET, *_SOURCES, *_OPTIONS)
        self.check_keys(values, keys, "a program", at)
        sources = [name for name in _SOURCES if name in values]
        if len(sources) != 1:
            raise self.error(PROGRAM, at, "a program has one of entry, model and run.")
        for name in ("name", *sources):
            self._check_type(values.get(name, ""), str, name, at)
        self._check_type(values.get("predict", False), bool, "predict", at)
        given = [name for name in values if name in _OPTIONS or name == "predict"]
        if sources != ["model"] and given:
            raise self.error(given[0], at, f"'{given[0]}' is a key of programs with a model.")
        budgets = values.get(BUDGET, [])
        if not isinstance(budgets, list) or not budgets:
            raise self.error(PROGRAM, at, "the program has no [[program.budget]]. Add one.")
        options = {n: v for n, v in {**shared, **values}.items() if n in _OPTIONS}
        return BudgetedProgram(
            name=values.get("name", values[sources[0]]),
            line=self.line_of(sources[0], at),
            **{name: values.get(name) for name in _SOURCES},
            is_predicted=values.get("predict", False),
            options=options if sources == ["model"] else {},
            budgets=tuple(self._budget(one, (number, i)) for i, one in enumerate(budgets)),
        )

    def _budget(self, values: Any, at: tuple[int, ...]) -> Budget:
        if not isinstance(values, dict):
            raise self.error(BUDGET, at[:1], "write budgets as [[program.budget]] tables.")
        self.check_keys(values, (*FILTERS, *LIMITS), "a budget", at)
        limits: list[Limit] = []
        for name, value in values.items():
            if name not in LIMITS:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise self.error(name, at, f"{name}={value!r} must be a number, at least 0.")
            limits.append(replace(LIMITS[name], value=value, line=self.line_of(name, at)))
        if not limits:
            raise self.error(
                BUDGET, at, f"the budget has no limit. Add one of {', '.join(LIMITS)}."
            )
        chosen: dict[str, Any] = {}
        for name, kind in FILTERS.items():
            if name in values:
                self._check_type(values[name], str, name, at)
                if kind is not str and values[name] not in set(kind):
                    message = f"'{values[name]}' is no {name}. {nearest(values[name], kind)}"
                    raise self.error(name, at, message)
                chosen[name] = kind(values[name])
        narrowed = next((name for name in ("kind", "axis") if name in chosen), None)
        other = next((one for one in limits if one.quantity not in OF_COLLECTIVES), None)
        if narrowed and other is not None:
            message = f"{other.name} is of the whole step. Put it into a budget without {narrowed}."
            raise self.error(other.name, at, message)
        places = {name: f"{self.path}:{self.line_of(name, at)}: " for name in chosen}
        return Budget(of=Filter(**chosen), limits=tuple(limits), places=places)

    def _check_type(self, value: Any, kind: type, name: str, at: tuple[int, ...]) -> None:
        if not isinstance(value, kind):
            words = {str: "text", bool: "true or false"}
            raise self.error(name, at, f"{name}={value!r} must be {words[kind]}.")
