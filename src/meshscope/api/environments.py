"""Serving engines and other compilers, each in an environment of its own."""

import sys
from collections.abc import Mapping
from typing import Any

import typer
from rich.table import Table

from meshscope.api.console import Shown, echo, note
from meshscope.api.options import option, request
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
    """Every known release: engine, version, the bytes of an installation, and the folder of its environment or None."""
    return [
        {
            "engine": release.product,
            "version": release.version,
            **_place(release, requirements=[release.package, *release.requirements]),
        }
        for release in known_releases(ENGINES)
    ]


def list_compilers() -> list[dict[str, Any]]:
    """Every known compiler, as `list_engines`; `is_own` marks meshscope's own, which needs no environment."""
    return [
        {
            "compiler": release.name,
            "jax": release.version,
            "libtpu": release.pins["libtpu"],
            **_place(release),
            "is_own": release.is_own,
        }
        for release in known_releases(COMPILERS)
    ]


def _place(release: Release, **facts: Any) -> dict[str, Any]:
    least_python = ".".join(map(str, release.least_python))
    folder = str(release.folder) if release.is_installed else None
    return {"least_python": least_python, **facts, "n_bytes": release.n_bytes, "folder": folder}


@request
class EngineRequest:
    """A release of a serving engine."""

    engine: str = option("ENGINE: Such as vllm-tpu.", kw_only=False)
    engine_version: str | None = option("V: A known release; by default the newest.", default=None)


@request
class EnvironmentRequest:
    """How an environment is made."""

    python: str | None = option("PATH: Interpreter that makes the environment.", default=None)
    yes: bool = option("Do not ask before the download.", default=False, is_last=True)


def engines() -> Shown:
    """List known releases of serving engines, and which are installed."""
    hint = "Installed: meshscope compile --frontend ENGINE --engine-version V uses it."
    return _known(list_engines(), {"Engine": "engine", "Version": "version"}, hint)


def compilers() -> Shown:
    """List known versions of JAX and libtpu, and which are installed."""
    hint = "meshscope compile --compiler NAME uses one that is installed."
    return _known(list_compilers(), {"Name": "compiler", "libtpu": "libtpu"}, hint)


def install_engine(asked: EngineRequest, made: EnvironmentRequest) -> None:
    """Install a release of a serving engine into its own environment."""
    release = release_of(asked.engine, asked.engine_version)
    _install(release, release.label, made)


def install_compiler(
    *, name: str = option("NAME: Such as jax-0.9.2.", kw_only=False), made: EnvironmentRequest
) -> None:
    """Install a version of JAX and libtpu into its own environment."""
    _install(compiler_release(name), name, made)


def _known(entries: list[dict[str, Any]], names: Mapping[str, str], hint: str) -> Shown:
    """What can be installed, with its size and folder; `names` are the keys of the first columns."""
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
    return Shown(lambda: entries, lambda _: [table, "", hint])


def _install(release: Release, name: str, made: EnvironmentRequest) -> None:
    """States what an installation takes, asks, and installs; SpecError without a terminal to answer at."""
    if not release.is_installed:
        size = format_bytes(release.n_bytes)
        note(
            f"{release.label}: {size} on the disk, about {release.seconds} s, into {release.folder}"
        )
        if not made.yes:
            if not sys.stdin.isatty():
                raise SpecError(
                    f"{release.group} install asks before it downloads. Confirm with --yes."
                )
            typer.confirm("Install it?", abort=True, err=True)
        release.install(python=made.python, report=note)
    echo(f"{name} is installed in {release.folder}")
