"""What a sweep asks of the processes that execute its commands, wherever they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from meshscope.sweep.planned import PlannedRun, RunCommand

CHILD = ("-m", "meshscope.sweep.child")
LOG_BYTES = 65_536  # read from the end of a command's log
WAIT_FOR_END_S = 20.0  # for terminated commands to remove their half-written runs


class Queue(StrEnum):
    """Where the commands of a sweep are executed."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCommand:
    """How the command of a run ended, the end of its log, and its seconds.

    `failure` is the message if the command has no exit code, because its machine was lost.
    """

    planned: PlannedRun
    returncode: int
    log: str
    seconds: float
    failure: str | None = None


class CommandQueue(Protocol):
    """Executes commands, each in its own process; a complete run is in the folder of the sweep."""

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """How many of these commands it executes at a time, if the user does not say."""
        ...

    def start(self, planned: PlannedRun) -> None:
        """Starts the command that makes the run."""

    def ended(self) -> list[EndedCommand]:
        """The commands that ended since the last call."""
        ...

    def last_lines(self) -> list[tuple[PlannedRun, str]]:
        """The last line that each command wrote, where it is known."""
        ...

    def close(self) -> None:
        """Ends the commands that still run, without a half-written run."""


def n_cores(command: RunCommand) -> int:
    """The cores that a command keeps busy: `compile` has a worker process for each phase."""
    return 2 if command is RunCommand.COMPILE else 1


def last_line(log: str) -> str:
    """The last line of the log that is not blank; empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""
