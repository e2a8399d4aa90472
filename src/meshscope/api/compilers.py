"""`meshscope.api.compilers`: environments with other versions of JAX and libtpu, for `compile`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshscope.programs.compilers import (
    RELEASES,
    CompilerRelease,
    compiler_release,
    installed_compiler,
    is_own_compiler,
)
from meshscope.programs.environments import (
    install_environment,
    installed_bytes,
    remove_environment,
)


def list_compilers() -> list[dict[str, Any]]:
    """Every known compiler: versions, bytes, and the folder of its environment or None.

    `n_bytes` is measured where `folder` is not None, and otherwise what an installation took.
    `is_own` is whether it is the one beside meshscope, which needs no environment.
    """
    return [_entry(release) for release in RELEASES]


def _entry(release: CompilerRelease) -> dict[str, Any]:
    folder = installed_compiler(release)
    return {
        "compiler": release.name,
        "jax": release.jax,
        "libtpu": release.libtpu,
        "least_python": ".".join(map(str, release.least_python)),
        "n_bytes": installed_bytes(release.recipe) or release.n_bytes,
        "folder": None if folder is None else str(folder),
        "is_own": is_own_compiler(release),
    }


def install_compiler(
    name: str,
    *,
    python: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Installs a compiler into an environment of its own in the user's cache; returns its folder.

    Args:
        name: Such as `jax-0.9.2`.
        python: The interpreter that makes the environment; by default one that is new enough.
        report: Called with each step.

    Raises:
        MeshscopeError: The compiler is unknown, no Python is new enough, the disk is full, or the
            installation fails. Nothing is left of it then.
    """
    recipe = compiler_release(name).recipe
    install_environment(recipe, python=python, report=report or (lambda _: None))
    return recipe.home


def remove_compiler(name: str) -> Path:
    """Removes the environment of a compiler; returns its former folder."""
    return remove_environment(compiler_release(name).recipe)
