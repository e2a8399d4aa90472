"""`meshscope engines` and `meshscope compilers`: environments that are known, installed, removed."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from meshscope.api.environments import (
    list_compilers,
    list_engines,
    remove_compiler,
    remove_engine,
)
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.errors import SpecError
from meshscope.programs.environments import Release, compiler_release, release_of
from meshscope.units import format_bytes

ENGINES_NOTE = "Installed: meshscope compile --frontend ENGINE --engine-version V uses it."
COMPILERS_NOTE = "meshscope compile --compiler NAME uses one that is installed."

EngineArgument = Annotated[str, typer.Argument(metavar="ENGINE", help="Such as vllm-tpu.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Such as jax-0.9.2.")]
VersionOption = Annotated[
    str | None,
    typer.Option("--engine-version", metavar="V", help="A known release; by default the newest."),
]
PythonOption = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Interpreter that makes the environment."),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--source", metavar="DIR", help="Checkout of an engine whose code has no release."
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before the download.")]


def engines(*, as_json: JsonOption = False) -> None:
    """List known releases of serving engines, and which are installed."""
    names = {"Engine": "engine", "Version": "version"}
    _print_known(list_engines(), names, ENGINES_NOTE, as_json=as_json)


def compilers(*, as_json: JsonOption = False) -> None:
    """List known versions of JAX and libtpu, and which are installed."""
    names = {"Name": "compiler", "libtpu": "libtpu"}
    _print_known(list_compilers(), names, COMPILERS_NOTE, as_json=as_json)


def install_engine(
    engine: EngineArgument,
    *,
    engine_version: VersionOption = None,
    python: PythonOption = None,
    source: SourceOption = None,
    yes: YesOption = False,
) -> None:
    """Install a release of a serving engine into an environment of its own."""
    release = release_of(engine, engine_version, is_checkout=source is not None)
    _install(release, release.label, python, source, is_confirmed=yes)


def install_compiler(
    name: NameArgument, *, python: PythonOption = None, yes: YesOption = False
) -> None:
    """Install a version of JAX and libtpu into an environment of its own."""
    _install(compiler_release(name), name, python, None, is_confirmed=yes)


def uninstall_engine(engine: EngineArgument, *, engine_version: VersionOption = None) -> None:
    """Remove the environment of a release of a serving engine."""
    typer.echo(f"removed {remove_engine(engine, engine_version=engine_version)}")


def uninstall_compiler(name: NameArgument) -> None:
    """Remove the environment of a version of JAX and libtpu."""
    typer.echo(f"removed {remove_compiler(name)}")


def _print_known(
    entries: list[dict[str, Any]], names: Mapping[str, str], note: str, *, as_json: bool
) -> None:
    """What can be installed, with its size and folder; `names` are the keys of the first columns."""
    if as_json:
        print_json(entries)
        return
    table = Table(box=None, pad_edge=False)
    for column in (*names, "Python", "Disk", "Installed in"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        missing = "beside meshscope" if entry.get("is_own") else "-"
        table.add_row(
            *(entry[key] for key in names.values()),
            f">={entry['least_python']}",
            format_bytes(entry["n_bytes"]),
            entry["folder"] or missing,
        )
    print_all(new_console(), [table, "", note])


def _install(
    release: Release, name: str, python: str | None, source: Path | None, *, is_confirmed: bool
) -> None:
    """States what an installation takes, asks, and installs; SpecError without a terminal to answer at."""
    if release.installed_bytes is None:
        release.check_source(source)
        typer.echo(
            f"{release.label}: {format_bytes(release.n_bytes)} on the disk, about {release.seconds} s, "
            f"into {release.folder}",
            err=True,
        )
        if not is_confirmed:
            if not sys.stdin.isatty():
                raise SpecError(
                    f"{release.group} install asks before it downloads. Confirm with --yes."
                )
            typer.confirm("Install it?", abort=True, err=True)
        release.install(
            python=python, source=source, report=lambda step: typer.echo(step, err=True)
        )
    typer.echo(f"{name} is installed in {release.folder}")
