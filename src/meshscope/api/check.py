"""`meshscope.check`: programs against a budget for their communication, time and memory."""

import importlib.util
import sys
import traceback
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from meshscope.analysis.budget import Check, checks_of
from meshscope.api.budget_file import BudgetedProgram, read_budget_file
from meshscope.api.compile import compile as compile_
from meshscope.api.console import echo, print_json
from meshscope.api.options import option, option_of, request
from meshscope.api.predict import predict
from meshscope.api.request import CompileRequest
from meshscope.api.run import Run
from meshscope.api.runs import open as open_runs
from meshscope.errors import MeshscopeError, RunError, SpecError, nearest, public, read_only
from meshscope.files import path_of
from meshscope.programs.environments import default_compiler
from meshscope.reports.budget import (
    ProgramChecks,
    check_document,
    check_lines,
    github_lines,
    sarif_document,
)
from meshscope.store.folder import replacing_runs, scratch_folder


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProgram:
    """A program of a budget file with its run and the outcome of its limits."""

    program: BudgetedProgram
    run: Run
    checks: tuple[Check, ...]


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
def check(path: str | Path, *, compiler: str | None = None) -> CheckResult:
    """Makes the run of every program in a budget file, and compares it with the limits.

    Example:
        >>> meshscope.check("budget.toml").is_kept

    Args:
        path: A budget file (docs/your-program.md).
        compiler: Another version of JAX and libtpu for programs that name none, such as `jax-0.9.2`.

    Returns:
        The value of each limit, and its collectives.

    Raises:
        MeshscopeError: The file is not understood, or a program cannot be made.
    """
    file = path_of(path)
    programs = read_budget_file(file)
    with default_compiler(compiler):
        checked = tuple(_checked(program, file) for program in programs)
    return CheckResult(path=file, programs=checked)


def _checked(program: BudgetedProgram, file: Path) -> CheckedProgram:
    try:
        run = _run_of(program, file.parent)
    except MeshscopeError as error:
        raise type(error)(f"{file}:{program.line}: {error}") from error
    checks = checks_of(run.record, program.budgets)
    return CheckedProgram(program=program, run=run, checks=checks)


def _run_of(program: BudgetedProgram, folder: Path) -> Run:
    """The run of a program; paths are relative to the folder of the budget file."""
    if program.entry is not None:
        return _entry_run(program.entry, folder)
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
    with scratch_folder() as scratch:
        return compile_(program.model, **options, out=scratch / "run")


def _entry_run(entry: str, folder: Path) -> Run:
    """The run that the function `file.py:function` returns; it may replace its run of an earlier check."""
    path, separator, name = entry.rpartition(":")
    file = folder / path
    if not separator or not file.is_file():
        raise SpecError(f"entry '{entry}' names no file. Use file.py:function.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SpecError(f"entry '{entry}': {file} is not a Python file. Use file.py:function.")
    module, home = importlib.util.module_from_spec(spec), str(file.parent.resolve())
    sys.path.insert(0, home)  # modules next to the file can be imported, as from a script
    try:
        _called(partial(spec.loader.exec_module, module), entry)
        function = getattr(module, name, None)
        if not callable(function):
            names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
            raise SpecError(f"{file} has no function '{name}'. {nearest(name, names)}")
        with replacing_runs():
            run = _called(function, entry)
    finally:
        sys.path.remove(home)
    if not isinstance(run, Run):
        raise SpecError(
            f"entry '{entry}' returns {type(run).__name__}. Return the run of meshscope.compile(...)."
        )
    return run


def _called(function: Any, entry: str) -> Any:
    """What the user's function returns; SpecError with its last frame if it raises."""
    try:
        return function()
    except MeshscopeError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise SpecError(
            f"entry '{entry}' failed: {type(error).__name__}: {error}\n"
            f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        ) from error


class CheckFormat(StrEnum):
    """How the outcome is written."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


@request
class CheckRequest:
    """The options of `check`."""

    budget: Path = option("Budget file in TOML.", metavar="BUDGET", kw_only=False)
    as_format: CheckFormat = option(
        "text, json, sarif, or github for annotations.",
        default=CheckFormat.TEXT,
        flags=("--format",),
    )
    compiler: str | None = option(option_of(CompileRequest, "compiler"), default=None)


def command(asked: CheckRequest) -> None:
    """Check programs against a budget for CI.

    Compiles every program of the file, from the cache if it is unchanged, and compares its communication, time and
    memory with the limits. Exits with 1 if a limit is violated.
    """
    result = check(asked.budget, compiler=asked.compiler)
    programs = [ProgramChecks(name=p.program.name, checks=p.checks) for p in result.programs]
    match asked.as_format:
        case CheckFormat.TEXT:
            echo(*check_lines(result.path, programs))
        case CheckFormat.GITHUB:
            echo(*github_lines(result.path, programs))
        case CheckFormat.JSON:
            print_json(check_document(result.path, programs))
        case CheckFormat.SARIF:
            print_json(sarif_document(result.path, programs))
    if not result.is_kept:
        raise SystemExit(1)
