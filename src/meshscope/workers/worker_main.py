"""Inside a worker process: reports progress, writes the result or the error, ends with its parent."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshscope.errors import MeshscopeError
from meshscope.workers.progress import format_progress


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
