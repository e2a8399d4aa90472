"""Executes the commands of a sweep as child processes on this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshscope.sweep import queue
from meshscope.sweep.folder import SweepFolder
from meshscope.sweep.planned import PlannedRun
from meshscope.sweep.queue import LOG_BYTES, EndedCommand, last_line, n_cores


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
        """Closes its standard input, which ends it if it still runs, and removes its log."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.log.unlink()


class LocalQueue:
    """Child processes, which inherit the lock of the folder and end when this process ends."""

    def __init__(self, folder: SweepFolder, *, force: bool) -> None:
        self._folder, self._force = folder, force
        self._running: list[_Child] = []

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """As many as keep all cores of this process busy."""
        has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
        n = len(os.sched_getaffinity(0)) if has_affinity else (os.cpu_count() or 1)
        return max(1, n // max(n_cores(one.command) for one in planned))

    def start(self, planned: PlannedRun) -> None:
        """Starts the command as a child."""
        path = self._folder.log(planned)
        out = ("--out", str(self._folder.path / planned.name))
        words = (planned.command.value, *planned.words, *out, *(["--force"] * self._force))
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *queue.CHILD, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=() if self._folder.lock is None else (self._folder.lock,),
            )
        self._running.append(
            _Child(planned=planned, process=process, log=path, started_s=time.monotonic())
        )

    def ended(self) -> list[EndedCommand]:
        """The children that ended since the last call."""
        children = [child for child in self._running if child.process.poll() is not None]
        self._running = [child for child in self._running if child not in children]
        return [_ended(child) for child in children]

    def last_lines(self) -> list[tuple[PlannedRun, str]]:
        """The last line of each child's log."""
        return [(child.planned, last_line(child.log_tail())) for child in self._running]

    def close(self) -> None:
        """Terminates the children, and waits until they have removed their half-written runs."""
        for child in self._running:
            if child.process.poll() is None:
                child.process.terminate()
        last = time.monotonic() + queue.WAIT_FOR_END_S
        try:
            for child in self._running:
                child.process.wait(timeout=max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # then they are killed
        finally:
            for child in self._running:
                if child.process.poll() is None:
                    os.kill(child.process.pid, signal.SIGKILL)
                child.process.wait()
                child.close()


def _ended(child: _Child) -> EndedCommand:
    log, seconds = child.log_tail(), time.monotonic() - child.started_s
    child.close()
    return EndedCommand(
        planned=child.planned, returncode=child.process.returncode, log=log, seconds=seconds
    )
