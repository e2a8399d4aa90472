"""Python environments of serving engines: one per release, in the user's cache."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshscope.errors import MissingToolError, SpecError
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
PACKAGE_FOLDER = "python/sgl_jax"  # of a checkout of SGLang-JAX
PROJECT = """[build-system]
requires = ["setuptools>=80"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang-jax"
version = "{version}"
[tool.setuptools.packages.find]
include = ["sgl_jax*"]
[tool.setuptools.package-data]
"*" = ["*"]
"""


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


def recipe_of(release: Release, package: str | None = None) -> Recipe:
    """How to make the environment of a release; `package` is the folder of its code, if that is not released."""
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
                ("--no-deps", package or release.package),
            ),
        ),
        pins={name.partition("[")[0]: version for name, version in pins.items()},
        least_python=release.least_python,
        n_bytes=release.n_bytes,
        alternative=_alternative(release),
    )


def _alternative(release: Release) -> str:
    """The option that installs the newest release for this Python; empty if there is none."""
    python = sys.version_info[:2]
    others = [r for r in releases_of(release.engine) if r.least_python <= python]
    return f", or install --engine-version {others[-1].version}" if others else ""


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
            + (" --source PATH" if release.checkout else "")
        )
    newest = environments[-1]
    check_environment(recipe_of(newest.release), newest.folder)
    return newest


def install(
    release: Release, *, python: str | None, source: Path | None = None, report: Report
) -> Environment:
    """Makes the environment of a release; nothing remains of one that fails half-way.

    `python` makes the environment; by default, the first one that is new enough. `source` is a checkout of
    a repository for code that has no release.
    MissingToolError if there is none, no room, or pip fails; SpecError for a wrong checkout.
    """
    check_source(release, source)
    with tempfile.TemporaryDirectory() as folder:
        package = None if source is None else _copied_package(source, Path(folder) / "project")
        recipe = recipe_of(release, package)
        n_bytes = install_environment(recipe, python=python, report=report)
    return Environment(release=release, folder=recipe.home, n_bytes=n_bytes)


def check_source(release: Release, source: Path | None) -> None:
    """SpecError unless the source is a checkout of a release that needs one."""
    label = f"{release.engine} {release.version}"
    if source is None:
        if release.checkout is not None:
            repository, _, commit = release.checkout.partition("@")
            raise SpecError(
                f"{label} is the code of {repository}, which has no release. Check it out (tried: "
                f"commit {commit}) and name the folder: --source PATH"
            )
    elif release.checkout is None:
        raise SpecError(f"--source {source}: {label} is a released package. Drop the option.")
    elif not (source / PACKAGE_FOLDER).is_dir():
        raise SpecError(
            f"--source {source}: there is no folder {PACKAGE_FOLDER}. Name the folder of a "
            f"checkout of {release.checkout.partition('@')[0]}."
        )


def _copied_package(source: Path, folder: Path) -> str:
    """A project with a copy of the checkout's package alone; its version is that of the commit."""
    shutil.copytree(source / PACKAGE_FOLDER, folder / Path(PACKAGE_FOLDER).name)
    commit = _commit_of(source)
    version = "0.dev0" if commit is None else f"0.dev0+g{commit}"
    (folder / "pyproject.toml").write_text(PROJECT.format(version=version), encoding="utf-8")
    return str(folder)


def _commit_of(source: Path) -> str | None:
    """The commit of a checkout; None without git, or for a copy without history."""
    if (git := shutil.which("git")) is None:
        return None
    command = [git, "-C", str(source), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def remove(release: Release) -> Path:
    """Removes the environment of a release, whole or broken; MissingToolError if there is none."""
    return remove_environment(recipe_of(release))


def environments() -> Iterator[tuple[Release, Environment | None]]:
    """All known releases, with their environments where they are installed."""
    for release in RELEASES:
        yield release, installed(release)
