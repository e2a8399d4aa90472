"""A checked experiment of a sweep: the command that makes its run, and the name of its folder."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshscope.events.enums import Source
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.store.folder import MAX_NAME, safe_name


class RunCommand(StrEnum):
    """The commands that make a run."""

    PREDICT = "predict"
    COMPILE = "compile"
    RUN = "run"
    IMPORT = "import"

    @property
    def source(self) -> Source | None:
        """The strongest source of the command's runs; None if the files that it reads decide."""
        match self:
            case RunCommand.PREDICT:
                return Source.PREDICTED
            case RunCommand.COMPILE:
                return Source.COMPILED
            case RunCommand.RUN:
                return Source.MEASURED
            case RunCommand.IMPORT:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run that `meshscope COMMAND WORDS` makes.

    `name` is the name of its folder, `experiment` the one of its manifest, `options` the options that
    differ from their defaults.
    """

    name: str
    command: RunCommand
    words: tuple[str, ...]
    experiment: ExperimentRecord
    options: Mapping[str, str | int | float | bool]

    def __str__(self) -> str:
        """The command and its options on one line."""
        short = ("model", "topology", "plan")
        texts = (str(v) if name in short else f"{name}={v}" for name, v in self.options.items())
        return " ".join([self.command.value, *texts])


def planned_import(path: str, options: Mapping[str, str | bool]) -> PlannedRun:
    """The import of one file or folder with these options, by the names of the command line."""
    words = [path]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    command = RunCommand.IMPORT
    return PlannedRun(
        name=run_name(Path(path).name, command, tuple(words)),
        command=command,
        words=tuple(words),
        experiment=ExperimentRecord(imported=(path,)),
        options={"file": path, **options},
    )


def run_name(readable: str, command: RunCommand, words: tuple[str, ...]) -> str:
    """A readable folder name that is unique to the command and its options."""
    digest = hashlib.sha256("\0".join([command.value, *words]).encode()).hexdigest()[:8]
    end = f"-{command}-{digest}"
    return safe_name(readable)[: MAX_NAME - len(end)] + end
