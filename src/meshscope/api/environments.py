"""`meshscope.api.environments`: serving engines and other compilers, each in an environment of its own."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from meshscope.api.console import echo, new_console, note, print_all, print_json
from meshscope.api.options import JsonOption, Option
from meshscope.errors import SpecError
from meshscope.programs.environments import (
    COMPILERS,
    ENGINES,
    Release,
    compiler_release,
    known_releases,
    release_of,
)
from meshscope.units import format_bytes


def list_engines() -> list[dict[str, Any]]:
    """Every known release: engine, version, bytes, and the folder of its environment or None.

    `n_bytes` is measured where `folder` is not None, and otherwise what an installation took.
    """
    return [
        {
            "engine": release.product,
            "version": release.version,
            "least_python": ".".join(map(str, release.least_python)),
            "requirements": [release.package, *release.requirements],
            "n_bytes": release.installed_bytes or release.n_bytes,
            "folder": None if release.installed_bytes is None else str(release.folder),
        }
        for release in known_releases(ENGINES)
    ]


def list_compilers() -> list[dict[str, Any]]:
    """Every known compiler: versions, bytes, and the folder of its environment or None.

    `n_bytes` is measured where `folder` is not None, and otherwise what an installation took.
    `is_own` is whether it is the one beside meshscope, which needs no environment.
    """
    return [
        {
            "compiler": release.name,
            "jax": release.version,
            "libtpu": release.pins["libtpu"],
            "least_python": ".".join(map(str, release.least_python)),
            "n_bytes": release.installed_bytes or release.n_bytes,
            "folder": None if release.installed_bytes is None else str(release.folder),
            "is_own": release.is_own,
        }
        for release in known_releases(COMPILERS)
    ]


def install_engine(
    engine: str,
    *,
    engine_version: str | None = None,
    python: str | None = None,
    source: str | Path | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Installs a release into an environment of its own in the user's cache; returns its folder.

    Args:
        engine: Such as `vllm-tpu`.
        engine_version: By default the newest known release.
        python: The interpreter that makes the environment; by default one that is new enough.
        source: A checkout of the engine's repository, for code that has no release.
        report: Called with each step.

    Raises:
        MeshscopeError: The release is unknown, no Python is new enough, the disk is full, or the
            installation fails. Nothing is left of it then.
    """
    release = release_of(engine, engine_version, is_checkout=source is not None)
    checkout = None if source is None else Path(source)
    return release.install(python=python, source=checkout, report=report or (lambda _: None))


def install_compiler(
    name: str,
    *,
    python: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Installs a compiler, such as `jax-0.9.2`; its options, errors and result are as for an engine."""
    return compiler_release(name).install(python=python, report=report or (lambda _: None))


def remove_engine(engine: str, *, engine_version: str | None = None) -> Path:
    """Removes the environment of a release, by default the newest; returns its former folder."""
    return release_of(engine, engine_version).remove()


def remove_compiler(name: str) -> Path:
    """Removes the environment of a compiler; returns its former folder."""
    return compiler_release(name).remove()


ENGINES_NOTE = "Installed: meshscope compile --frontend ENGINE --engine-version V uses it."
COMPILERS_NOTE = "meshscope compile --compiler NAME uses one that is installed."

EngineArgument = Annotated[
    str, Option(help="Such as vllm-tpu.", metavar="ENGINE", is_argument=True)
]
NameArgument = Annotated[str, Option(help="Such as jax-0.9.2.", metavar="NAME", is_argument=True)]
VersionOption = Annotated[
    str | None,
    Option(help="A known release; by default the newest.", metavar="V"),
]
PythonOption = Annotated[
    str | None,
    Option(help="Interpreter that makes the environment.", metavar="PATH"),
]
SourceOption = Annotated[
    Path | None,
    Option(help="Checkout of an engine whose code has no release.", metavar="DIR"),
]
YesOption = Annotated[bool, Option(help="Do not ask before the download.")]


def engines(*, as_json: JsonOption = False) -> None:
    """List known releases of serving engines, and which are installed."""
    names = {"Engine": "engine", "Version": "version"}
    _print_known(list_engines(), names, ENGINES_NOTE, as_json=as_json)


def compilers(*, as_json: JsonOption = False) -> None:
    """List known versions of JAX and libtpu, and which are installed."""
    names = {"Name": "compiler", "libtpu": "libtpu"}
    _print_known(list_compilers(), names, COMPILERS_NOTE, as_json=as_json)


def install_engine_asking(
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


def install_compiler_asking(
    name: NameArgument, *, python: PythonOption = None, yes: YesOption = False
) -> None:
    """Install a version of JAX and libtpu into an environment of its own."""
    _install(compiler_release(name), name, python, None, is_confirmed=yes)


def uninstall_engine(engine: EngineArgument, *, engine_version: VersionOption = None) -> None:
    """Remove the environment of a release of a serving engine."""
    echo(f"removed {remove_engine(engine, engine_version=engine_version)}")


def uninstall_compiler(name: NameArgument) -> None:
    """Remove the environment of a version of JAX and libtpu."""
    echo(f"removed {remove_compiler(name)}")


def _print_known(
    entries: list[dict[str, Any]], names: Mapping[str, str], hint: str, *, as_json: bool
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
    print_all(new_console(), [table, "", hint])


def _install(
    release: Release, name: str, python: str | None, source: Path | None, *, is_confirmed: bool
) -> None:
    """States what an installation takes, asks, and installs; SpecError without a terminal to answer at."""
    if release.installed_bytes is None:
        release.check_source(source)
        note(
            f"{release.label}: {format_bytes(release.n_bytes)} on the disk, about {release.seconds} s, "
            f"into {release.folder}",
        )
        if not is_confirmed:
            if not sys.stdin.isatty():
                raise SpecError(
                    f"{release.group} install asks before it downloads. Confirm with --yes."
                )
            typer.confirm("Install it?", abort=True, err=True)
        release.install(python=python, source=source, report=note)
    echo(f"{name} is installed in {release.folder}")
