"""`meshscope.lint`: what a compiled program computes wrongly or wastes, with its line."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from meshscope.api.compile import compile as compile_
from meshscope.api.console import Shown
from meshscope.api.findings import linted, place
from meshscope.api.options import option
from meshscope.api.run import Run
from meshscope.errors import RunError, SpecError, public, read_only
from meshscope.files import path_of
from meshscope.plans.mesh import parse_mesh
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.lint.findings import Finding, LintedProgram, lint_module
from meshscope.readers.lint.log import WASTE
from meshscope.reports.budget import place_of, sarif
from meshscope.reports.model import plain, wrapped
from meshscope.reports.tables import with_first_block
from meshscope.serialize import picked, to_plain
from meshscope.store.folder import is_run, scratch_folder
from meshscope.store.read import read_run
from meshscope.units import counted

_LEVELS = {False: ("possible", "warning"), True: ("waste   ", "note")}  # in text and in SARIF
BASIS = "the HLO text of each program"
_MAX_REASONS = 3  # for values that were not followed, per program


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """The findings of the programs of a run, a file or a function."""

    name: str
    programs: tuple[LintedProgram, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all programs."""
        return tuple(one for program in self.programs for one in program.findings)

    @property
    def n_certain(self) -> int:
        """The number of certain findings."""
        return sum(one.is_certain for one in self.findings)

    def __repr__(self) -> str:
        return "\n".join(with_first_block(_lines(self, is_full=True), ""))

    def as_dict(self) -> dict[str, Any]:
        """The document of `lint --json`."""
        programs = [
            {
                **picked(program, "name", "mesh"),
                "findings": to_plain(program.findings),
                "unfollowed": [{"reason": r, "count": n} for r, n in program.unfollowed],
            }
            for program in self.programs
        ]
        return {"n_certain": self.n_certain, "programs": programs}


def _lines(result: LintResult, *, is_full: bool = False) -> Iterator[str]:
    """The number of findings first, then each with its place, then what could not be followed."""
    findings, certain = result.findings, result.n_certain
    wasteful = sum(one.kind in WASTE for one in findings)
    head = f"{certain} certain and {len(findings) - certain - wasteful} possible findings"
    if wasteful:
        head += f", {wasteful} of waste"
    unknown = sum(n for program in result.programs for _, n in program.unfollowed)
    tail = f"{counted(unknown, 'value')} not followed" if unknown else "every value was followed"
    none = "unknown: no finding in what was followed" if unknown else "no finding"
    names = ", ".join(f"{plain(p.name)} over {plain(p.mesh)}" for p in result.programs)
    yield _paragraph(f"{names}: {head if findings else none}; {tail}")
    for one in findings:
        mark = "certain " if one.is_certain else _LEVELS[one.kind in WASTE][0]
        said = _paragraph(f"{mark} {one.kind.replace('_', ' ')}: {plain(one.sentence)}")
        yield f"{said}\n{_paragraph(place(one), indent=9)}"
    for program in result.programs:
        head = f"not followed in {plain(program.name)}: "
        shown = program.unfollowed if is_full else program.unfollowed[:_MAX_REASONS]
        yield from (_paragraph(f"{head}{n} x {plain(reason)}") for reason, n in shown)
        if rest := sum(n for _, n in program.unfollowed[len(shown) :]):
            yield f"{head}{rest} more with --full"


def _sarif(result: LintResult) -> dict[str, Any]:
    """The findings in SARIF 2.1.0: certain ones as errors, possible ones as warnings, waste as notes."""
    return sarif(
        (
            one.kind.value,
            "error" if one.is_certain else _LEVELS[one.kind in WASTE][1],
            f"{one.program}: {one.sentence}; {place(one)}",
            place_of(one.source_lines, (result.name, 1)),
        )
        for one in result.findings
    )


def _paragraph(text: str, *, indent: int = 0) -> str:
    return "\n".join(wrapped(text, indent=indent))


@public
def lint(
    program: Run | str | Path | Callable[..., Any],
    *arguments: Any,
    mesh: str | None = None,
    **options: Any,
) -> LintResult:
    """Follows how each mesh axis holds every value of a program, and reports reductions that contradict it.

    Example:
        >>> meshscope.lint("runs/qwen").n_certain
        >>> meshscope.lint(step, x, topology="v6e-8", mesh="tp=8").findings

    Args:
        program: A run or its folder, a file of optimized HLO text, or a JAX function.
        arguments: The arguments of the function.
        mesh: The axes of the devices, such as `dp=2,tp=4`: of a function as for `compile`, of a file if its text does
            not name them. A run knows its own.
        options: Options of `compile` for a function, such as `topology`.

    Returns:
        The findings of each program, and what could not be followed.

    Raises:
        MeshscopeError: There is no program, it is damaged, or the mesh does not fit it.
    """
    if callable(program) and not isinstance(program, Run):
        with scratch_folder() as scratch:
            run = compile_(program, *arguments, mesh=mesh, **options, out=scratch / "run")
            return _lint_run(run, run.record.manifest.experiment.model_name or "function")
    if arguments or options:
        raise SpecError("only a function takes arguments and options of compile. Omit them.")
    if isinstance(program, Run):
        return _lint_run(program, program.name)
    path = path_of(program)
    if is_run(path):
        if mesh is not None:
            raise SpecError(f"'{path}' is a run, which knows its mesh. Omit mesh.")
        return _lint_run(Run(record=read_run(path)), str(path))
    module = read_hlo(path)
    axes = None if mesh is None else parse_mesh(mesh)
    return LintResult(name=str(path), programs=(lint_module(module, axes, name=path.name),))


def _lint_run(run: Run, name: str) -> LintResult:
    programs = tuple(linted(run.record, run.hlo))
    if not programs:
        raise RunError(f"'{name}' has no compiled program. Compile it into a folder.")
    return LintResult(name=name, programs=programs)


def command(
    *,
    program: Path = option("PROGRAM: Folder of a run, or optimized HLO text.", kw_only=False),
    mesh: str | None = option("AXES: Mesh of HLO text that names none: dp=2,tp=4.", default=None),
    as_sarif: bool = option(
        "Print the findings in SARIF 2.1.0, for code scanning.", default=False, flags=("--sarif",)
    ),
) -> Shown:
    """Find reductions that a program lacks, repeats or wastes.

    Follows how each mesh axis holds every value: replicated, split, or as a partial sum. Exits with 1 if a finding is
    certain.
    """
    result = lint(program, mesh=mesh)

    def check() -> None:
        if result.n_certain:
            raise SystemExit(1)

    def text(_: Console) -> Iterable[str]:
        return [json.dumps(_sarif(result))] if as_sarif else with_first_block(_lines(result), "")

    full = None if as_sarif else lambda _: repr(result).splitlines()
    chosen = "--sarif" if as_sarif else ""
    return Shown(result.as_dict, text, full, chosen=chosen, basis=BASIS, check=check)
