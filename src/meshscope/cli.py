"""The command `meshscope`: the commands of `api` as a typer app, and a user error as one message.

The module of a command is imported when it runs.
"""

import errno
import gc
import importlib
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, Field
from types import FrameType
from typing import Annotated, Any, NamedTuple, NoReturn, get_args

import typer
from typer.core import TyperCommand

from meshscope import __version__
from meshscope.api.options import (
    FromCommand,
    FullOutput,
    JsonOutput,
    Option,
    declared_fields,
    flag_of,
    hints_of,
    launched_options,
    option_words,
    request_of,
    requests_of,
)
from meshscope.errors import IS_COMMAND_LINE, MeshscopeError, SpecError, UsageError
from meshscope.files import own_table

SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
FREE_TEXT = ("query", "search", "prompt_text")  # may be empty, or is checked by its command


class Subcommand(NamedTuple):
    """A subcommand: a function of a module that is imported only when it runs."""

    place: str  # the module, and the function if that is not `command`
    summary: str

    def load(self) -> Callable[..., Any]:
        """The function."""
        module, _, function = self.place.partition(":")
        return getattr(importlib.import_module(f"meshscope.api.{module}"), function or "command")


_TABLES = own_table("commands.toml")
GROUPS: dict[str, str] = _TABLES["groups"]
COMMANDS = {words: Subcommand(*of) for words, of in _TABLES["commands"].items()}


def _lazy_class(command: Subcommand) -> type[TyperCommand]:
    """The class of a command whose module is imported when its arguments are parsed."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: Any, args: list[str], *rest: Any, **extra: Any) -> Any:
            """The context of the imported command."""
            single = typer.Typer(**SETTINGS, add_completion=False)
            single.command(self.name)(typer_command(command.load()))
            loaded = typer.main.get_command(single)
            for param in loaded.params:
                param.type = _strict(param)
            args = [*args, *_launched(loaded, args)]
            return loaded.make_context(info_name, args, *rest, **extra)

    return LazyCommand


def _launched(command: Any, args: list[str]) -> list[str]:
    """The words for what --from-command says of the options that are not given, which are noted on standard error."""
    if not any(word.partition("=")[0] == flag_of("from_command") for word in args):
        return []
    parser = command.make_parser(command.context_class(command))
    values = parser.parse_args([*args])[0]
    given = {name: value for name, value in values.items() if isinstance(value, str | bool)}
    if "from_command" not in given:
        return []
    from meshscope.reports.model import plain  # noqa: PLC0415  --help needs no reports

    params = {param.name: param for param in command.params}
    options, not_simulated = launched_options(given, params)
    is_argument = params["model"].param_type_name == "argument"
    words = list(option_words(options, "model" if is_argument else ""))
    notes = {"--from-command gives: ": shlex.join(words)}
    notes |= {"not simulated: ": ", ".join(not_simulated)}
    sys.stderr.writelines(f"{head}{plain(text)}\n" for head, text in notes.items() if text)
    return words


def _strict(param: Any) -> Any:
    """The type of a parameter, without Python's empty paths, digits of other scripts and `_` in numbers."""
    kind = param.type
    is_number, name = kind.name.startswith(("int", "float")), param.opts[0]

    def convert(value: Any, given: Any, context: Any) -> Any:
        if value == "" != param.default and param.name not in FREE_TEXT:
            raise SpecError(
                f"{name if name.startswith('-') else param.metavar or name} is empty. "
                "Give a value; a variable of the shell may be unset."
            )
        if isinstance(value, str) and "\0" in value:
            raise SpecError(f"{name}: {value!r} has a NUL byte. Drop it.")
        if is_number and isinstance(value, str) and (not value.isascii() or "_" in value):
            kind.fail(f"'{value}' is not spelled with the digits 0 to 9.", given, context)
        return kind.convert(value, given, context)

    strict = copy(kind)
    strict.convert = convert
    strict.get_missing_message = lambda **_of: f"Give {param.metavar or name}: {param.help}"
    return strict


def _print_version(value: bool) -> None:  # noqa: FBT001  typer calls it so
    if value:
        typer.echo(f"meshscope {__version__}")
        raise typer.Exit


VERSION = typer.Option(
    "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
)


def app() -> typer.Typer:
    """All commands; grouped ones below the group's name."""
    root = typer.Typer(**SETTINGS, add_completion=True, no_args_is_help=True)

    @root.callback()
    def callback(*, version: Annotated[bool, VERSION] = False) -> None:
        """See every byte that an LLM moves across a TPU slice, before you rent one."""

    def placeholder() -> None:
        raise AssertionError("LazyCommand invokes the command itself")

    groups = {name: typer.Typer(**SETTINGS, no_args_is_help=True) for name in GROUPS}
    for words, command in COMMANDS.items():
        *group, name = words.split()
        parent = groups[group[0]] if group else root
        parent.command(name, cls=_lazy_class(command), help=command.summary)(placeholder)
    for name, group_app in groups.items():
        root.add_typer(group_app, name=name, help=GROUPS[name])
    return root


def typer_command(work: Callable[..., Any]) -> Callable[..., None]:
    """The function for typer: the options that are its parameters, or are in requests that are.

    A command that returns what it shows or wrote also has --json, and for a text that may be long --full.
    """

    def command(**values: Any) -> None:
        try:
            requests = {name: request_of(kind, values) for name, kind in kinds.items()}
            shown = work(**{name: getattr(one, name, one) for name, one in requests.items()})
            if shown is not None:
                shown.show(**{n: values[n] for n in ("as_json", "full") if n in values})
        except UsageError as error:
            raise typer.BadParameter(str(error)) from error

    kinds = requests_of(work)
    prints = inspect.signature(work).return_annotation
    output = (JsonOutput,) if prints is not None else ()
    shown = importlib.import_module("meshscope.api.console").Shown
    output += (FullOutput,) if shown in (prints, *get_args(prints)) else ()
    is_simulated = any("server" in hints_of(kind) for kind in kinds.values())
    every = (*kinds.values(), *output, *((FromCommand,) if is_simulated else ()))
    hints = {name: hint for kind in every for name, hint in hints_of(kind).items()}
    parameters = [
        _parameter(one, one.metadata["option"], hints[one.name])
        for one in declared_fields(*every)
        if not one.metadata["option"].is_for_python
    ]
    command.__doc__ = work.__doc__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  typer reads it
    return command


def _parameter(one: "Field[Any]", declared: Option, kind: Any) -> inspect.Parameter:
    how: dict[str, Any] = {"metavar": declared.metavar, "help": declared.help}
    if declared.shown is not None:
        how["show_default"] = declared.shown
    if declared.is_argument:
        info = typer.Argument(**how)
    else:
        flags = declared.flags or (flag_of(one.name),)
        info = typer.Option(*flags, min=declared.least, max=declared.most, **how)
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, info],
        default=inspect.Parameter.empty if one.default is MISSING else one.default,
    )


def main() -> None:
    """Runs the command line and exits with 0, 1 (user error), 2 (usage) or 130 (interrupted)."""
    _check_streams()
    gc.set_threshold(100_000)  # a command is short and keeps most of what it allocates
    signal.signal(signal.SIGTERM, _terminate)
    token = IS_COMMAND_LINE.set(True)
    try:
        try:
            app()(prog_name="meshscope")
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here, not at interpreter exit
    except KeyboardInterrupt:
        sys.exit(130)
    except MeshscopeError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader closed the pipe
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _drop_output()
            _fail(f"{error.strerror}. Free some space and rerun the command.")
        if error.filename is None:
            raise
        _fail(f"'{error.filename}' cannot be used: {error.strerror}. Give another path.")
    finally:
        IS_COMMAND_LINE.reset(token)


def _check_streams() -> None:
    """Lets no file take the place of a closed stream, and refuses a closed output, which no reader would get."""
    is_closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if is_closed:
        sys.stdout = os.fdopen(1, "w", closefd=False)
        _fail("standard output is closed. Redirect it to a file, or to /dev/null.")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  print any name


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Unwinds the stack once, so that workers end and half-written folders are removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _fail(message: str) -> NoReturn:
    from meshscope.reports.model import plain  # noqa: PLC0415  --help needs no reports

    lines = [plain(line) for line in message.splitlines()]
    sys.stderr.write("\n".join(["meshscope: " + lines[0], *lines[1:]]) + "\n")
    sys.exit(1)


def _drop_output() -> None:
    """Drops what stdout could not take, which the interpreter would write again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
