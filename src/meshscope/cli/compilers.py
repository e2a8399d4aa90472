"""`meshscope compilers`: other versions of JAX and libtpu: known, installed, removed."""

from typing import Annotated

import typer
from rich.table import Table

from meshscope.api.compilers import install_compiler, list_compilers, remove_compiler
from meshscope.cli.installation import (
    PythonOption,
    YesOption,
    confirm_installation,
    report_step,
)
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.programs.compilers import compiler_release, installed_compiler
from meshscope.units import format_bytes

NOTE = "meshscope compile --compiler NAME uses one that is installed."

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Such as jax-0.9.2.")]


def list_(*, as_json: JsonOption = False) -> None:
    """List known versions of JAX and libtpu, and which are installed."""
    compilers = list_compilers()
    if as_json:
        print_json(compilers)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("Name", "libtpu", "Python", "Disk", "Installed in"):
        table.add_column(column, overflow="fold")
    for compiler in compilers:
        unneeded = "beside meshscope" if compiler["is_own"] else "-"
        table.add_row(
            compiler["compiler"],
            compiler["libtpu"],
            f">={compiler['least_python']}",
            format_bytes(compiler["n_bytes"]),
            compiler["folder"] or unneeded,
        )
    print_all(new_console(), [table, "", NOTE])


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
