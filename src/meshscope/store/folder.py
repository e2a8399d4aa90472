"""Writes a folder whole or not at all: under a temporary name, renamed when complete.

A later process removes temporary folders that a killed or interrupted process left.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshscope.errors import RunError
from meshscope.files import MAX_STORED_BYTES, read_json

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where nothing is locked
    fcntl = None

RUNS = Path("runs")
MAX_NAME = 120  # leaves room for the suffix of a partial folder below the 255 bytes of file systems
TOOL = "meshscope"
MANIFEST = "manifest.json"
MARK = json.dumps({"tool": TOOL, "schema": None})  # the manifest of a run in progress

SETTLED_S = 60.0  # a process locks its new folder sooner


_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<state>partial|replaced)-(?P<process>\d+)")


@contextmanager
def new_folder(path: Path, *, force: bool) -> Generator[Path]:
    """A temporary folder that becomes `path` when the block ends without an exception.

    RunError if `path` exists. With `force` a meshscope run there is replaced once the new one is
    complete; anything else is still refused. Removes leftovers of interrupted processes next to `path`.
    """
    try:
        home = Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve would follow a link
        _check_free(home, path, force=force)
        home.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(home.parent)
        partial = home.parent / f".{home.name}.partial-{os.getpid()}"
        is_new = not partial.exists()  # else of another thread, which `mkdir` refuses
        try:
            partial.mkdir()
            (partial / MANIFEST).write_text(MARK)  # so that a later process may remove it
            with locked(partial):
                yield partial
                _check_free(home, path, force=force)
                _move_into_place(partial, home)
        finally:  # before `mkdir` returns, too: a signal may come between two lines
            try:
                if is_new:
                    shutil.rmtree(partial, ignore_errors=True)
            finally:  # a second signal, which a sweep sends after Ctrl-C, may end the first attempt
                if is_new:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"cannot write the run '{path}': {reason}. Choose another --out.") from error


def _check_free(home: Path, typed: Path, *, force: bool) -> None:
    if not os.path.lexists(home):
        return
    if home.is_symlink() or not home.is_dir():
        raise RunError(f"'{typed}' exists and is not a folder. Choose another --out.")
    if not is_run(home) and any(home.iterdir()):
        raise RunError(
            f"'{typed}' exists and is not a meshscope run; it is never replaced. Choose another --out."
        )
    if not force:
        raise RunError(
            f"'{typed}' exists. Use --force to replace it, or another --out to keep both."
        )


def is_run(path: Path) -> bool:
    """Whether the folder is a meshscope run, of any schema."""
    try:
        manifest = read_json(path / MANIFEST, MAX_STORED_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("tool") == TOOL and "schema" in manifest


def partial_name(path: Path) -> str | None:
    """The name of the run that this half-written folder would become; None for other folders."""
    match = _LEFTOVER.fullmatch(path.name)
    return match["name"] if match else None


def _is_barely_begun(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    if names != [MANIFEST]:
        return not names
    return MARK.startswith((path / MANIFEST).read_bytes().decode(errors="replace"))


def _move_into_place(partial: Path, path: Path) -> None:
    """Renames the folder; a run that it replaces is first renamed to `.replaced-`, then removed."""
    if not path.exists():
        partial.rename(path)
        return
    replaced = path.parent / f".{path.name}.replaced-{os.getpid()}"
    with locked(path):
        path.rename(replaced)
        try:
            partial.rename(path)
        except BaseException:
            replaced.rename(path)
            raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Locks the folder while the block runs; the system releases the lock when the process dies."""
    if fcntl is None:
        yield
        return
    with _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(folder: Path, flags: int = 0) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_abandoned(folder: Path, process: int) -> bool:
    """Whether no process has locked the folder, and its creator is not about to; unknown on Windows."""
    if fcntl is None:
        return False
    with suppress(OSError):
        if _is_alive(process) and time.time() - folder.stat().st_mtime < SETTLED_S:
            return False
    try:
        with _opened(folder, os.O_NOFOLLOW | os.O_DIRECTORY) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def remove_leftovers(parent: Path) -> None:
    """Removes half-written folders of dead processes; restores a run that was being replaced."""
    for folder in parent.iterdir():
        match = _LEFTOVER.fullmatch(folder.name)
        if match is None or not is_abandoned(folder, int(match["process"])):
            continue
        with suppress(OSError):  # another process removed it
            if is_run(folder) or _is_barely_begun(folder):
                home = parent / match["name"]
                if match["state"] == "replaced" and not os.path.lexists(home):
                    folder.rename(home)
                else:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch_folder() -> Generator[Path]:
    """A folder that is removed when the block ends; also removes dead processes' folders."""
    remove_leftovers(Path(tempfile.gettempdir()))
    suffix = f".partial-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix=".meshscope-", suffix=suffix) as name:
        folder = Path(name)
        (folder / MANIFEST).write_text(MARK)
        with locked(folder):
            yield folder


def default_folder(*parts: str) -> Path:
    """`runs/<parts joined by ->`, each reduced to letters, digits and `._-`."""
    return RUNS / safe_name("-".join(filter(None, parts)))


def safe_name(text: str) -> str:
    """The text as one path component: other characters become `-`, no leading dot, never empty."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")
    return name[:MAX_NAME] or "run"
