"""`meshscope.api.engines`: environments of serving engines, for `compile` with their model code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshscope.programs.engines import environments
from meshscope.programs.engines.releases import Release, release_of


def list_engines() -> list[dict[str, Any]]:
    """Every known release: engine, version, bytes, and the folder of its environment or None.

    `n_bytes` is measured where `folder` is not None, and otherwise what an installation took.
    """
    return [
        {
            "engine": str(release.engine),
            "version": release.version,
            "least_python": ".".join(map(str, release.least_python)),
            "requirements": [release.package, *release.requirements],
            "n_bytes": release.n_bytes if environment is None else environment.n_bytes,
            "folder": None if environment is None else str(environment.folder),
        }
        for release, environment in environments.environments()
    ]


def engine_release(
    engine: str, version: str | None = None, *, is_checkout: bool = False
) -> Release:
    """The release with this version, or the newest; SpecError for an unknown one."""
    return release_of(engine, version, is_checkout=is_checkout)


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
    environment = environments.install(
        release,
        python=python,
        source=None if source is None else Path(source),
        report=report or (lambda _: None),
    )
    return environment.folder


def remove_engine(engine: str, *, engine_version: str | None = None) -> Path:
    """Removes the environment of a release, by default the newest; returns its former folder."""
    return environments.remove(release_of(engine, engine_version))
