"""Writes files and folders atomically, never over existing ones without --force, and the event table as CSV or Parquet."""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from meshscope.analysis.catalog import events_of
from meshscope.errors import RunError
from meshscope.events.timeline import printable
from meshscope.files import check_no_device
from meshscope.store.run import RunRecord

MARK = ".meshscope-export"  # in every exported folder, which may be replaced


@contextmanager
def new_file(path: Path, *, force: bool) -> Generator[Path]:
    """A temporary path that becomes `path` when the block ends without an exception.

    RunError if `path` exists; `force` replaces a file.
    """
    check_new(path, force=force)
    if path.is_dir():
        raise RunError(f"'{path}' exists and is a folder. Choose another --out.")
    with _partial(path, force=force) as partial:
        yield partial


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
    with _partial(path, force=force) as partial:
        partial.mkdir()
        yield partial


def check_new(path: Path, *, force: bool) -> None:
    """RunError if `path` exists, unless `force` replaces it, which it never does to a device."""
    check_no_device(path)
    if os.path.lexists(path) and not force:
        raise RunError(
            f"'{path}' exists. Use --force to replace it, or another --out to keep both."
        )


@contextmanager
def _partial(path: Path, *, force: bool) -> Generator[Path]:
    """A temporary path next to `path`, which replaces it when the block ends, or is removed after an exception.

    A link stays, and the file that it names is replaced.
    """
    path = Path(os.path.realpath(path))
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        check_new(path, force=force)
        if partial.is_dir() and path.exists():
            shutil.rmtree(path)
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"cannot write '{path}': {reason}. Choose another --out.") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        elif os.path.lexists(partial):
            partial.unlink()


_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a spreadsheet formula


def write_parquet(run: RunRecord, path: Path) -> None:
    """Writes the event table with the types of its schema."""
    events_of(run).write_parquet(path)


def write_csv(run: RunRecord, path: Path) -> None:
    """Writes the event table with lists as JSON and unknown values as empty cells.

    Texts contain no control characters and are cut after 2,000 characters. A text that a
    spreadsheet would read as a formula gets a leading apostrophe.
    """
    events = events_of(run)
    columns = [_cells(events[name]) for name in events.columns]
    pl.DataFrame(columns).write_csv(path)


def _cells(column: pl.Series) -> pl.Series:
    if column.dtype == pl.String:
        return column.map_elements(_guarded, return_dtype=pl.String)
    if isinstance(column.dtype, pl.List):
        texts = [
            None if value is None else json.dumps(value, separators=(",", ":"))
            for value in column.to_list()
        ]
        return pl.Series(column.name, texts, dtype=pl.String)
    return column


def _guarded(text: str) -> str:
    cut = printable(text).replace("\n", " ").replace("\t", " ")
    return f"'{cut}" if cut.startswith(_FORMULA) else cut
