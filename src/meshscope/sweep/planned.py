"""An experiment of a sweep that was checked: which command makes its run, and where the run will be."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.events.enums import Source
from meshscope.spec.experiment_record import ExperimentRecord
from meshscope.store.folder_names import MAX_NAME, safe_name


class RunCommand(StrEnum):
    """The commands that make a run of an experiment."""

    PREDICT = "predict"
    COMPILE = "compile"
    RUN = "run"

    @property
    def source(self) -> Source:
        """The strongest source of the runs that the command makes."""
        match self:
            case RunCommand.PREDICT:
                return Source.PREDICTED
            case RunCommand.COMPILE:
                return Source.COMPILED
            case RunCommand.RUN:
                return Source.MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run to be made by `meshscope COMMAND WORDS`.

    `name` is that of its folder, `experiment` what its manifest will hold, `told` its options for
    people, by name.
    """

    name: str
    command: RunCommand
    words: tuple[str, ...]
    experiment: ExperimentRecord
    told: Mapping[str, str | int | float | bool]

    def __str__(self) -> str:
        """The command and its options in one line."""
        short = ("model", "topology", "plan")
        told = (str(v) if name in short else f"{name}={v}" for name, v in self.told.items())
        return " ".join([self.command.value, *told])


def run_name(readable: str, command: RunCommand, words: tuple[str, ...]) -> str:
    """The name of the folder: readable, and another one for any other option."""
    digest = hashlib.sha256("\0".join([command.value, *words]).encode()).hexdigest()[:8]
    end = f"-{command}-{digest}"
    return safe_name(readable)[: MAX_NAME - len(end)] + end
