"""Makes the runs of a sweep, each in its own process, so that a failure does not affect the others."""

import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from meshscope.sweep.folder import SweepFolder
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.sweep.queue import CommandQueue, EndedCommand
from meshscope.workers import MAX_MESSAGE, exit_status, telling_line, was_killed

POLL_S = 0.02

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


def make_runs(
    planned: Iterable[PlannedRun],
    folder: SweepFolder,
    queue: CommandQueue,
    *,
    n_jobs: int,
    listener: SweepListener,
) -> None:
    """Makes the runs in order, up to `n_jobs` in parallel; failures are stored and do not stop others.

    A run on live devices has the machine to itself, because others would change its times.
    """
    waiting, running = deque(planned), list[PlannedRun]()
    try:
        while waiting or running:
            while waiting and _has_room(waiting[0], running, n_jobs):
                running.append(waiting.popleft())
                queue.start(running[-1])
                listener.started(running[-1])
            time.sleep(POLL_S)
            for ended in queue.ended():
                running.remove(ended.planned)
                listener.ended(ended.planned, _outcome(ended, folder), ended.seconds)
            for one, line in queue.last_lines():
                listener.reported(one, line)
    finally:
        queue.close()


def _has_room(planned: PlannedRun, running: Sequence[PlannedRun], n_jobs: int) -> bool:
    if not running:
        return True
    is_live = planned.command is RunCommand.RUN or running[0].command is RunCommand.RUN
    return not is_live and len(running) < n_jobs


def _outcome(ended: EndedCommand, folder: SweepFolder) -> Outcome:
    """How the command ended; stores a failure in the folder."""
    if ended.returncode in INTERRUPTED:
        return Outcome.INTERRUPTED
    if ended.returncode:
        message = ended.failure or failure_message(ended.returncode, ended.log)
        folder.keep_failure(ended.planned, message)
        return Outcome.FAILED
    return Outcome.DONE


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
