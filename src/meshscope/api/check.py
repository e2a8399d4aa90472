"""`meshscope.check`, and the assertions of the pytest fixture: programs against a budget."""

import json
import os
import re
import tomllib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from meshscope.analysis.budget import (
    FILTERS,
    LIMITS,
    OF_COLLECTIVES,
    Budget,
    Check,
    Filter,
    Limit,
    checks_of,
    filter_of,
)
from meshscope.api.compile import compile as compile_
from meshscope.api.console import Shown
from meshscope.api.findings import certain_findings
from meshscope.api.options import NO_CONDITIONS, option
from meshscope.api.predict import predict
from meshscope.api.request import CompileRequest
from meshscope.api.run import Run
from meshscope.api.runs import open as open_runs
from meshscope.errors import (
    MeshscopeError,
    ParseError,
    RunError,
    SpecError,
    nearest,
    public,
    read_only,
)
from meshscope.events.enums import Kind
from meshscope.files import path_of, read_text
from meshscope.reports.budget import (
    ProgramChecks,
    check_document,
    check_lines,
    github_lines,
    row_lines,
    sarif_document,
    sentence,
)
from meshscope.reports.tables import with_first_block
from meshscope.store.folder import safe_name, scratch_folder

PROGRAM = "program"
BUDGET = "budget"
_OPTIONS = tuple(
    field.name for field in fields(CompileRequest) if field.name not in {"model", *NO_CONDITIONS}
)
_SOURCES = ("model", "run")
_HEADER = re.compile(r"\s*\[\[?\s*([\w.\s]+?)\s*\]\]?\s*(#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedProgram:
    """A program of a budget file: a model with options, compiled or predicted, or a saved run."""

    name: str
    line: int
    model: str | None
    run: str | None
    is_predicted: bool
    options: Mapping[str, Any]
    budgets: tuple[Budget, ...]


def read_budget_file(path: Path) -> tuple[BudgetedProgram, ...]:
    """The programs of the file; ParseError with file and line for anything that is not understood."""
    text = read_text(path, "Give a budget file in TOML.")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParseError(f"{path}: not TOML: {error}. Give a budget file in TOML.") from error
    file, programs = _File(path=path, lines=text.splitlines()), document.pop(PROGRAM, [])
    file.check_keys(document, (PROGRAM, *_OPTIONS), "a budget file", ())
    if not isinstance(programs, list) or not programs:
        raise ParseError(f"{path}:1: there is no [[program]]. Add one, with model or run.")
    return tuple(file.program(values, number, document) for number, values in enumerate(programs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
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
        self, values: Mapping[str, Any], known: Sequence[str], where: str, at: tuple[int, ...]
    ) -> None:
        """ParseError with line and nearest name for a key that is not known."""
        if name := next((name for name in values if name not in known), None):
            raise self.error(name, at, f"'{name}' is no key of {where}. {nearest(name, known)}")

    def program(self, values: Any, number: int, shared: Mapping[str, Any]) -> BudgetedProgram:
        at = (number,)
        if not isinstance(values, dict):
            raise ParseError(f"{self.path}: write programs as [[program]] tables.")
        keys = ("name", "predict", "lint", BUDGET, *_SOURCES, *_OPTIONS)
        self.check_keys(values, keys, "a program", at)
        sources = [name for name in _SOURCES if name in values]
        if len(sources) != 1:
            raise self.error(PROGRAM, at, "a program has a model or a run.")
        self._check_types(values, ("name", *sources), str, at)
        self._check_types(values, ("predict", "lint"), bool, at)
        given = [name for name in values if name in _OPTIONS or name == "predict"]
        if sources != ["model"] and given:
            raise self.error(given[0], at, f"'{given[0]}' is a key of programs with a model.")
        budgets, is_linted = values.get(BUDGET, []), values.get("lint", False)
        if not isinstance(budgets, list) or not (budgets or is_linted):
            raise self.error(PROGRAM, at, "the program has no [[program.budget]]. Add one.")
        certain = replace(LIMITS["max_certain_findings"], line=self.line_of("lint", at))
        lint = [Budget(of=Filter(), limits=(certain,))] if is_linted else []
        options = {n: v for n, v in {**shared, **values}.items() if n in _OPTIONS}
        return BudgetedProgram(
            name=values.get("name", values[sources[0]]),
            line=self.line_of(sources[0], at),
            **{name: values.get(name) for name in _SOURCES},
            is_predicted=values.get("predict", False),
            options=options if sources == ["model"] else {},
            budgets=(*lint, *(self._budget(one, (number, i)) for i, one in enumerate(budgets))),
        )

    def _budget(self, values: Any, at: tuple[int, ...]) -> Budget:
        if not isinstance(values, dict):
            raise self.error(BUDGET, at[:1], "write budgets as [[program.budget]] tables.")
        self.check_keys(values, (*FILTERS, *LIMITS), "a budget", at)
        limits: list[Limit] = []
        for name in (name for name in values if name in LIMITS):
            with self._at(name, at):
                line = self.line_of(name, at)
                limits.append(replace(LIMITS[name], value=values[name], line=line))
        if not limits:
            known = ", ".join(LIMITS)
            raise self.error(BUDGET, at, f"the budget has no limit. Add one of {known}.")
        chosen = {name: values[name] for name in FILTERS if name in values}
        for name, value in chosen.items():
            with self._at(name, at):
                filter_of(**{name: value})
        narrowed = next((name for name in ("kind", "axis") if name in chosen), None)
        other = next((one for one in limits if one.quantity not in OF_COLLECTIVES), None)
        if narrowed and other is not None:
            message = f"{other.name} is of the whole step. Put it into a budget without {narrowed}."
            raise self.error(other.name, at, message)
        places = {name: f"{self.path}:{self.line_of(name, at)}: " for name in chosen}
        return Budget(of=filter_of(**chosen), limits=tuple(limits), places=places)

    @contextmanager
    def _at(self, name: str, at: tuple[int, ...]) -> Generator[None]:
        """Give an error the line of a key."""
        try:
            yield
        except SpecError as error:
            raise self.error(name, at, str(error)) from error

    def _check_types(
        self, values: Mapping[str, Any], names: Iterable[str], kind: type, at: tuple[int, ...]
    ) -> None:
        words = {str: "text", bool: "true or false"}
        for name in names:
            if not isinstance(values.get(name, kind()), kind):
                raise self.error(name, at, f"{name}={values[name]!r} must be {words[kind]}.")


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProgram(ProgramChecks):
    """A program of a budget file with its run and the outcome of its limits."""

    run: Run


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome of a budget file."""

    path: Path
    programs: tuple[CheckedProgram, ...]

    @property
    def is_kept(self) -> bool:
        """Whether every limit is kept."""
        return all(check.is_kept for program in self.programs for check in program.checks)

    @property
    def broken(self) -> tuple[tuple[CheckedProgram, Check], ...]:
        """The limits that are not kept, with their programs."""
        return tuple((p, check) for p in self.programs for check in p.checks if not check.is_kept)


@public
def check(
    path: str | Path, *, compiler: str | None = None, out: str | Path | None = None
) -> CheckResult:
    """Makes the run of every program in a budget file, and compares it with the limits.

    Example:
        >>> meshscope.check("budget.toml").is_kept

    Args:
        path: A budget file (docs/your-program.md).
        compiler: Another version of JAX and libtpu for models that name none, such as `jax-0.9.2`.
        out: A new folder for the runs, one for each program, named like it.

    Returns:
        The value of each limit, and its collectives.

    Raises:
        MeshscopeError: The file is not understood, or a program cannot be made.
    """
    file = path_of(path)
    programs = read_budget_file(file)
    if out is not None and os.path.lexists(path_of(out)):
        raise RunError(f"'{out}' exists. Give a new folder with --out.")
    with scratch_folder() as scratch:
        checked: list[CheckedProgram] = []
        for number, program in enumerate(programs):
            names = [safe_name(one.name) for one in programs[: number + 1]]
            home = names[-1] + (f"-{number + 1}" if names[-1] in names[:-1] else "")
            try:
                run = _run_of(program, file.parent, scratch / home, compiler)
                if out is not None:
                    run = run.save(path_of(out) / home)
            except MeshscopeError as error:
                raise type(error)(f"{file}:{program.line}: {error}") from error
            checks = checks_of(
                run.record, program.budgets, partial(certain_findings, run.record, run.hlo)
            )
            checked.append(CheckedProgram(name=program.name, run=run, checks=checks))
    return CheckResult(path=file, programs=tuple(checked))


def _run_of(program: BudgetedProgram, folder: Path, home: Path, compiler: str | None) -> Run:
    """The run of a program, in `home` if a model is compiled; paths are relative to the folder of the budget file."""
    if program.run is not None:
        runs = open_runs(folder / program.run)
        if len(runs) != 1:
            raise RunError(f"'{program.run}' matches {len(runs)} runs. Name one.")
        return runs[0]
    assert program.model is not None
    options: dict[str, Any] = dict(program.options)
    for name in ("topology", "plan"):
        if name not in options:
            raise SpecError(f"'{program.model}' has no {name}. Give one.")
    if program.is_predicted:
        return predict(program.model, **options)
    options.setdefault("compiler", compiler)
    return compile_(program.model, **options, out=home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The collectives of a compiled function, with assertions; `run` has everything else."""

    run: Run

    def expect(
        self, *, axis: str | None = None, phase: str | None = None, **expected: float
    ) -> None:
        """Asserts counts by kind, such as `all_reduce=64`, and limits, in one step on one device.

        Limits have the names of a budget file, such as `max_wire_bytes=1e6`. With counts, the limits on collectives
        cover these kinds together; without, all kinds. `axis` selects the collectives that cross an axis, and
        `phase` the ones in a phase.
        """
        any_kind, counts = filter_of(axis=axis, phase=phase), dict[Filter, float]()
        of_collectives, of_step = dict[str, float](), dict[str, float]()
        for name, value in expected.items():
            if name not in LIMITS and name not in set(Kind):
                raise SpecError(f"'{name}' is no kind or limit. {nearest(name, (*Kind, *LIMITS))}")
            if name not in LIMITS:
                counts[filter_of(kind=name, axis=axis, phase=phase)] = value
            elif LIMITS[name].quantity in OF_COLLECTIVES:
                of_collectives[name] = value
            else:
                of_step[name] = value
        self._assert(
            [
                *(_budget(chosen, count=n) for chosen, n in counts.items()),
                *(_budget(chosen, **of_collectives) for chosen in counts or [any_kind]),
                _budget(Filter(phase=any_kind.phase), **of_step),
            ]
        )
        if not expected:
            raise SpecError(f"nothing is expected. Add a kind or one of {', '.join(LIMITS)}.")

    def none(
        self, kind: str | None = None, *, axis: str | None = None, phase: str | None = None
    ) -> None:
        """Asserts that no collective is like this; one over an unknown axis may be."""
        self._assert([_budget(filter_of(kind=kind, axis=axis, phase=phase), count=0)])

    def _assert(self, budgets: Sequence[Budget]) -> None:
        __tracebackhide__ = True
        checks = checks_of(
            self.run.record, budgets, partial(certain_findings, self.run.record, self.run.hlo)
        )
        broken = [check for check in checks if not check.is_kept]
        lines = ([sentence(one), *(f"  {row}" for row in row_lines(one.rows))] for one in broken)
        if broken:
            raise AssertionError("\n".join(chain.from_iterable(lines)))


def _budget(chosen: Filter, **limits: float) -> Budget:
    return Budget(of=chosen, limits=tuple(replace(LIMITS[n], value=v) for n, v in limits.items()))


class CheckFormat(StrEnum):
    """How the outcome is written."""

    TEXT = "text"
    SARIF = "sarif"
    GITHUB = "github"


def command(
    *,
    budget: Path = option("BUDGET: Budget file in TOML.", kw_only=False),
    as_format: CheckFormat = option(
        "text, sarif, or github for annotations.",
        default=CheckFormat.TEXT,
        flags=("--format",),
    ),
    compiler: str | None = option(CompileRequest, default=None),
    out: Path | None = option(
        "DIR: New folder for the runs, one for each program, to compare with another version.",
        default=None,
    ),
) -> Shown:
    """Check programs against a budget for CI.

    Compiles every program of the file, from the cache if it is unchanged, and compares its communication, time and
    memory with the limits. Exits with 1 if a limit is violated.
    """
    result = check(budget, compiler=compiler, out=out)
    checked = (result.path, result.programs)
    lines = {
        CheckFormat.TEXT: lambda *of: with_first_block(check_lines(*of), ""),
        CheckFormat.GITHUB: github_lines,
        CheckFormat.SARIF: lambda *of: [json.dumps(sarif_document(*of))],
    }
    return Shown(
        lambda: check_document(*checked),
        lambda _: lines[as_format](*checked),
        basis=" and ".join(dict.fromkeys(p.run.source.value for p in result.programs))
        + " collectives",
        chosen="" if as_format is CheckFormat.TEXT else "--format",
        is_failed=not result.is_kept,
    )
