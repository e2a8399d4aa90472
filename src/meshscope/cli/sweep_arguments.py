"""From what a sweep file asks for to a checked command line, by the options of the commands themselves."""

import math
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from meshscope.cli.options import ExperimentOptions, LiveOptions, asked_experiment, run_folder
from meshscope.errors import SpecError, nearest
from meshscope.spec.experiment import Experiment
from meshscope.sweep.expansion import COMMAND, Asked, Scalar
from meshscope.sweep.planned import PlannedRun, RunCommand, run_name

# Options that the sweep itself gives, or that make no sense in one.
NOT_IN_A_SWEEP = frozenset({"out", "force", "as_json", "coordinator", "process_id", "n_processes"})


OPTIONS: dict[RunCommand, type[ExperimentOptions]] = {
    RunCommand.PREDICT: ExperimentOptions,
    RunCommand.COMPILE: ExperimentOptions,
    RunCommand.RUN: LiveOptions,
}


def option_names() -> list[str]:
    """The options that an experiment of a sweep may have, of all commands."""
    every = (field.name for options in OPTIONS.values() for field in fields(options))
    return [name for name in dict.fromkeys(every) if name not in NOT_IN_A_SWEEP]


def planned_of(asked: Asked) -> PlannedRun:
    """The run to be made; every complaint is a MeshscopeError."""
    command = _command(asked)
    options = _options(OPTIONS[command], command, asked)
    experiment = _checked(command, options)
    given = _given(options)
    words = tuple(_words(given))
    return PlannedRun(
        name=run_name(run_folder(experiment, None).name, command, words),
        command=command,
        words=words,
        experiment=experiment.record,
        told={n: str(v) if isinstance(v, Path) else v for n, v in given.items()},
    )


def _command(asked: Asked) -> RunCommand:
    name = asked.values.get(COMMAND, RunCommand.PREDICT.value)
    if name not in set(RunCommand):
        raise SpecError(f"command '{name}' makes no run. {nearest(str(name), RunCommand)}")
    return RunCommand(str(name))


def _checked(command: RunCommand, options: ExperimentOptions) -> Experiment:
    """The command's own check; a command that no experiment uses is not imported."""
    match command:
        case RunCommand.PREDICT:
            return asked_experiment(options)
        case RunCommand.COMPILE:
            return import_module("meshscope.cli.compile").checked(options)
        case RunCommand.RUN:
            return import_module("meshscope.cli.run").prepared(options).experiment


def _options(kind: type[ExperimentOptions], command: RunCommand, asked: Asked) -> ExperimentOptions:
    """The options of the command with the values of the file, each of its own type."""
    own = {f.name: f for f in fields(kind) if f.name not in NOT_IN_A_SWEEP}
    given = {n: v for n, v in asked.values.items() if n != COMMAND and v is not None}
    foreign = next((name for name in given if name not in own), None)
    if foreign is not None:
        raise SpecError(f"'{foreign}' is no option of {command}. {nearest(foreign, own)}")
    missing = [n for n, f in own.items() if f.default is MISSING and n not in given]
    if missing:
        raise SpecError(f"{command} needs {' and '.join(missing)}.")
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{name: _typed(name, value, hints[name]) for name, value in given.items()})


def _typed(name: str, value: Scalar, hint: Any) -> Any:
    """The value as the option's type has it; SpecError where it has not."""
    kind, least = _kind_and_least(hint)
    found: Any = None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if math.isfinite(value) else None
    elif kind is Path and isinstance(value, str):
        found = Path(value)
    elif issubclass(kind, StrEnum):
        if value not in set(kind):
            raise SpecError(f"{name}: '{value}' is none of {', '.join(kind)}.")
        found = kind(str(value))
    elif type(value) is kind:
        found = value
    if found is None:
        told: dict[Any, str] = {
            str: "a text; put it in quotes",
            int: "a whole number",
            bool: "true or false",
        }
        raise SpecError(f"{name}: '{value}' must be {told.get(kind, 'a number')}.")
    if least is not None and found < least:
        raise SpecError(f"{name}: {value} is too small. Use {least:g} or more.")
    return found


def _kind_and_least(hint: Any) -> tuple[type[Any], float | None]:
    """The one type of an option besides None, and the least value that it takes."""
    least = None
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        least = next((n.min for n in notes if getattr(n, "min", None) is not None), None)
    if isinstance(hint, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return hint, least


def _given(options: ExperimentOptions) -> dict[str, Any]:
    """The options that are not as they would be by themselves, in their order."""
    return {
        f.name: getattr(options, f.name)
        for f in fields(options)
        if f.name not in NOT_IN_A_SWEEP and not _is_default(f, getattr(options, f.name))
    }


def _is_default(field: Field[Any], value: Any) -> bool:
    return field.default is not MISSING and field.default == value


def _words(given: dict[str, Any]) -> list[str]:
    """The options as arguments of the command line."""
    words: list[str] = []
    for name, value in given.items():
        if name == "model":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(f"--{name.replace('_', '-')}")
        else:
            words += _word(f"--{name.replace('_', '-')}", str(value))
    return words


def _word(option: str, value: str) -> list[str]:
    """The option with its value; in one word where the value looks like an option."""
    return [f"{option}={value}"] if value.startswith("-") else [option, value]
