"""Files that a user names: read up to a limit, or refused with one reason; written whole, never over others without --force.

Files and folders of a store (gs://, s3:// and what else fsspec knows) are copied into a scratch folder.
"""

import errno
import gzip
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from meshscope.errors import MeshscopeError, MissingToolError, ParseError, RunError, SpecError

MAX_BYTES = 64 << 20  # of a file that a user wrote
MAX_STORED_BYTES = 1 << 31  # of a file in the folder of a run
MARK = ".meshscope-export"  # in every exported folder, which may be replaced
MAX_FETCHED_BYTES = 1 << 33  # of a file or folder of a store
MAX_FETCHED_FILES = 10_000
MAX_DEPTH = 8  # of its folders
_STORED = re.compile(r"([a-z][a-z0-9]+):/+(?=[^/])")  # a Path has one slash of gs://


def path_of(name: Any) -> Path:
    """The path of this name; SpecError for an impossible one, or an empty one, which would be the current folder."""
    if not isinstance(name, str | os.PathLike) or not str(name) or "\0" in str(name):
        shown = repr(name) if isinstance(name, str | int | float) else f"a {type(name).__name__}"
        raise SpecError(f"{shown} is not a path. Name a file or a folder.")
    return Path(name)


def own_text(name: str) -> str:
    """The text of a file of this package, by its path in it."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def own_table(name: str) -> dict[str, Any]:
    """The document of a TOML or JSON file of this package, by its path in it."""
    text = own_text(name)
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a file; OSError if it cannot be read, has more than `max_bytes`, or is a pipe or a device."""
    check_regular(path)
    if path.stat().st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
    return path.read_bytes()


def read_text(
    path: Path,
    remedy: str,
    max_bytes: int = MAX_BYTES,
    *,
    kind: type[MeshscopeError] = ParseError,
) -> str:
    """The text of a file, without a byte order mark; an error of this kind, with the remedy, if it cannot be read."""
    try:
        return read_file(path, max_bytes).decode("utf-8-sig")
    except OSError as error:
        reason, cause = error.strerror, error
    except UnicodeDecodeError as error:
        reason, cause = f"it is not UTF-8 text (byte {error.start})", error
    raise kind(f"cannot read '{path}': {reason}. {remedy}") from cause


@contextmanager
def fetched(paths: Sequence[Path], scratch: Path) -> Generator[list[Path]]:
    """The paths, with copies below `scratch` of what a store has under `gs://`, `s3://` or another protocol of fsspec.

    MissingToolError without fsspec or the library of a store, SpecError for what cannot be read or is too large.
    Messages of errors inside the block name the original.
    """
    names: dict[str, str] = {}
    local: list[Path] = []
    for number, path in enumerate(paths):
        match = _STORED.match(path.as_posix())
        if match is None or path.exists():
            local.append(path)
            continue
        url = f"{match[1]}://{path.as_posix()[match.end() :]}"
        local.append(_fetch(url, scratch / f"fetched-{number}"))
        names[str(local[-1])] = url
    try:
        yield local
    except MeshscopeError as error:
        text = str(error)
        for copy, url in names.items():
            text = text.replace(copy, url)
        error.args = (text,)
        raise


def _fetch(url: str, folder: Path) -> Path:
    """A copy of the file or folder at the URL, which keeps its name."""
    try:
        store, place = import_module("fsspec.core").url_to_fs(url)
        is_folder = store.isdir(place)
        every = store.find(place, maxdepth=MAX_DEPTH, detail=True) if is_folder else {}
        sizes = {key: one["size"] for key, one in every.items()} or {place: store.size(place)}
    except ImportError as error:
        needed = f"'{url}' needs fsspec with the library of its store ({error})"
        raise MissingToolError.of_extra(needed, "remote") from error
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(
            f"cannot read '{url}': {reason[:200]}. Check the name and your credentials, or copy it here."
        ) from error
    n_bytes = sum(size or 0 for size in sizes.values())
    if len(sizes) > MAX_FETCHED_FILES or n_bytes > MAX_FETCHED_BYTES:
        raise SpecError(
            f"'{url}' has {len(sizes):,} files and {n_bytes:,} bytes; up to {MAX_FETCHED_FILES:,} files and "
            f"{MAX_FETCHED_BYTES:,} bytes are copied. Name fewer."
        )
    copy = folder / (PurePosixPath(place).name or "files")
    for key in sizes:
        target = copy / PurePosixPath(key).relative_to(place) if is_folder else copy
        if ".." in target.parts:
            raise SpecError(
                f"'{url}' has a file '{key[:200]}', which leads out of its folder. Rename it."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get_file(key, str(target))
        except Exception as error:
            raise SpecError(f"cannot copy '{url}': {str(error)[:200]}. Try again.") from error
    return copy


def write_gzip(path: Path, text: str) -> None:
    """Writes compressed text; HLO shrinks 15 times, and higher levels take seconds and gain little."""
    with gzip.open(path, "wt", 1, encoding="utf-8") as file:
        file.write(text)


def check_regular(path: Path) -> None:
    """OSError unless the path is a file that can be read more than once, or a folder."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        reason = "it is a pipe or a device, not a file; save it to one"
        raise OSError(errno.EINVAL, reason, str(path))


def check_no_device(path: Path) -> None:
    """RunError for a pipe, a device or a socket: a file would take its place for all programs of the machine."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # nothing is there, or whoever writes says why it cannot be reached
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RunError(
            f"'{path}' is a pipe or a device, and is never replaced. Give a file with --out."
        )


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """The document of a JSON file; OSError as `read_file`, ValueError as `parse_json`."""
    return parse_json(read_file(path, max_bytes))


def parse_json(
    content: bytes, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The document of this JSON text; ValueError with a short reason if it is not JSON."""
    try:
        return json.loads(content, object_pairs_hook=object_of)
    except UnicodeDecodeError as error:
        raise ValueError(f"not text, byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_object(
    path: Path, remedy: str, max_bytes: int = MAX_BYTES, *, kind: type[MeshscopeError]
) -> dict[str, Any]:
    """The object in a JSON file; an error of this kind, with the remedy, for any other file."""
    try:
        document = read_json(path, max_bytes)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise kind(f"cannot read '{path}': {reason}. {remedy}") from error
    if not isinstance(document, dict):
        raise kind(f"'{path}' is not a JSON object. {remedy}")
    return document


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
