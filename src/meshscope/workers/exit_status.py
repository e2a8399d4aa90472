"""How a child process ended, in words: its signal or exit code, and what its log says of the reason."""

import re
import signal

MAX_TOLD_CHARACTERS = 2000  # of a child's own message
MAX_LAST_WORDS = 300
_TELLING = re.compile(r"Check failed|^\*\*\* |^F\d{4} |Error|emory")


def was_killed(returncode: int) -> bool:
    """Whether the process got SIGKILL, as Linux sends it where memory runs out."""
    return returncode == -signal.SIGKILL


def ending(returncode: int) -> str:
    """The signal's name, or the exit code; of `subprocess.Popen.returncode`."""
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"


def last_words(log: str) -> str:
    """The line of a child's log that says why it ended, as far as one does."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or ["none"])[0 if telling else -1][:MAX_LAST_WORDS]
