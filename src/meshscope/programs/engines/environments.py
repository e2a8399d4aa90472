"""Python environments of serving engines: one per release, in the user's cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshscope.errors import MissingToolError
from meshscope.programs.engines.releases import RELEASES, Release, releases_of
from meshscope.programs.environments import (
    Recipe,
    Report,
    cached_folder,
    check_environment,
    install_environment,
    installed_bytes,
    python_of,
    remove_environment,
)
from meshscope.units import format_bytes

GROUP = "engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An installed release: its folder and what it takes on the disk."""

    release: Release
    folder: Path
    n_bytes: int

    @property
    def python(self) -> str:
        """The interpreter with the engine's packages."""
        return python_of(self.folder)


def engines_folder() -> Path:
    """The folder of all environments: `$XDG_CACHE_HOME/meshscope/engines`."""
    return cached_folder(GROUP)


def recipe_of(release: Release) -> Recipe:
    """How to make the environment of a release."""
    pins = dict(pin.split("==") for pin in (*release.requirements, release.package) if "==" in pin)
    return Recipe(
        parent=engines_folder(),
        name=release.name,
        label=f"{release.engine} {release.version}",
        group=GROUP,
        removal=f"meshscope engines remove {release.engine} --engine-version {release.version}",
        installations=(
            (", ".join(release.requirements), release.requirements),
            (
                f"{release.package} without its other dependencies",
                ("--no-deps", release.package),
            ),
        ),
        pins={name.partition("[")[0]: version for name, version in pins.items()},
        least_python=release.least_python,
        n_bytes=release.n_bytes,
    )


def installed(release: Release) -> Environment | None:
    """The environment of a release; None if it is not installed."""
    recipe = recipe_of(release)
    n_bytes = installed_bytes(recipe)
    if n_bytes is None:
        return None
    return Environment(release=release, folder=recipe.home, n_bytes=n_bytes)


def environment_of(engine: str, version: str | None) -> Environment:
    """The environment of this release, or of the newest one that is installed.

    MissingToolError if there is none, or if its packages are not those of the release.
    """
    releases = [r for r in releases_of(engine) if version in {None, r.version}]
    if not releases:
        known = ", ".join(release.version for release in releases_of(engine))
        raise MissingToolError(
            f"--engine-version {version}: {engine} has no such known release. Use one of {known}."
        )
    environments = [e for e in map(installed, releases) if e is not None]
    if not environments:
        release = releases[-1]
        raise MissingToolError(
            f"--frontend {engine} needs the packages of {engine} {release.version}, which are not "
            f"installed ({format_bytes(release.n_bytes)}). Install them: meshscope engines install "
            f"{engine} --engine-version {release.version}"
        )
    newest = environments[-1]
    check_environment(recipe_of(newest.release), newest.folder)
    return newest


def install(release: Release, *, python: str | None, report: Report) -> Environment:
    """Makes the environment of a release; nothing remains of one that fails half-way.

    `python` makes the environment; by default, the first one that is new enough.
    MissingToolError if there is none, no room, or pip fails.
    """
    recipe = recipe_of(release)
    n_bytes = install_environment(recipe, python=python, report=report)
    return Environment(release=release, folder=recipe.home, n_bytes=n_bytes)


def remove(release: Release) -> Path:
    """Removes the environment of a release, whole or broken; MissingToolError if there is none."""
    return remove_environment(recipe_of(release))


def environments() -> Iterator[tuple[Release, Environment | None]]:
    """All known releases, with their environments where they are installed."""
    for release in RELEASES:
        yield release, installed(release)
