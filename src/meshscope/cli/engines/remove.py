"""`meshscope engines remove`: deletes the environment of a serving engine."""

import typer

from meshscope.api.engines import remove_engine
from meshscope.cli.engines import EngineArgument, VersionOption


def command(engine: EngineArgument, *, engine_version: VersionOption = None) -> None:
    """Remove the environment of a release of a serving engine."""
    typer.echo(f"removed {remove_engine(engine, engine_version=engine_version)}")
