"""A folder that is there whole or not at all: written beside its place and renamed when done."""

import json
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshscope.errors import RunError

try:
    import fcntl
except ImportError:  # not on this platform: leftovers of dead processes stay
    fcntl = None

TOOL = "meshscope"
MANIFEST = "manifest.json"

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<state>partial|replaced)-\d+")


@contextmanager
def new_folder(path: Path, *, force: bool) -> Generator[Path]:
    """A temporary folder that becomes `path` when the block ends without an exception.

    RunError when `path` exists; with `force` a meshscope run there is replaced once the new one is
    whole, anything else still refused. Leftovers of interrupted processes beside `path` are removed.
    """
    try:
        home = Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve follows a link in the way
        _check_free(home, path, force=force)
        partial = _make_partial(home)
        with _locked(partial):
            try:
                yield partial
                _check_free(home, path, force=force)
                _move_into_place(partial, home)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"cannot write the run '{path}': {reason}. Choose another --out.") from error


def _make_partial(path: Path) -> Path:
    """The temporary folder, marked as ours so that a later process may remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    partial.mkdir()
    (partial / MANIFEST).write_text(json.dumps({"tool": TOOL, "schema": None}))
    return partial


def _check_free(home: Path, typed: Path, *, force: bool) -> None:
    """RunError unless a run may be put at `home`, which the user wrote as `typed`."""
    if not os.path.lexists(home):
        return
    if home.is_symlink() or not home.is_dir():
        raise RunError(f"'{typed}' exists and is not a folder. Choose another --out.")
    if not is_run(home) and not _is_empty(home):
        raise RunError(
            f"'{typed}' exists and is not a meshscope run; it is never replaced. Choose another --out."
        )
    if not force:
        raise RunError(
            f"'{typed}' exists. Use --force to replace it, or another --out to keep both."
        )


def is_run(path: Path) -> bool:
    """Whether the folder carries the mark of a meshscope run, of whatever schema."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("tool") == TOOL and "schema" in manifest


def partial_name(path: Path) -> str | None:
    """The name of the run that this half-written folder was to become; None for other folders."""
    match = _LEFTOVER.fullmatch(path.name)
    return match["name"] if match else None


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir())


def _move_into_place(partial: Path, path: Path) -> None:
    """Two renames where a run is replaced: between them the old one waits under `.replaced-`."""
    if not path.exists():
        partial.rename(path)
        return
    replaced = path.parent / f".{path.name}.replaced-{os.getpid()}"
    with _locked(path):
        path.rename(replaced)
        try:
            partial.rename(path)
        except BaseException:
            replaced.rename(path)
            raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Holds a lock on the folder while the block runs; the system frees it when the process dies."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(folder: Path) -> bool:
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_leftovers(parent: Path) -> None:
    """Removes half-written folders whose process is dead; a run that was being replaced returns."""
    for folder in parent.iterdir():
        match = _LEFTOVER.fullmatch(folder.name)
        if match is None or not _is_abandoned(folder) or not (is_run(folder) or _is_empty(folder)):
            continue
        home = parent / match["name"]
        if match["state"] == "replaced" and not os.path.lexists(home):
            with suppress(OSError):
                folder.rename(home)
            continue
        shutil.rmtree(folder, ignore_errors=True)
