"""Makes the runs of a sweep, each by a command in its own process, wherever a queue executes it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from meshscope.backends.sweep.folder import PlannedRun, RunCommand, SweepFolder
from meshscope.workers import INTERRUPTED, MAX_MESSAGE, exit_status, telling_line, was_killed

# The command line as a child: without its parent it ends as by SIGTERM, so that half-written folders are
# removed, and by force after some seconds.
_PROGRAM = (
    "import runpy; from meshscope.workers import end_with_parent; end_with_parent(grace_s=15.0); "
    "runpy.run_module('meshscope', run_name='__main__', alter_sys=True)"
)
CHILD = ("-c", _PROGRAM)
LOG_BYTES = 65_536  # read from the end of a command's log
POLL_S, END_POLL_S = 0.02, 0.2
WAIT_FOR_END_S = 20.0  # for terminated commands to remove their half-written runs
MAX_JOBS = 1_000
MESSAGE = "meshscope: "  # prefix of the message of a failed command


class Queue(StrEnum):
    """Where the commands of a sweep are executed."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCommand:
    """How the command of a run ended, and the end of its log.

    `failure` is the message if the command has no exit code, because its machine was lost.
    """

    returncode: int
    log: str = ""
    failure: str | None = None


class CommandQueue:
    """Executes commands, each in a thread that waits for it; a complete run is in the folder of the sweep."""

    def __init__(self, folder: SweepFolder, *, force: bool) -> None:
        self.folder, self.force = folder, force
        self.is_ending = threading.Event()
        self._pool = ThreadPoolExecutor(MAX_JOBS)
        self._running: dict[Future[EndedCommand], tuple[PlannedRun, float]] = {}

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """How many of these commands it executes at a time, if the user does not say."""
        raise NotImplementedError

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Executes the command that makes the run, to its end."""
        raise NotImplementedError

    def end_commands(self, *, kill: bool) -> None:
        """Terminates, or kills, the commands that still run."""
        raise NotImplementedError

    def last_line(self, planned: PlannedRun) -> str:
        """The last line that the command wrote; empty where logs stay on other machines until the end."""
        del planned
        return ""

    def start(self, planned: PlannedRun) -> None:
        """Starts the command that makes the run."""
        future = self._pool.submit(self.made, planned)
        self._running[future] = planned, time.monotonic()

    def running(self) -> list[PlannedRun]:
        """The runs whose commands have not been reported as ended."""
        return [planned for planned, _ in self._running.values()]

    def ended(self) -> list[tuple[PlannedRun, EndedCommand, float]]:
        """The commands that ended since the last call, with their seconds."""
        done = [future for future in self._running if future.done()]
        starts = [self._running.pop(future) for future in done]
        return [
            (planned, future.result(), time.monotonic() - started_s)
            for future, (planned, started_s) in zip(done, starts, strict=True)
        ]

    def close(self) -> None:
        """Ends the commands that still run, without a half-written run."""
        self.is_ending.set()
        last = time.monotonic() + WAIT_FOR_END_S
        try:
            while not all(one.done() for one in self._running):
                self.end_commands(kill=time.monotonic() > last)
                time.sleep(END_POLL_S)
        finally:
            self.end_commands(kill=True)
            self._pool.shutdown()


def n_cores(command: RunCommand) -> int:
    """The cores that a command keeps busy: `compile` has a worker process for each phase."""
    return 2 if command is RunCommand.COMPILE else 1


def started_child(
    words: Sequence[str], log: Path, *, folder: Path | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Python with these arguments, which writes into the log and ends when this process does."""
    with log.open("wb") as written:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
            cwd=folder,
            pass_fds=pass_fds,
        )


class LocalQueue(CommandQueue):
    """Child processes, which inherit the lock of the folder and end when this process ends."""

    def __init__(self, folder: SweepFolder, *, force: bool) -> None:
        super().__init__(folder, force=force)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """As many as keep all cores of this process busy."""
        return max(1, len(os.sched_getaffinity(0)) // max(n_cores(one.command) for one in planned))

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Runs the command as a child, whose log is removed when it has ended."""
        log, out = self._log(planned), self.folder.path / planned.name
        words = [*CHILD, planned.command.value, *planned.words, "--out", str(out)]
        locks = () if self.folder.lock is None else (self.folder.lock,)
        if self.is_ending.is_set():
            return EndedCommand(returncode=-signal.SIGTERM)
        words += ["--force"] * self.force
        with started_child(words, log, pass_fds=locks) as child:
            self._children[planned.name] = child
            returncode = child.wait()
            del self._children[planned.name]
        text = _tail(log)
        log.unlink()
        return EndedCommand(returncode=returncode, log=text)

    def last_line(self, planned: PlannedRun) -> str:
        """The last line of the child's log that is not blank."""
        log = self._log(planned)
        lines = [line.strip() for line in _tail(log).splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def end_commands(self, *, kill: bool) -> None:
        """Sends SIGTERM or SIGKILL to the children."""
        for child in list(self._children.values()):
            child.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def _log(self, planned: PlannedRun) -> Path:
        return self.folder.path / f".{planned.name}.log"


def _tail(log: Path) -> str:
    """The end of a log; empty before it exists, and after it was removed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


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
    waiting = deque(planned)
    try:
        while waiting or queue.running():
            while waiting and _has_room(waiting[0], queue.running(), n_jobs):
                one = waiting.popleft()
                queue.start(one)
                listener.started(one)
            time.sleep(POLL_S)
            for one, end, seconds in queue.ended():
                listener.ended(one, _outcome(one, end, folder), seconds)
            for one in queue.running():
                listener.reported(one, queue.last_line(one))
    finally:
        queue.close()


def _has_room(planned: PlannedRun, running: Sequence[PlannedRun], n_jobs: int) -> bool:
    if not running:
        return True
    is_live = planned.command is RunCommand.RUN or running[0].command is RunCommand.RUN
    return not is_live and len(running) < n_jobs


def _outcome(planned: PlannedRun, end: EndedCommand, folder: SweepFolder) -> Outcome:
    """How the command ended; stores a failure in the folder.

    Its message is the command's own, or its exit status and the line of its log that explains it.
    """
    if end.returncode in INTERRUPTED:
        return Outcome.INTERRUPTED
    if not end.returncode:
        return Outcome.DONE
    lines = end.log.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(MESSAGE)]
    message = f"the command crashed ({exit_status(end.returncode)}). Its log says: {telling_line(end.log)}"
    if end.failure is not None:
        message = end.failure
    elif was_killed(end.returncode):
        message = "the command was killed; the machine probably ran out of memory."
    elif starts:
        message = "\n".join(lines[starts[-1] :]).removeprefix(MESSAGE)[:MAX_MESSAGE]
    folder.set_failure(planned, message)
    return Outcome.FAILED


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
