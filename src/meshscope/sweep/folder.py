"""The folder of a sweep: its runs and failures, used by one sweep at a time.

A complete run is done. `failures.json` stores failures, so that a resumed sweep does not retry them.
The folder holds no other state.
"""

import json
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshscope.errors import RunError
from meshscope.store.folder import TOOL, remove_leftovers
from meshscope.store.read import read_manifest, read_object
from meshscope.store.run import Manifest
from meshscope.sweep.planned import PlannedRun

try:
    import fcntl
except ImportError:  # not on this platform: two sweeps of one folder are not detected
    fcntl = None

MARK = "sweep.json"
_START_AGAIN = "Remove it and start again."
FAILURES = "failures.json"
SUMMARY = "summary.parquet"
LEFTOVERS = (".*.json.partial", ".*.log")  # files of a killed sweep
SCHEMA = 1
WAIT_FOR_LOCK_S = 15.0  # for the children of a killed sweep to end


class SweepFolder:
    """The runs and failures in a folder; `lock` is held by this process and by its children."""

    def __init__(self, path: Path, *, lock: int | None = None) -> None:
        self.path = path
        self.lock = lock
        self._failures = _read_failures(path / FAILURES)

    @property
    def failures(self) -> Mapping[str, str]:
        """The message of each failed run, by name."""
        return dict(self._failures)

    def keep_failure(self, planned: PlannedRun, message: str) -> None:
        """Stores the message of a failed run."""
        self._failures[planned.name] = message
        self._write_failures()

    def forget_failure(self, planned: PlannedRun) -> None:
        """Removes a failure, so that the run is retried."""
        if self._failures.pop(planned.name, None) is not None:
            self._write_failures()

    def log(self, planned: PlannedRun) -> Path:
        """The log of the command that makes the run; removed when the command has ended."""
        return self.path / f".{planned.name}.log"

    def is_done(self, planned: PlannedRun) -> bool:
        """Whether the run is complete; RunError if its folder holds something else."""
        path = self.path / planned.name
        if not os.path.lexists(path):
            return False
        manifest = read_manifest(path)
        difference = _difference(manifest, planned)
        if difference is not None:
            raise RunError(
                f"'{path}' holds a run of another {difference} made with the same options. Use "
                "--force to replace it, or another --out to keep both."
            )
        return True

    def write_mark(self, document: Mapping[str, Any]) -> None:
        """Writes sweep.json, which marks the folder and lists the experiments."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.path / MARK, {"tool": TOOL, "sweep": SCHEMA, "started": now, **document})

    def _write_failures(self) -> None:
        write_json(self.path / FAILURES, {"tool": TOOL, "failures": self._failures})


@contextmanager
def locked_folder(path: Path) -> Generator[SweepFolder]:
    """The folder, created if it is missing, for this sweep alone while the block runs.

    RunError if it is something else, or another sweep uses it. Removes leftovers of interrupted runs.
    """
    check_is_sweep(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise RunError(
            f"cannot create the folder '{path}': {error.strerror}. Choose another --out."
        ) from error
    try:
        _wait_for_lock(lock, path)
        check_is_sweep(path)
        remove_leftovers(path)
        for pattern in LEFTOVERS:
            for leftover in path.glob(pattern):
                leftover.unlink()
        yield SweepFolder(path, lock=lock)
    finally:
        os.close(lock)


def check_is_sweep(path: Path) -> None:
    """RunError unless the folder is missing, empty, or the folder of a sweep."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise RunError(f"'{path}' exists and is not a folder. Choose another --out.")
    if (path / MARK).is_file():
        document = read_object(path / MARK, _START_AGAIN)
        if document.get("tool") == TOOL and document.get("sweep") == SCHEMA:
            return
    elif all(entry.name.startswith(".") for entry in path.iterdir()):
        return  # empty, or interrupted before its mark was written
    raise RunError(
        f"'{path}' exists and is not the folder of a sweep; it is not changed. Choose another --out."
    )


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, allow_nan=False)
        file.write("\n")
    partial.replace(path)


def _wait_for_lock(lock: int, path: Path) -> None:
    if fcntl is None:
        return
    last = time.monotonic() + WAIT_FOR_LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > last:
                raise RunError(
                    f"another sweep is using '{path}'. Wait for it, or choose another --out."
                ) from error
            time.sleep(0.1)
        else:
            return


def _difference(manifest: Manifest, planned: PlannedRun) -> str | None:
    """The first key in which the run is not the planned one; keys that an older run lacks are skipped."""
    if planned.command.source not in {None, manifest.source}:
        return "source"
    stored, wanted = manifest.experiment.as_dict(), planned.experiment.as_dict()
    if planned.experiment.imported is not None:  # the files say the rest
        wanted = {"imported": wanted["imported"]}
    return next((k for k in wanted if stored.get(k) not in (None, {}, wanted[k])), None)


def _read_failures(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    failures = read_object(path, _START_AGAIN).get("failures")
    if not isinstance(failures, dict):
        raise RunError(f"'{path}' has no list of failures. Remove it; failed runs are retried.")
    return {str(name): str(message) for name, message in failures.items()}
