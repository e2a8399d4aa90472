"""Makes the runs of a sweep, each in a process of its own, so that no failure reaches another."""

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
from meshscope.workers.exit_status import MAX_TOLD_CHARACTERS, ending, last_words, was_killed

POLL_S = 0.02
WAIT_FOR_END_S = 20.0  # a child that is told to end removes what it wrote
LOG_BYTES = 65_536  # of the end of a child's log

CHILD = ("-m", "meshscope.cli.child")
SAID = "meshscope: "  # begins the one message of a command that failed

# How a command ends that was told to: by Ctrl-C, or by SIGTERM.
INTERRUPTED = (
    -signal.SIGINT,
    -signal.SIGTERM,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
)


class Outcome(StrEnum):
    """How the making of a run ended."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class SweepListener(Protocol):
    """Is told what happens."""

    def started(self, planned: PlannedRun) -> None:
        """The run is being made."""

    def said(self, planned: PlannedRun, words: str) -> None:
        """The last thing that its command said."""

    def ended(self, planned: PlannedRun, how: Outcome, seconds: float) -> None:
        """It is made, or could not be."""


@dataclass(slots=True, kw_only=True)
class _Child:
    planned: PlannedRun
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float

    def said(self) -> str:
        """The end of what it wrote on standard error."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Lets go of its standard input, which tells it to end if it still runs."""
        if self.process.stdin is not None:
            self.process.stdin.close()


def make_runs(
    planned: Iterable[PlannedRun],
    folder: SweepFolder,
    *,
    n_jobs: int,
    force: bool,
    progress: SweepListener,
) -> None:
    """Makes the runs in their order, so many at a time; what fails is kept, and stops nothing.

    A run on live devices has the machine for itself, as its times tell of nothing else then.
    """
    waiting, running = deque(planned), list[_Child]()
    try:
        while waiting or running:
            while waiting and _has_room(waiting[0], running, n_jobs):
                running.append(_started(waiting.popleft(), folder, force=force))
                progress.started(running[-1].planned)
            time.sleep(POLL_S)
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                progress.ended(child.planned, *_settled(child, folder))
            for child in running:
                progress.said(child.planned, _last_line(child.said()))
    finally:
        _end(running)


def _has_room(planned: PlannedRun, running: Sequence[_Child], n_jobs: int) -> bool:
    if not running:
        return True
    is_live = planned.command is RunCommand.RUN or running[0].planned.command is RunCommand.RUN
    return not is_live and len(running) < n_jobs


def _started(planned: PlannedRun, folder: SweepFolder, *, force: bool) -> _Child:
    """The command in a child that holds our lock, and our pipe: it ends when we do, however we end."""
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


def _settled(child: _Child, folder: SweepFolder) -> tuple[Outcome, float]:
    """How the child ended, and the seconds it took; a failure is kept in the folder."""
    seconds, code = time.monotonic() - child.started_s, child.process.returncode
    said = child.said()
    child.log.unlink()
    child.close()
    if code in INTERRUPTED:
        return Outcome.INTERRUPTED, seconds
    if code:
        folder.keep_failure(child.planned, failure_words(code, said))
        return Outcome.FAILED, seconds
    return Outcome.DONE, seconds


def failure_words(returncode: int, log: str) -> str:
    """Why a command failed: its own message, or how it ended and its last words."""
    if was_killed(returncode):
        return "the command was killed; the machine probably ran out of memory."
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(SAID)]
    if starts:
        message = "\n".join(lines[starts[-1] :]).removeprefix(SAID)
        return message[:MAX_TOLD_CHARACTERS]
    return f"the command crashed ({ending(returncode)}). Its last words: {last_words(log)}"


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _end(running: Sequence[_Child]) -> None:
    """Ends the children, and waits until they have removed what they wrote."""
    for child in running:
        if child.process.poll() is None:
            child.process.terminate()
    last = time.monotonic() + WAIT_FOR_END_S
    try:
        for child in running:
            child.process.wait(timeout=max(0.0, last - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # told twice, they end by force
    finally:
        for child in running:
            if child.process.poll() is None:
                os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.close()
            child.log.unlink()


def time_left_s(
    took: Sequence[tuple[RunCommand, float]], waiting: Sequence[RunCommand], *, n_jobs: int
) -> float | None:
    """Seconds that the waiting runs will take, by the mean of those made so far; None before the first.

    A command of which none was made counts as the mean of all. Runs on live devices go one by one.
    """
    if not took:
        return None
    total = 0.0
    for command in waiting:
        own = [seconds for made, seconds in took if made is command] or [s for _, s in took]
        total += sum(own) / len(own) / (1 if command is RunCommand.RUN else n_jobs)
    return total
