"""Writes files and folders atomically, and never over existing ones without --force."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from meshscope.errors import RunError

MARK = ".meshscope-export"  # in every exported folder, which may be replaced


@contextmanager
def new_file(path: Path, *, force: bool) -> Generator[Path]:
    """A temporary path that becomes `path` when the block ends without an exception.

    RunError if `path` exists; `force` replaces a file.
    """
    check_new(path, force=force)
    if path.is_dir():
        raise RunError(f"'{path}' exists and is a folder. Choose another --out.")
    with _partial(path) as partial:
        yield partial
        check_new(path, force=force)
        partial.replace(path)


@contextmanager
def new_directory(path: Path, *, force: bool) -> Generator[Path]:
    """A temporary folder that becomes `path` when the block ends without an exception.

    RunError if `path` exists; `force` replaces an earlier export, and nothing else.
    """
    check_new(path, force=force)
    if os.path.lexists(path) and not (path / MARK).is_file():
        raise RunError(
            f"'{path}' exists and is not an export of meshscope, so it is never replaced. "
            "Choose another --out."
        )
    with _partial(path) as partial:
        partial.mkdir()
        yield partial
        check_new(path, force=force)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)


def check_new(path: Path, *, force: bool) -> None:
    """RunError if `path` exists, unless `force` replaces it."""
    if os.path.lexists(path) and not force:
        raise RunError(
            f"'{path}' exists. Use --force to replace it, or another --out to keep both."
        )


@contextmanager
def _partial(path: Path) -> Generator[Path]:
    """A temporary path next to `path`, removed when the block ends."""
    partial = path.absolute().parent / f".{path.name}.partial-{os.getpid()}"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"cannot write '{path}': {reason}. Choose another --out.") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        elif os.path.lexists(partial):
            partial.unlink()
