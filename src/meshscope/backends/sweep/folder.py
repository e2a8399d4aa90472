"""The runs of a sweep and their folder, which one sweep uses at a time.

A complete run is done. `failures.json` stores failures, so that a resumed sweep does not retry them.
The folder holds no other state.
"""

import hashlib
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshscope.errors import MissingToolError, RunError
from meshscope.events.enums import Source
from meshscope.files import read_object
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.program import Frontend
from meshscope.store.folder import MAX_NAME, TOOL, remove_leftovers, safe_name
from meshscope.store.read import read_manifest
from meshscope.store.write import write_json

MARK = "sweep.json"
_START_AGAIN = "Remove it and start again."
FAILURES = "failures.json"
SUMMARY = "summary.parquet"
LEFTOVERS = (".*.json.partial", ".*.log")  # files of a killed sweep
SCHEMA = 1
WAIT_FOR_LOCK_S = 15.0  # for the children of a killed sweep to end


class FolderInUseError(RunError):
    """Another sweep has the folder."""


class RunCommand(StrEnum):
    """The commands that make a run."""

    PREDICT = "predict"
    COMPILE = "compile"
    RUN = "run"


class RunState(StrEnum):
    """The state of a run of a sweep."""

    DONE = "done"
    FAILED = "failed"
    TO_DO = "to do"
    INTERRUPTED = "interrupted"


# The strongest source of a command's runs.
_SOURCES = {
    RunCommand.PREDICT: Source.PREDICTED,
    RunCommand.COMPILE: Source.COMPILED,
    RunCommand.RUN: Source.MEASURED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run that `meshscope COMMAND WORDS` makes.

    `name` names its folder, `experiment` is in its manifest, and `options` differ from their defaults.
    """

    name: str
    command: RunCommand
    words: tuple[str, ...]
    experiment: ExperimentRecord
    options: Mapping[str, str | int | float | bool]

    def __str__(self) -> str:
        short = ("model", "topology", "plan")
        texts = (str(v) if name in short else f"{name}={v}" for name, v in self.options.items())
        return " ".join([self.command.value, *texts])

    @property
    def is_traced(self) -> bool:
        """Whether its program is a trace of the modules of transformers."""
        return "frontend" in self.options and Frontend(self.options["frontend"]).is_traced


def run_name(readable: str, command: RunCommand, words: tuple[str, ...]) -> str:
    """A readable folder name that is unique to the command and its options."""
    digest = hashlib.sha256("\0".join([command.value, *words]).encode()).hexdigest()[:8]
    end = f"-{command}-{digest}"
    return safe_name(readable)[: MAX_NAME - len(end)] + end


class SweepFolder:
    """The runs in a folder, and the message of each failed one by its name.

    `lock` is held by this process and by its children.
    """

    def __init__(self, path: Path, *, lock: int | None = None) -> None:
        self.path, self.lock = path, lock
        self.failures: dict[str, str] = {}
        if (path / FAILURES).is_file():
            failures = read_object(path / FAILURES, _START_AGAIN, kind=RunError).get("failures")
            if not isinstance(failures, dict):
                raise RunError(
                    f"'{path / FAILURES}' has no list of failures. Remove it; failed runs are retried."
                )
            self.failures = {str(name): str(message) for name, message in failures.items()}

    def set_failure(self, planned: PlannedRun, message: str | None) -> None:
        """Stores the message of a failed run; None removes it, so that the run is retried."""
        if self.failures.get(planned.name) == message:
            return
        self.failures.pop(planned.name, None)
        if message is not None:
            self.failures[planned.name] = message
        write_json(self.path / FAILURES, {"tool": TOOL, "failures": self.failures})

    def state(self, planned: PlannedRun) -> RunState:
        """Whether the run is complete, failed or is to be made; RunError if its folder holds something else."""
        path = self.path / planned.name
        if not os.path.lexists(path):
            return RunState.FAILED if planned.name in self.failures else RunState.TO_DO
        manifest = read_manifest(path)
        stored, wanted = map(_without_place, (manifest.experiment, planned.experiment))
        # Keys that an older run lacks are skipped.
        other = next((k for k in wanted if stored.get(k) not in (None, {}, wanted[k])), None)
        if _SOURCES[planned.command] is not manifest.source:
            other = "source"
        if other is not None:
            raise RunError(
                f"'{path}' holds a run of another {other} made with the same options. Use --force to "
                "replace it, or another --out to keep both."
            )
        return RunState.DONE

    def write_mark(self, document: Mapping[str, Any]) -> None:
        """Writes sweep.json, which marks the folder and lists the experiments."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.path / MARK, {"tool": TOOL, "sweep": SCHEMA, "started": now, **document})


def _without_place(experiment: ExperimentRecord) -> dict[str, Any]:
    """The experiment without the path of its model, which differs on the worker that made the run.

    The form of its layers follows from the command: predictions are of unrolled layers.
    """
    document = experiment.as_dict()
    document.pop("layers_are", None)
    model = dict(document.get("model") or {})
    model.pop("source", None)
    return {**document, "model": model}


@contextmanager
def locked_folder(path: Path) -> Generator[SweepFolder]:
    """The folder, created if it is missing, for this sweep alone while the block runs.

    RunError if it is something else, or another sweep uses it. Removes leftovers of interrupted runs.
    """
    try:
        import fcntl  # noqa: PLC0415  a system without it can still say why
    except ModuleNotFoundError as error:
        raise MissingToolError(
            "a sweep locks its folder, which Windows cannot. Use Linux or macOS, or predict and plan."
        ) from error
    check_is_sweep(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise RunError(
            f"cannot create the folder '{path}': {error.strerror}. Choose another --out."
        ) from error
    try:
        last = time.monotonic() + WAIT_FOR_LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > last:
                    raise FolderInUseError(
                        f"another sweep is using '{path}'. Wait for it, or choose another --out."
                    ) from error
                time.sleep(0.1)
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
        document = read_object(path / MARK, _START_AGAIN, kind=RunError)
        if document.get("tool") == TOOL and document.get("sweep") == SCHEMA:
            return
    elif all(entry.name.startswith(".") for entry in path.iterdir()):
        return  # empty, or interrupted before its mark was written
    raise RunError(
        f"'{path}' exists and is not the folder of a sweep; it is not changed. Choose another --out."
    )
