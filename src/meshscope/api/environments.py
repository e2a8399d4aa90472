"""`meshscope.api.environments`: serving engines and other compilers, each in an environment of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshscope.programs.environments import (
    COMPILERS,
    ENGINES,
    compiler_release,
    known_releases,
    release_of,
)


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
