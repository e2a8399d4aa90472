"""Exit status of a worker process, and the line of its log that explains it."""

import re
import signal

MAX_MESSAGE = 2000  # characters of a worker's own message
MAX_LINE = 300
_TELLING = re.compile(r"Check failed|^\*\*\* |^F\d{4} |Error|emory")


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
