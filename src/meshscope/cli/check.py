"""`meshscope check`: programs against a budget."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.check import check
from meshscope.cli.output import print_json
from meshscope.reports.budget import (
    ProgramChecks,
    check_document,
    check_lines,
    github_lines,
    sarif_document,
)


class CheckFormat(StrEnum):
    """How the outcome is written."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def command(
    budget: Annotated[Path, typer.Argument(metavar="BUDGET", help="Budget file in TOML.")],
    *,
    as_format: Annotated[
        CheckFormat,
        typer.Option("--format", help="text, json, sarif, or github for annotations."),
    ] = CheckFormat.TEXT,
    compiler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Another version of JAX and libtpu, from meshscope compilers list."
        ),
    ] = None,
) -> None:
    """Check programs against a budget for CI.

    Compiles every program of the file, from the cache if it is unchanged, and compares its communication, time and
    memory with the limits. Exits with 1 if a limit is violated.
    """
    result = check(budget, compiler=compiler)
    programs = [ProgramChecks(name=p.program.name, checks=p.checks) for p in result.programs]
    match as_format:
        case CheckFormat.TEXT:
            lines = check_lines(result.path, programs)
        case CheckFormat.GITHUB:
            lines = github_lines(result.path, programs)
        case CheckFormat.JSON:
            print_json(check_document(result.path, programs))
            lines = iter(())
        case CheckFormat.SARIF:
            print_json(sarif_document(result.path, programs))
            lines = iter(())
    for line in lines:
        typer.echo(line)
    if not result.is_kept:
        raise typer.Exit(1)
