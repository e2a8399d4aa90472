"""Executes the commands of a sweep on a TPU slice of Google Cloud, and goes on after it was preempted."""

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.cloud.gcloud import GcloudEnd
from meshscope.cloud.machine import MachineState, SliceRequest, TpuMachine
from meshscope.errors import MeshscopeError, RunError
from meshscope.store.folder import new_folder
from meshscope.store.read import read_run
from meshscope.sweep.folder import SweepFolder
from meshscope.sweep.planned import PlannedRun
from meshscope.sweep.queue import LOG_BYTES, WAIT_FOR_END_S, EndedCommand

N_SLICES = 10  # tried for one run before it fails
END_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSlice:
    """A machine, the slice to ask for if there is none, and what to install on it."""

    machine: TpuMachine
    request: SliceRequest
    wheel: Path
    jax_version: str

    def ready(self) -> None:
        """Waits for the slice, and installs meshscope on it if it is new."""
        if self.machine.ensure_active(self.request):
            self.machine.note(f"{self.machine.name}: installing")
            self.machine.install(self.wheel, jax_version=self.jax_version)


class TpuQueue:
    """Runs one command at a time on a slice; each run is copied out as soon as it is complete.

    A slice that was preempted is replaced by another one, and the command starts again there.
    """

    def __init__(self, folder: SweepFolder, tpu: TpuSlice, *, force: bool) -> None:
        self._folder, self._tpu, self._force = folder, tpu, force
        self._pool = ThreadPoolExecutor(1)
        self._running: list[Future[EndedCommand]] = []
        self._is_ending = threading.Event()
        tpu.ready()

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """One: a live run has the slice to itself."""
        return min(1, len(planned))

    def start(self, planned: PlannedRun) -> None:
        """Starts the command on all workers of the slice."""
        self._running.append(self._pool.submit(self._made, planned))

    def ended(self) -> list[EndedCommand]:
        """The commands that ended since the last call; their runs are written."""
        done = [one for one in self._running if one.done()]
        self._running = [one for one in self._running if not one.done()]
        return [one.result() for one in done]

    def last_lines(self) -> list[tuple[PlannedRun, str]]:
        """Nothing: gcloud returns the log when the command ends."""
        return []

    def close(self) -> None:
        """Ends the command that still runs; the slice stays, and its next command replaces the run there."""
        self._is_ending.set()
        last = time.monotonic() + WAIT_FOR_END_S
        while not all(one.done() for one in self._running):
            self._tpu.machine.gcloud.end_commands(kill=time.monotonic() > last)
            time.sleep(END_POLL_S)
        self._pool.shutdown()

    def _made(self, planned: PlannedRun) -> EndedCommand:
        started_s = time.monotonic()
        try:
            end = self._tried(planned)
            returncode, log, failure = end.returncode, end.log[-LOG_BYTES:], None
        except (MeshscopeError, OSError) as error:
            returncode, log, failure = 1, "", str(error)
        return EndedCommand(
            planned=planned,
            returncode=returncode,
            log=log,
            seconds=time.monotonic() - started_s,
            failure=failure,
        )

    def _tried(self, planned: PlannedRun) -> GcloudEnd:
        """Runs the command until a slice lives long enough; RunError if none does."""
        machine = replace(self._tpu.machine, sleep=self._sleep)
        tpu = replace(self._tpu, machine=machine)
        for _ in range(N_SLICES):
            tpu.ready()
            end = machine.run(planned.name, [planned.command.value, *planned.words])
            self._sleep(0.0)
            try:
                if not end.returncode:
                    self._fetch(planned)
                    return end
            except RunError:
                if machine.state() is MachineState.ACTIVE:
                    raise
            if machine.state() is MachineState.ACTIVE:
                return end
            machine.note(f"{machine.name}: lost while it made '{planned}'")
        raise RunError(f"{N_SLICES} slices were lost while they made it. Try another zone or time.")

    def _sleep(self, seconds: float) -> None:
        """Waits; RunError if the sweep ends."""
        if self._is_ending.wait(seconds):
            raise RunError("the sweep was interrupted.")

    def _fetch(self, planned: PlannedRun) -> None:
        """Copies the run from the slice into the folder, whole or not at all."""
        with tempfile.TemporaryDirectory(prefix="meshscope-tpu-") as scratch:
            self._tpu.machine.fetch(planned.name, Path(scratch))
            fetched = Path(scratch, planned.name)
            read_run(fetched)  # raises if it is damaged
            with new_folder(self._folder.path / planned.name, force=self._force) as partial:
                shutil.copytree(fetched, partial, symlinks=True, dirs_exist_ok=True)
