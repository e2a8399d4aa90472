"""Python environments with pinned packages, in the user's cache: made whole or not at all, checked before use."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import meshscope
from meshscope.errors import MissingToolError
from meshscope.units import format_bytes
from meshscope.workers.interpreter import installed_versions

RECORD = "environment.json"  # in a whole environment: what it is and its bytes
FREE_FACTOR = 1.5  # pip unpacks downloads beside what it installs

NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", "TPU_LIBRARY_PATH")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make an environment below `parent`.

    `installations` are the arguments of `pip install`, each with what to report before it. `pins` are the
    versions that a usable environment has. `removal` is the command that removes it, and `group` the
    word of its commands. `least_python` is what the packages require; `n_bytes` is what the environment
    takes, measured. `alternative` is what else a user with an older Python can do.
    """

    parent: Path
    name: str
    label: str
    group: str
    removal: str
    installations: tuple[tuple[str, tuple[str, ...]], ...]
    pins: Mapping[str, str]
    least_python: tuple[int, int]
    n_bytes: int
    alternative: str = ""

    @property
    def home(self) -> Path:
        """The folder of the environment."""
        return self.parent / self.name


def cached_folder(name: str) -> Path:
    """A folder of environments: `$XDG_CACHE_HOME/meshscope/NAME`."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "meshscope" / name


def python_of(folder: Path) -> str:
    """The interpreter of an environment."""
    return str(folder / "bin" / "python")


def installed_bytes(recipe: Recipe) -> int | None:
    """What the environment takes on the disk; None if it is not installed."""
    try:
        record = json.loads((recipe.home / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record["n_bytes"]


def check_environment(recipe: Recipe, folder: Path) -> None:
    """MissingToolError unless the interpreter in `folder` runs and has the pinned packages."""
    pins = recipe.pins
    remedy = f"Remove and install it again: {recipe.removal}"
    try:
        versions = installed_versions(python_of(folder), list(pins))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingToolError(
            f"the environment {folder} is broken: its Python does not run ({error}). {remedy}"
        ) from error
    wrong = {n: v for n, v in pins.items() if versions.get(n) != v}
    if wrong:
        present = ", ".join(f"{n} {versions.get(n, 'missing')}" for n in wrong)
        wanted = ", ".join(f"{n} {v}" for n, v in wrong.items())
        raise MissingToolError(
            f"the environment {folder} is broken: {present} instead of {wanted}. {remedy}"
        )


def install_environment(recipe: Recipe, *, python: str | None, report: Report) -> int:
    """Makes the environment and returns its bytes; nothing remains of one that fails half-way.

    `python` makes the environment; by default, the first one that is new enough.
    MissingToolError if there is none, no room, or pip fails.
    """
    if (existing := installed_bytes(recipe)) is not None:
        return existing
    maker = python or _python_for(recipe)
    _check_python(maker, recipe)
    recipe.parent.mkdir(parents=True, exist_ok=True)
    _check_room(recipe)
    with _renamed_when_whole(recipe.home) as folder:
        report(f"making an environment with {maker}")
        _run([maker, "-m", "venv", str(folder)], recipe)
        pip = [python_of(folder), "-m", "pip", "install", "--no-input", "--quiet"]
        for what, arguments in recipe.installations:
            report(f"installing {what}")
            _run([*pip, *arguments], recipe)
        n_bytes = _size(folder)
        record = {"name": recipe.name, "n_bytes": n_bytes}
        (folder / RECORD).write_text(json.dumps(record), encoding="utf-8")
        check_environment(recipe, folder)
    return n_bytes


def remove_environment(recipe: Recipe) -> Path:
    """Removes an environment, whole or broken; MissingToolError if there is none."""
    if not recipe.home.exists():
        raise MissingToolError(
            f"{recipe.label} is not installed in {recipe.parent}. "
            f"List what is: meshscope {recipe.group} list"
        )
    shutil.rmtree(recipe.home)
    return recipe.home


def lone_variables(folder: Path) -> dict[str, str]:
    """Environment variables of a worker that sees meshscope but not its neighbors.

    PYTHONPATH is a folder below `folder` with a link to meshscope alone: the packages installed beside
    it, such as another JAX, would hide those of the environment. So would the libtpu that this process
    loaded, whose path JAX leaves in TPU_LIBRARY_PATH.
    """
    visible = folder / "python"
    visible.mkdir(exist_ok=True)
    link = visible / meshscope.__name__
    if not link.exists():
        link.symlink_to(Path(meshscope.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
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


def _run(command: list[str], recipe: Recipe) -> None:
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
            f"{recipe.label} was not installed, and nothing of it was kept: "
            f"{' '.join(lines) or f'exit code {done.returncode}'}"
        )


def _python_for(recipe: Recipe) -> str:
    """The first interpreter on this machine that is new enough for the recipe."""
    if sys.version_info[:2] >= recipe.least_python:
        return sys.executable
    major, least = recipe.least_python
    names = [f"python{major}.{minor}" for minor in range(least, least + 4)]
    for path in filter(None, map(shutil.which, names)):
        if _version_of(path) is not None:
            return path
    raise MissingToolError(
        f"{recipe.label} needs Python {major}.{least} or newer, which is not on PATH. "
        f"Install it, or name one: --python /path/to/python{major}.{least}{recipe.alternative}"
    )


def _check_python(python: str, recipe: Recipe) -> None:
    version = _version_of(python)
    if version is None:
        raise MissingToolError(f"--python {python} does not run. Give a Python interpreter.")
    if version < recipe.least_python:
        least = ".".join(map(str, recipe.least_python))
        raise MissingToolError(
            f"--python {python} is {'.'.join(map(str, version))}; {recipe.label} "
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


def _check_room(recipe: Recipe) -> None:
    free, needed = shutil.disk_usage(recipe.parent).free, int(recipe.n_bytes * FREE_FACTOR)
    if free < needed:
        raise MissingToolError(
            f"{recipe.parent} has {format_bytes(free)} free; {recipe.label} needs "
            f"{format_bytes(needed)} while it installs. Free some space, or set XDG_CACHE_HOME to a larger disk."
        )


def _size(folder: Path) -> int:
    """Bytes of all files, without those that links point to."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if not p.is_symlink() and p.is_file())
