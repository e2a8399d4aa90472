"""`meshscope engines`: environments of serving engines: known, installed, removed."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.engines import engine_release, install_engine, list_engines, remove_engine
from meshscope.cli.installation import (
    PythonOption,
    YesOption,
    confirm_installation,
    print_installable,
    report_step,
)
from meshscope.cli.options import JsonOption
from meshscope.programs.engines.environments import check_source, engines_folder, installed

NOTE = "Installed: meshscope compile --frontend ENGINE --engine-version V uses it."

EngineArgument = Annotated[str, typer.Argument(metavar="ENGINE", help="Such as vllm-tpu.")]
VersionOption = Annotated[
    str | None,
    typer.Option("--engine-version", metavar="V", help="A known release; by default the newest."),
]


def list_(*, as_json: JsonOption = False) -> None:
    """List known releases of serving engines, and which are installed."""
    names = {"Engine": "engine", "Version": "version"}
    print_installable(list_engines(), names, NOTE, as_json=as_json)


def install(
    engine: EngineArgument,
    *,
    engine_version: VersionOption = None,
    python: PythonOption = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", metavar="DIR", help="Checkout of an engine whose code has no release."
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Install a release of a serving engine into an environment of its own."""
    release = engine_release(engine, engine_version, is_checkout=source is not None)
    if (existing := installed(release)) is not None:
        typer.echo(f"{engine} {release.version} is installed in {existing.folder}")
        return
    check_source(release, source)
    confirm_installation(
        f"{engine} {release.version}",
        engines_folder() / release.name,
        n_bytes=release.n_bytes,
        seconds=release.seconds,
        command="engines install",
        is_confirmed=yes,
    )
    folder = install_engine(
        engine,
        engine_version=release.version,
        python=python,
        source=source,
        report=report_step,
    )
    typer.echo(f"{engine} {release.version} is installed in {folder}")


def remove(engine: EngineArgument, *, engine_version: VersionOption = None) -> None:
    """Remove the environment of a release of a serving engine."""
    typer.echo(f"removed {remove_engine(engine, engine_version=engine_version)}")
