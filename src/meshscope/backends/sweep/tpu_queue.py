"""Runs the commands of a sweep on a slice of Google Cloud, within limits of time and money."""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.backends.sweep.folder import PlannedRun, SweepFolder
from meshscope.backends.sweep.installation import Installation
from meshscope.backends.sweep.machine import (
    ACTIVE,
    N_SLICES,
    N_TRIES,
    NOT_INSTALLED,
    RUNNING,
    TpuMachine,
)
from meshscope.backends.sweep.queue import LOG_BYTES, CommandQueue, EndedCommand
from meshscope.errors import MeshscopeError, RunError
from meshscope.store.folder import new_folder
from meshscope.store.read import read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a sweep may spend: hours of an active slice, and its cost by the price of a chip hour."""

    n_chips: int
    max_hours: float | None = None
    price: float | None = None
    max_cost: float | None = None

    def hours_left(self, hours: float) -> float:
        """Hours until a limit is reached; infinite without one."""
        left = [float("inf")]
        if self.max_hours is not None:
            left.append(self.max_hours - hours)
        if self.max_cost is not None and self.price is not None:
            left.append(self.max_cost / (self.price * self.n_chips) - hours)
        return min(left)

    def spent(self, hours: float) -> str:
        """What these hours are in chip hours and money."""
        n, price = hours * self.n_chips, self.price
        cost = "" if price is None else f", {n * price:.2f} at {price:g} each"
        return f"{hours:.2f} hours of {self.n_chips} chips, {n:.2f} chip hours{cost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSlice:
    """A machine, what asks for its slice if there is none, what its runs need there, and what it may cost."""

    machine: TpuMachine
    create: Callable[[], None]
    installation: Installation
    limits: Limits

    def ready(self) -> None:
        """Waits for the slice, and installs meshscope on it if it is new; RunError if no slice lasts so long."""
        for _ in range(N_SLICES):
            is_new = self.machine.ensure_active(self.create)
            try:
                if is_new:
                    self.install()
            except RunError:
                if self.machine.persistent_state() == ACTIVE:
                    raise
            else:
                return
        raise RunError(f"{N_SLICES} slices were lost in turn. Try another zone or time.")

    def install(self) -> None:
        """Installs meshscope and what the runs need on all workers."""
        self.machine.note(f"{self.machine.name}: installing")
        self.machine.install(self.installation)


class TpuQueue(CommandQueue):
    """Runs one command at a time on a slice; each run is copied out as soon as it is complete.

    A command runs detached: a lost connection is made again, and the command is started at most once on a slice.
    A slice that was preempted is replaced by another one, and the command starts again there. What is wrong with the
    slice, and not with a run, stops the sweep, which can be resumed.
    """

    def __init__(self, folder: SweepFolder, tpu: TpuSlice, *, force: bool) -> None:
        super().__init__(folder, force=force)
        self._tpu = replace(tpu, machine=replace(tpu.machine, sleep=self._sleep))
        self._key = tpu.installation.key
        self._active_s, self._since_s = 0.0, None
        self._is_stopped = False
        self._ready()

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """One: a live run has the slice to itself."""
        return min(1, len(planned))

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Runs the command on all workers of the slice, and copies its run."""
        if not self._is_stopped:
            try:
                return self._tried(planned)
            except (MeshscopeError, OSError) as error:
                self._is_stopped = True
                self._tpu.machine.note(f"the sweep stops: {error}")
        return EndedCommand(returncode=-signal.SIGTERM)

    def end_commands(self, *, kill: bool) -> None:
        """Ends gcloud; the command goes on while the slice stays, and the next sweep with it waits on."""
        for process in tuple(self._tpu.machine.gcloud.running):
            (process.kill if kill else process.terminate)()

    def close(self) -> None:
        """States what was spent."""
        self._tpu.machine.note(f"{self._tpu.machine.name}: {self._spent}")

    def _ready(self) -> None:
        """Waits for the slice, whose time counts from then on."""
        self._tpu.ready()
        if self._since_s is None:
            self._since_s = time.monotonic()

    @property
    def _hours(self) -> float:
        now_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return (self._active_s + now_s) / 3600

    @property
    def _spent(self) -> str:
        return self._tpu.limits.spent(self._hours)

    def _tried(self, planned: PlannedRun) -> EndedCommand:
        """Runs the command until a slice lives long enough; RunError if none does."""
        machine = self._tpu.machine
        for _ in range(N_SLICES):
            self._ready()
            end = self._followed(planned)
            if end is not None:
                machine.note(f"{machine.name}: {self._spent}")
                return end
            self._active_s, self._since_s = self._hours * 3600, None  # no time counts from now on
            machine.note(f"{machine.name}: lost while it made '{planned}'")
        raise RunError(
            f"{N_SLICES} slices were lost while they made '{planned}'. Try another zone or time."
        )

    def _followed(self, planned: PlannedRun) -> EndedCommand | None:
        """How the command ended, whose run is copied; None if the slice was lost."""
        machine, words = self._tpu.machine, self._tpu.installation.words_there(planned)
        n_unanswered = 0
        while True:
            self._check_limits(planned)
            code, log = machine.ask(planned, words, key=self._key)
            self._sleep(0.0)
            n_unanswered = 0 if code is not None else n_unanswered + 1
            try:
                if code == 0:
                    return self._fetched(planned)
                if code == NOT_INSTALLED:
                    self._tpu.install()
            except RunError:
                if machine.persistent_state() == ACTIVE:
                    raise
                return None
            if code is None:
                if machine.persistent_state() != ACTIVE:
                    return None
                if n_unanswered >= N_TRIES:
                    machine.note(f"{machine.name}: no connection, although it is active")
                    machine.remove()
                    return None
                machine.pause()
            elif code not in (0, RUNNING, NOT_INSTALLED):
                machine.stop(planned, key=self._key)  # workers that wait for the failed one
                return EndedCommand(returncode=code, log=log[-LOG_BYTES:])

    def _check_limits(self, planned: PlannedRun) -> None:
        """RunError if the time or the money is spent; the run ends with the slice."""
        if self._tpu.limits.hours_left(self._hours) <= 0:
            self._tpu.machine.stop(planned, key=self._key)
            raise RunError(
                f"the limit is reached: {self._spent}. Raise --max-hours or --max-cost to make the other runs."
            )

    def _sleep(self, seconds: float) -> None:
        if self.is_ending.wait(seconds):
            raise RunError("the sweep was interrupted.")

    def _fetched(self, planned: PlannedRun) -> EndedCommand:
        """Copies the run, again if the copy is damaged; a run that stays so has failed."""
        machine, failure = self._tpu.machine, None
        for _ in range(N_TRIES):
            with tempfile.TemporaryDirectory(prefix="meshscope-tpu-") as scratch:
                try:
                    machine.fetch(planned.name, Path(scratch))
                    fetched = Path(scratch, planned.name)
                    read_run(fetched)  # raises if it is damaged
                except MeshscopeError as error:
                    failure = str(error)
                else:
                    with new_folder(self.folder.path / planned.name, force=self.force) as partial:
                        shutil.copytree(fetched, partial, symlinks=True, dirs_exist_ok=True)
                    return EndedCommand(returncode=0)
            if machine.persistent_state() != ACTIVE:
                raise RunError(f"the slice was lost before its run was copied: {failure}")
            machine.pause()
        machine.stop(planned, key=self._key)
        return EndedCommand(returncode=1, failure=f"its run cannot be copied: {failure}")
