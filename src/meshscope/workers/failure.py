"""The failure of a worker process: its own message, a library's, or its exit status and log."""

import errno
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshscope.workers.exit_status import (
    MAX_MESSAGE,
    exit_status,
    telling_line,
    was_interrupted,
    was_killed,
)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


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
