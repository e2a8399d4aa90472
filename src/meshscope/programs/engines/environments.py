"""Python environments of serving engines: one per release, in the user's cache."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import meshscope
from meshscope.errors import MissingToolError
from meshscope.programs.engines.releases import RELEASES, Release, releases_of
from meshscope.units import format_bytes
from meshscope.workers.interpreter import installed_versions

RECORD = "environment.json"  # in a whole environment: the release and its bytes
FREE_FACTOR = 1.5  # pip unpacks downloads beside what it installs

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An installed release: its folder and what it takes on the disk."""

    release: Release
    folder: Path
    n_bytes: int

    @property
    def python(self) -> str:
        """The interpreter with the engine's packages."""
        return str(self.folder / "bin" / "python")


def engines_folder() -> Path:
    """The folder of all environments: `$XDG_CACHE_HOME/meshscope/engines`."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "meshscope" / "engines"


def installed(release: Release) -> Environment | None:
    """The environment of a release; None if it is not installed."""
    folder = engines_folder() / release.name
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Environment(release=release, folder=folder, n_bytes=record["n_bytes"])


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
    _check(environments[-1])
    return environments[-1]


def _check(environment: Environment) -> None:
    """MissingToolError unless the interpreter runs and has the pinned packages."""
    release = environment.release
    pins = dict(pin.split("==") for pin in (*release.requirements, release.package) if "==" in pin)
    names = {name.partition("[")[0]: version for name, version in pins.items()}
    remedy = (
        f"Remove and install it again: meshscope engines remove {release.engine} --engine-version "
        f"{release.version}"
    )
    try:
        versions = installed_versions(environment.python, list(names))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingToolError(
            f"the environment {environment.folder} is broken: its Python does not run ({error}). {remedy}"
        ) from error
    wrong = [f"{n} {versions.get(n, 'missing')}" for n, v in names.items() if versions.get(n) != v]
    if wrong:
        raise MissingToolError(
            f"the environment {environment.folder} is broken: {', '.join(wrong)} instead of "
            f"{', '.join(f'{n} {names[n]}' for n in names if versions.get(n) != names[n])}. {remedy}"
        )


def install(release: Release, *, python: str | None, report: Report) -> Environment:
    """Makes the environment of a release; nothing remains of one that fails half-way.

    `python` makes the environment; by default, the first one that is new enough.
    MissingToolError if there is none, no room, or pip fails.
    """
    if (existing := installed(release)) is not None:
        return existing
    maker = python or _python_for(release)
    _check_python(maker, release)
    home = engines_folder() / release.name
    home.parent.mkdir(parents=True, exist_ok=True)
    _check_room(home.parent, release)
    with _renamed_when_whole(home) as folder:
        report(f"making an environment with {maker}")
        _run([maker, "-m", "venv", str(folder)], release)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "--quiet"]
        report(f"installing {', '.join(release.requirements)}")
        _run([*pip, *release.requirements], release)
        report(f"installing {release.package} without its other dependencies")
        _run([*pip, "--no-deps", release.package], release)
        n_bytes = _size(folder)
        record = {"engine": release.engine, "version": release.version, "n_bytes": n_bytes}
        (folder / RECORD).write_text(json.dumps(record), encoding="utf-8")
        _check(Environment(release=release, folder=folder, n_bytes=n_bytes))
    return Environment(release=release, folder=home, n_bytes=n_bytes)


def remove(release: Release) -> Path:
    """Removes the environment of a release, whole or broken; MissingToolError if there is none."""
    folder = engines_folder() / release.name
    if not folder.exists():
        raise MissingToolError(
            f"{release.engine} {release.version} is not installed in {folder.parent}. "
            "List what is: meshscope engines list"
        )
    shutil.rmtree(folder)
    return folder


def environments() -> Iterator[tuple[Release, Environment | None]]:
    """All known releases, with their environments where they are installed."""
    for release in RELEASES:
        yield release, installed(release)


def engine_variables(folder: Path) -> dict[str, str]:
    """Environment variables of an engine's worker, which sees meshscope but not its neighbors.

    PYTHONPATH is a folder below `folder` with a link to meshscope alone: the packages installed beside
    it, such as another JAX, would hide those of the engine.
    """
    visible = folder / "python"
    visible.mkdir(exist_ok=True)
    link = visible / meshscope.__name__
    if not link.exists():
        link.symlink_to(Path(meshscope.__file__).parent)
    kept = {n: v for n, v in os.environ.items() if n not in {"PYTHONHOME", "PYTHONPATH"}}
    return kept | {"PYTHONPATH": str(visible), "PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def _renamed_when_whole(home: Path) -> Generator[Path]:
    """A folder beside `home` that gets its name when the block ends, or is removed if it fails."""
    for left in home.parent.glob(f".{home.name}.partial-*"):
        if not Path(f"/proc/{left.name.rsplit('-', 1)[-1]}").exists():
            shutil.rmtree(left)
    folder = home.parent / f".{home.name}.partial-{os.getpid()}"
    try:
        yield folder
        if home.exists():  # broken: a whole one would not have been made again
            shutil.rmtree(home)
        folder.rename(home)
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def _run(command: list[str], release: Release) -> None:
    """Runs a command; MissingToolError with the end of its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MissingToolError(
            f"'{command[0]}' does not run: {error}. Give another --python."
        ) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise MissingToolError(
            f"{release.engine} {release.version} was not installed, and nothing of it was kept: "
            f"{' '.join(lines) or f'exit code {done.returncode}'}"
        )


def _python_for(release: Release) -> str:
    """The first interpreter on this machine that is new enough for the release."""
    if sys.version_info[:2] >= release.least_python:
        return sys.executable
    major, least = release.least_python
    names = [f"python{major}.{minor}" for minor in range(least, least + 4)]
    for path in filter(None, map(shutil.which, names)):
        if _version_of(path) is not None:
            return path
    raise MissingToolError(
        f"{release.engine} {release.version} needs Python {major}.{least} or newer, which is not on PATH. "
        f"Install it, or name one: --python /path/to/python{major}.{least}"
    )


def _check_python(python: str, release: Release) -> None:
    version = _version_of(python)
    if version is None:
        raise MissingToolError(f"--python {python} does not run. Give a Python interpreter.")
    if version < release.least_python:
        least = ".".join(map(str, release.least_python))
        raise MissingToolError(
            f"--python {python} is {'.'.join(map(str, version))}; {release.engine} {release.version} "
            f"needs {least} or newer. Give another one."
        )


def _version_of(python: str) -> tuple[int, int] | None:
    """Major and minor version of an interpreter; None if it does not run."""
    try:
        text = installed_versions(python, [])["python"]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _check_room(folder: Path, release: Release) -> None:
    free, needed = shutil.disk_usage(folder).free, int(release.n_bytes * FREE_FACTOR)
    if free < needed:
        raise MissingToolError(
            f"{folder} has {format_bytes(free)} free; {release.engine} {release.version} needs "
            f"{format_bytes(needed)} while it installs. Free some space, or set XDG_CACHE_HOME to a larger disk."
        )


def _size(folder: Path) -> int:
    """Bytes of all files, without those that links point to."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if not p.is_symlink() and p.is_file())
