"""Makes the runs of a sweep, each in its own process, so that a failure does not affect the others."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from meshscope.sweep.folder import SweepFolder
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.workers.exit_status import MAX_MESSAGE, exit_status, telling_line, was_killed

POLL_S = 0.02
WAIT_FOR_END_S = 20.0  # for a terminated child to remove its half-written run
LOG_BYTES = 65_536  # read from the end of a child's log

CHILD = ("-m", "meshscope.sweep.child")
MESSAGE = "meshscope: "  # prefix of the message of a failed command

# Exit codes of a command interrupted by Ctrl-C or SIGTERM.
INTERRUPTED = (
    -signal.SIGINT,
    -signal.SIGTERM,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
)


class Outcome(StrEnum):
    """How a run ended."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class SweepListener(Protocol):
    """Receives the events of a sweep."""

    def started(self, planned: PlannedRun) -> None:
        """The run starts."""

    def reported(self, planned: PlannedRun, message: str) -> None:
        """The last line that its command wrote."""

    def ended(self, planned: PlannedRun, outcome: Outcome, seconds: float) -> None:
        """The run ended, after `seconds`."""


@dataclass(slots=True, kw_only=True)
class _Child:
    planned: PlannedRun
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float

    def log_tail(self) -> str:
        """The end of its standard error."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Closes its standard input, which ends it if it still runs."""
        if self.process.stdin is not None:
            self.process.stdin.close()


def make_runs(
    planned: Iterable[PlannedRun],
    folder: SweepFolder,
    *,
    n_jobs: int,
    force: bool,
    listener: SweepListener,
) -> None:
    """Makes the runs in order, up to `n_jobs` in parallel; failures are stored and do not stop others.

    A run on live devices has the machine to itself, because others would change its times.
    """
    waiting, running = deque(planned), list[_Child]()
    try:
        while waiting or running:
            while waiting and _has_room(waiting[0], running, n_jobs):
                running.append(_started(waiting.popleft(), folder, force=force))
                listener.started(running[-1].planned)
            time.sleep(POLL_S)
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                listener.ended(child.planned, *_outcome(child, folder))
            for child in running:
                listener.reported(child.planned, _last_line(child.log_tail()))
    finally:
        _end(running)


def _has_room(planned: PlannedRun, running: Sequence[_Child], n_jobs: int) -> bool:
    if not running:
        return True
    is_live = planned.command is RunCommand.RUN or running[0].planned.command is RunCommand.RUN
    return not is_live and len(running) < n_jobs


def _started(planned: PlannedRun, folder: SweepFolder, *, force: bool) -> _Child:
    """Starts the command in a child that inherits the lock and ends when this process ends."""
    out = ("--out", str(folder.path / planned.name), *(["--force"] if force else []))
    command = [sys.executable, *CHILD, planned.command.value, *planned.words, *out]
    path = folder.log(planned)
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=() if folder.lock is None else (folder.lock,),
        )
    return _Child(planned=planned, process=process, log=path, started_s=time.monotonic())


def _outcome(child: _Child, folder: SweepFolder) -> tuple[Outcome, float]:
    """How the child ended, and after how many seconds; stores a failure in the folder."""
    seconds, code = time.monotonic() - child.started_s, child.process.returncode
    log = child.log_tail()
    child.log.unlink()
    child.close()
    if code in INTERRUPTED:
        return Outcome.INTERRUPTED, seconds
    if code:
        folder.keep_failure(child.planned, failure_message(code, log))
        return Outcome.FAILED, seconds
    return Outcome.DONE, seconds


def failure_message(returncode: int, log: str) -> str:
    """Why a command failed: its own message, or its exit status and the line of its log that explains it."""
    if was_killed(returncode):
        return "the command was killed; the machine probably ran out of memory."
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(MESSAGE)]
    if starts:
        message = "\n".join(lines[starts[-1] :]).removeprefix(MESSAGE)
        return message[:MAX_MESSAGE]
    return f"the command crashed ({exit_status(returncode)}). Its log says: {telling_line(log)}"


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _end(running: Sequence[_Child]) -> None:
    """Terminates the children, and waits until they have removed their half-written runs."""
    for child in running:
        if child.process.poll() is None:
            child.process.terminate()
    last = time.monotonic() + WAIT_FOR_END_S
    try:
        for child in running:
            child.process.wait(timeout=max(0.0, last - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # then they are killed
    finally:
        for child in running:
            if child.process.poll() is None:
                os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.close()
            child.log.unlink()


def time_left_s(
    durations: Sequence[tuple[RunCommand, float]], waiting: Sequence[RunCommand], *, n_jobs: int
) -> float | None:
    """Seconds until the waiting runs are made, from the mean duration of each command; None before the first.

    A command without a duration counts as the mean of all. Live runs run one by one.
    """
    if not durations:
        return None
    total = 0.0
    for command in waiting:
        same = [seconds for made, seconds in durations if made is command]
        seconds = same or [s for _, s in durations]
        total += sum(seconds) / len(seconds) / (1 if command is RunCommand.RUN else n_jobs)
    return total
