"""Worker processes: start, progress, result, and failure as one error message.

A worker owns a compiler or devices, so that a crash becomes a message. It ends when its parent ends.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshscope.errors import (
    CompileError,
    MeshscopeError,
    ParseError,
    RunFailedError,
    SpecError,
)

PREFIX = "meshscope: "  # of the worker's lines for its parent; libraries write others

SEPARATOR = "\t"  # before the seconds left, if they are known


def format_progress(step: str, left_s: float | None = None) -> str:
    """The line that reports a step, and the seconds that the whole work still needs."""
    return f"{PREFIX}{step}" + ("" if left_s is None else f"{SEPARATOR}{left_s:.3f}")


def parse_progress(line: str) -> tuple[str, float | None] | None:
    """The step and the seconds left of a worker's line; None for a line that a library wrote."""
    if not line.startswith(PREFIX):
        return None
    step, _, left = line.removeprefix(PREFIX).partition(SEPARATOR)
    return step, float(left) if left else None


def error_report(request: Path, name: str = "work") -> Path:
    """The file in which a worker reports its error: beside its request, apart from its output."""
    return request.with_name(f"{name}.error.json")


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
MAX_MESSAGE = 2000  # characters of a worker's own message
MAX_LINE = 300
_TELLING = re.compile(r"Check failed|^\*\*\* |^F\d{4} |Error|emory")


class ExitKind(StrEnum):
    """Why a worker process ended without a result."""

    OURS = "ours"  # a MeshscopeError
    REFUSED = "refused"  # a library raised
    KILLED = "killed"  # by SIGKILL, which Linux sends when memory runs out
    INTERRUPTED = "interrupted"  # by SIGINT or SIGTERM, sent to the worker itself
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`kind` names the exception or exit status; `words` are its message, or a line of the log."""

    how: ExitKind
    kind: str
    words: str


def failure_of(returncode: int, errors: Path, log: Path) -> Failure:
    """The failure of a worker that ended with this code; OSError if it had no space to write."""
    if errors.exists():
        report = json.loads(errors.read_text(encoding="utf-8"))
        if report["errno"] in NO_SPACE:
            raise OSError(report["errno"], os.strerror(report["errno"]))
        message = report["message"][:MAX_MESSAGE]
        if report["is_ours"]:
            return Failure(how=ExitKind.OURS, kind=report["type"], words=message)
        return Failure(
            how=ExitKind.REFUSED, kind=report["type"], words=f"{report['type']}: {message}"
        )
    how = ExitKind.CRASHED
    if was_killed(returncode):
        how = ExitKind.KILLED
    elif was_interrupted(returncode):
        how = ExitKind.INTERRUPTED
    line = telling_line(log.read_text(encoding="utf-8", errors="replace"))
    return Failure(how=how, kind=exit_status(returncode), words=line)


def was_killed(returncode: int) -> bool:
    """Whether the process got SIGKILL, which Linux sends when memory runs out."""
    return returncode == -signal.SIGKILL


def was_interrupted(returncode: int) -> bool:
    """Whether a signal asked the process to end; 130 and 143 are how shells and Python pass it on."""
    signals = (signal.SIGINT, signal.SIGTERM)
    return returncode in {*(-s for s in signals), *(128 + s for s in signals)}


def exit_status(returncode: int) -> str:
    """The name of the signal, or the exit code, of a `subprocess.Popen.returncode`."""
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"


def telling_line(log: str) -> str:
    """The first line of the log that reports a failure, or else its last line."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or ["none"])[0 if telling else -1][:MAX_LINE]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What a worker process does, as its error messages say it.

    `process` and `activity` fill "PROCESS crashed while ACTIVITY"; `rejection` introduces the
    message of a library that raised.
    """

    process: str
    activity: str
    rejection: str
    memory_remedy: str
    crash_remedy: str
    error: type[CompileError] | type[RunFailedError]


def worker_error(task: WorkerTask, failure: Failure) -> MeshscopeError:
    """The error to raise for a failed worker."""
    match failure.how:
        case ExitKind.OURS:
            is_unreadable = failure.kind == ParseError.__name__
            return (ParseError if is_unreadable else SpecError)(failure.words)
        case ExitKind.REFUSED:
            return task.error(f"{task.rejection}: {failure.words}")
        case ExitKind.KILLED:
            return task.error(
                f"{task.process} was killed while {task.activity}, probably because the machine ran "
                f"out of memory. {task.memory_remedy}"
            )
        case ExitKind.INTERRUPTED:
            return task.error(
                f"{task.process} was interrupted ({failure.kind}) while {task.activity}. "
                "Run the command again."
            )
        case ExitKind.CRASHED:
            return task.error(
                f"{task.process} crashed ({failure.kind}) while {task.activity}. "
                f"{task.crash_remedy} Last line of its log: {failure.words}"
            )


# Called with a part of the work, its present step, and the seconds that it still needs, if known.
Progress = Callable[[str, str, float | None], None]


@contextmanager
def worker_process(  # noqa: PLR0913  what a process has
    arguments: Sequence[str],
    log: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    is_piped: bool = True,
) -> Generator[subprocess.Popen[bytes]]:
    """Runs Python with these arguments in `folder` while the block runs; standard error goes to `log`.

    The worker's standard input is a pipe that closes when this process ends. Its standard output is
    a pipe, or goes to `log` too if not `is_piped`.
    """
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if is_piped else errors,
            stderr=errors,
            env=environment,
            cwd=folder,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.wait()


def _forwarded(child: subprocess.Popen[bytes], part: str, progress: Progress) -> int:
    """Forwards the worker's progress until it ends; returns its exit code."""
    assert child.stdout is not None
    for line in child.stdout:
        report = parse_progress(line.decode(errors="replace").strip("\r\n"))
        if report is not None:
            progress(part, *report)
    return child.wait()


def run_worker(  # noqa: PLR0913  what a process has, and who hears of it
    arguments: Sequence[str],
    request: Path,
    task: WorkerTask,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    part: str = "",
    progress: Progress | None = None,
) -> None:
    """Runs a worker to its end, with its log beside its request; raises its failure as one error.

    It reports progress on its standard output if `progress` is given.
    """
    log, is_piped = request.with_name("log"), progress is not None
    with worker_process(
        arguments, log, python=python, environment=environment, is_piped=is_piped
    ) as child:
        returncode = child.wait() if progress is None else _forwarded(child, part, progress)
    if returncode:
        raise worker_error(task, failure_of(returncode, error_report(request), log))


# Inside a worker process.


def end_with_parent(*, grace_s: float = 0.0) -> None:
    """Ends this process when its parent ends, which closes standard input.

    With `grace_s` the process gets SIGTERM first, to remove half-written files; after that many
    seconds it is ended by force.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        if grace_s > 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def report_progress(step: str, left_s: float | None = None) -> None:
    """Reports a step to the parent, and the seconds that the whole work still needs."""
    sys.stdout.write(format_progress(step, left_s) + "\n")
    sys.stdout.flush()


def reported(work: Callable[[], Mapping[str, Any]], report: Path, errors: Path) -> int:
    """Writes the result of the work, or an error report for any exception; returns the exit code."""
    try:
        report.write_text(json.dumps(work()), encoding="utf-8")
    except Exception as error:  # noqa: BLE001  the parent writes the message
        is_ours = isinstance(error, MeshscopeError)
        number = error.errno if isinstance(error, OSError) else None
        document = {"type": type(error).__name__, "message": str(error), "is_ours": is_ours}
        errors.write_text(json.dumps(document | {"errno": number}), encoding="utf-8")
        return 1
    return 0
