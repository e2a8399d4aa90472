"""The failure of a worker process as one error message: its own, a library's, or its exit status and log."""

import errno
import json
import os
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshscope.errors import CompileError, MeshscopeError, ParseError, RunFailedError, SpecError

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
