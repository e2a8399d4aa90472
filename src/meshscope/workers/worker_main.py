"""What a child process of ours does: it tells its parent, leaves a report, and never outlives it."""

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
    """Ends this process when its parent, which holds the other end of standard input, is gone.

    With `grace_s` as by SIGTERM, so that what is half-written is removed; after that many seconds by
    force.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        if grace_s > 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def report_progress(words: str, left_s: float | None = None) -> None:
    """Tells the parent what is being done, and the seconds that all has left, on a line of standard output."""
    sys.stdout.write(format_progress(words, left_s) + "\n")
    sys.stdout.flush()


def reported(work: Callable[[], Mapping[str, Any]], report: Path, errors: Path) -> int:
    """Does the work and writes what it returns; every failure that Python sees becomes an error report.

    Returns the exit status of the process.
    """
    try:
        report.write_text(json.dumps(work()), encoding="utf-8")
    except Exception as error:  # noqa: BLE001  told to the parent, which words the message
        is_ours = isinstance(error, MeshscopeError)
        number = error.errno if isinstance(error, OSError) else None
        said = {"type": type(error).__name__, "message": str(error), "is_ours": is_ours}
        errors.write_text(json.dumps(said | {"errno": number}), encoding="utf-8")
        return 1
    return 0
