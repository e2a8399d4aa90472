"""Executes one command of a sweep on a node of a cluster, and returns its run as an archive."""

import io
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import meshscope
from meshscope.errors import RunError
from meshscope.store.folder import new_folder
from meshscope.sweep.queue import LOG_BYTES
from meshscope.workers import worker_process


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCommand:
    """The arguments of Python that make the run `name`, where they are executed, and by which version."""

    name: str
    arguments: tuple[str, ...]
    folder: Path
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEnd:
    """How a command ended on its node; `archive` is the run folder as a zip file, if it was made."""

    returncode: int
    log: str
    seconds: float
    archive: bytes | None


def remote_end(command: RemoteCommand) -> RemoteEnd:
    """Executes the command in a child that ends with this process; RunError on another version."""
    if meshscope.__version__ != command.version:
        raise RunError(
            f"the node has meshscope {meshscope.__version__}, the sweep has {command.version}. "
            "Install one version on every node."
        )
    started_s = time.monotonic()
    with TemporaryDirectory(prefix="meshscope-sweep-") as temporary:
        out, log = Path(temporary, command.name), Path(temporary, "log")
        arguments = [*command.arguments, "--out", str(out)]
        folder = command.folder if command.folder.is_dir() else None
        with worker_process(arguments, log, python=sys.executable, folder=folder, is_piped=False) as child:  # fmt: skip
            returncode = child.wait()
        return RemoteEnd(
            returncode=returncode,
            log=log.read_bytes()[-LOG_BYTES:].decode(errors="replace"),
            seconds=time.monotonic() - started_s,
            archive=_archive(out) if returncode == 0 else None,
        )


def unpack(archive: bytes, path: Path, *, force: bool) -> None:
    """Writes the run folder to `path`, whole or not at all."""
    with (
        new_folder(path, force=force) as partial,
        zipfile.ZipFile(io.BytesIO(archive)) as stored,
    ):
        stored.extractall(partial)  # names stay inside of the folder


def _archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, mode="w") as stored:
        for path in sorted(folder.rglob("*")):
            stored.write(path, path.relative_to(folder))
    return content.getvalue()
