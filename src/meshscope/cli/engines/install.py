"""`meshscope engines install`: an environment with the model code of a serving engine."""

import sys
from typing import Annotated

import typer

from meshscope.api.engines import engine_release, install_engine
from meshscope.cli.engines import EngineArgument, VersionOption
from meshscope.errors import SpecError
from meshscope.programs.engines.environments import engines_folder, installed
from meshscope.units import format_bytes


def command(
    engine: EngineArgument,
    *,
    engine_version: VersionOption = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Interpreter that makes the environment.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the download.")] = False,
) -> None:
    """Install a release of a serving engine into an environment of its own."""
    release = engine_release(engine, engine_version)
    if (existing := installed(release)) is not None:
        typer.echo(f"{engine} {release.version} is installed in {existing.folder}")
        return
    typer.echo(
        f"{engine} {release.version}: {format_bytes(release.n_bytes)} on the disk, about "
        f"{release.seconds} s, into {engines_folder() / release.name}",
        err=True,
    )
    if not yes:
        if not sys.stdin.isatty():
            raise SpecError("engines install asks before it downloads. Confirm with --yes.")
        typer.confirm("Install it?", abort=True, err=True)
    folder = install_engine(
        engine,
        engine_version=release.version,
        python=python,
        report=lambda step: typer.echo(step, err=True),
    )
    typer.echo(f"{engine} {release.version} is installed in {folder}")
