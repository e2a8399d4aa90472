"""`meshscope compilers`: other versions of JAX and libtpu: known, installed, removed."""

from typing import Annotated

import typer

from meshscope.api.compilers import install_compiler, list_compilers, remove_compiler
from meshscope.cli.installation import (
    PythonOption,
    YesOption,
    confirm_installation,
    print_installable,
    report_step,
)
from meshscope.cli.options import JsonOption
from meshscope.programs.compilers import compiler_release, installed_compiler

NOTE = "meshscope compile --compiler NAME uses one that is installed."

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Such as jax-0.9.2.")]


def list_(*, as_json: JsonOption = False) -> None:
    """List known versions of JAX and libtpu, and which are installed."""
    names = {"Name": "compiler", "libtpu": "libtpu"}
    print_installable(list_compilers(), names, NOTE, as_json=as_json)


def install(name: NameArgument, *, python: PythonOption = None, yes: YesOption = False) -> None:
    """Install a version of JAX and libtpu into an environment of its own."""
    release = compiler_release(name)
    if (existing := installed_compiler(release)) is not None:
        typer.echo(f"{name} is installed in {existing}")
        return
    recipe = release.recipe
    confirm_installation(
        recipe.label,
        recipe.home,
        n_bytes=release.n_bytes,
        seconds=release.seconds,
        command="compilers install",
        is_confirmed=yes,
    )
    folder = install_compiler(name, python=python, report=report_step)
    typer.echo(f"{name} is installed in {folder}")


def remove(name: NameArgument) -> None:
    """Remove the environment of a version of JAX and libtpu."""
    typer.echo(f"removed {remove_compiler(name)}")
