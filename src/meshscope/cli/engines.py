"""`meshscope engines`: environments of serving engines: known, installed, removed."""

import sys
from typing import Annotated

import typer
from rich.table import Table

from meshscope.api.engines import engine_release, install_engine, list_engines, remove_engine
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.errors import SpecError
from meshscope.programs.engines.environments import engines_folder, installed
from meshscope.units import format_bytes

NOTE = "Installed: meshscope compile --frontend ENGINE --engine-version V uses it."

EngineArgument = Annotated[str, typer.Argument(metavar="ENGINE", help="Such as vllm-tpu.")]
VersionOption = Annotated[
    str | None,
    typer.Option("--engine-version", metavar="V", help="A known release; by default the newest."),
]


def list_(*, as_json: JsonOption = False) -> None:
    """List known releases of serving engines, and which are installed."""
    engines = list_engines()
    if as_json:
        print_json(engines)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("Engine", "Version", "Python", "Disk", "Installed in"):
        table.add_column(column, overflow="fold")
    for engine in engines:
        table.add_row(
            engine["engine"],
            engine["version"],
            f">={engine['least_python']}",
            format_bytes(engine["n_bytes"]),
            engine["folder"] or "-",
        )
    print_all(new_console(), [table, "", NOTE])


def install(
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


def remove(engine: EngineArgument, *, engine_version: VersionOption = None) -> None:
    """Remove the environment of a release of a serving engine."""
    typer.echo(f"removed {remove_engine(engine, engine_version=engine_version)}")
