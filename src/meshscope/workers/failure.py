"""Why a child process left no report, as far as it can be known."""

import errno
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshscope.workers.exit_status import MAX_TOLD_CHARACTERS, ending, last_words, was_killed

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class ExitKind(StrEnum):
    """What became of the work."""

    OURS = "ours"  # the child found what was asked wrong, and has the message
    REFUSED = "refused"  # a library raised
    KILLED = "killed"  # by SIGKILL, as Linux does where memory runs out
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`words` are the message, of the library too, or the last words of the log; `kind` names the class."""

    how: ExitKind
    kind: str
    words: str


def failure_of(returncode: int, errors: Path, log: Path) -> Failure:
    """Of a child that ended so; OSError where it had no room to write, as if we had written ourselves."""
    if errors.exists():
        said = json.loads(errors.read_text(encoding="utf-8"))
        if said["errno"] in NO_ROOM:
            raise OSError(said["errno"], os.strerror(said["errno"]))
        message = said["message"][:MAX_TOLD_CHARACTERS]
        if said["is_ours"]:
            return Failure(how=ExitKind.OURS, kind=said["type"], words=message)
        return Failure(how=ExitKind.REFUSED, kind=said["type"], words=f"{said['type']}: {message}")
    how = ExitKind.KILLED if was_killed(returncode) else ExitKind.CRASHED
    words = last_words(log.read_text(encoding="utf-8", errors="replace"))
    return Failure(how=how, kind=ending(returncode), words=words)
