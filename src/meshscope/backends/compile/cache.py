"""Compiled programs that are kept for later runs, each in a folder that appears whole."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import meshscope
from meshscope.backends.compile.worker import FLAGS, PACKAGES

REPORT_NAME = "report.json"  # what the worker said
PARTIAL = ".partial-"
MAX_KEPT = 500  # programs; the oldest are removed


def cache_folder() -> Path:
    """The folder of compiled programs: `$MESHSCOPE_CACHE`, else one in the user's caches."""
    if named := os.environ.get("MESHSCOPE_CACHE"):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "meshscope" / "programs"


def kept_program(facts: Mapping[str, Any], compiler: Mapping[str, str] | None = None) -> Path:
    """The folder of a program by all that determines its text: `facts`, flags, and versions, by default of this process."""
    versions = compiler or {name: version(name) for name in PACKAGES}
    known = {
        **facts,
        "flags": {name: os.environ.get(name, "") for name in FLAGS},
        "versions": {**versions, "meshscope": meshscope.__version__},
    }
    text = json.dumps(known, sort_keys=True)
    return cache_folder() / hashlib.sha256(text.encode()).hexdigest()


@cache
def source_digest() -> str:
    """A hash of the package's own files, which write the programs of models."""
    home, digest = Path(meshscope.__file__).parent, hashlib.sha256()
    for path in sorted((*home.rglob("*.py"), *home.rglob("*.toml"), *home.rglob("*.json"))):
        digest.update(f"{path.relative_to(home)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def kept_report(
    home: Path, texts: Callable[[Mapping[str, Any]], Iterable[str]]
) -> dict[str, Any] | None:
    """The report of a kept program; None if it or one of its `texts(report)` is missing, or it is damaged."""
    try:
        report = json.loads((home / REPORT_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(report, dict) and all((home / one).exists() for one in texts(report))
    return report if is_whole else None


@contextmanager
def new_program(home: Path) -> Generator[Path]:
    """A folder for a program and its report that becomes `home` when the block ends; the oldest programs are removed."""
    kept = home.parent
    kept.mkdir(parents=True, exist_ok=True)
    every = [path for path in kept.iterdir() if not path.name.startswith(PARTIAL)]
    for entry in sorted(every, key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
        shutil.rmtree(entry, ignore_errors=True)
    with TemporaryDirectory(dir=kept, prefix=PARTIAL) as name:
        partial = Path(name) / home.name
        partial.mkdir()
        yield partial
        with suppress(OSError):  # what is damaged; without a moment in which a reader misses it
            home.rename(Path(name) / "old")
        with suppress(OSError):  # another process put the same program there just now
            partial.rename(home)
