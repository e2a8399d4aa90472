"""The commands as a typer app; each is imported when it runs."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from meshscope import __version__
from meshscope.api.options import Option, flag_of, hints_of, request_of
from meshscope.cli.main import COMMANDS, GROUPS, SETTINGS, Subcommand
from meshscope.errors import SpecError, UsageError

FREE_TEXT = ("query", "search", "prompt_text")  # may be empty, or is checked by its command


def _lazy_class(command: Subcommand) -> type[TyperCommand]:
    """The class of a command whose module is imported when its arguments are parsed."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: Any, args: list[str], *rest: Any, **extra: Any) -> Any:
            """The context of the imported command."""
            single = typer.Typer(**SETTINGS, add_completion=False)
            single.command(self.name)(typer_command(command.load()))
            loaded = typer.main.get_command(single)
            if "queue" in {param.name for param in loaded.params}:
                _refuse_engine(args)
            for param in loaded.params:
                param.type = _strict(param)
            return loaded.make_context(info_name, args, *rest, **extra)

    return LazyCommand


def _refuse_engine(words: Sequence[str]) -> None:
    """A usage error for the option of other commands that says whose collectives are predicted."""
    if any(word.partition("=")[0] == "--engine" for word in words):
        raise typer.BadParameter(
            "--engine is an option of predict, compile and run. Where work runs is --queue local or ray"
        )


def _strict(param: Any) -> Any:
    """The type of a parameter, without values that Python takes: empty paths, digits of other scripts, `_` in numbers."""
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
    return strict


def _print_version(value: bool) -> None:  # noqa: FBT001  typer calls it so
    if value:
        typer.echo(f"meshscope {__version__}")
        raise typer.Exit


def app() -> typer.Typer:
    """All commands; those of a group below its name."""
    root = typer.Typer(**SETTINGS, add_completion=True, no_args_is_help=True)

    @root.callback()
    def callback(
        *,
        version: Annotated[
            bool,
            typer.Option(
                "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """See every byte that an LLM moves across a TPU slice, before you rent one."""

    groups = {name: typer.Typer(**SETTINGS, no_args_is_help=True) for name in GROUPS}
    for words, command in COMMANDS.items():
        *group, name = words.split()
        parent = groups[group[0]] if group else root
        parent.command(name, cls=_lazy_class(command), help=command.summary)(_placeholder)
    for name, group_app in groups.items():
        root.add_typer(group_app, name=name, help=GROUPS[name])
    return root


def _placeholder() -> None:
    raise AssertionError("LazyCommand invokes the command itself")


def typer_command(work: Callable[..., None]) -> Callable[..., None]:
    """The function for typer: a parameter that is a request becomes its options."""

    def command(**values: Any) -> None:
        try:
            work(
                **{
                    name: request_of(cast("Any", kind), values)
                    if is_dataclass(kind)
                    else values[name]
                    for name, kind in kinds.items()
                }
            )
        except UsageError as error:
            raise typer.BadParameter(str(error)) from error

    kinds: dict[str, Any] = get_type_hints(work, include_extras=True)
    del kinds["return"]
    options = [one for name, kind in kinds.items() for one in _options(work, name, kind)]
    options.sort(key=lambda one: one[1].is_last)
    parameters = [_parameter(*one) for one in options]
    command.__doc__ = work.__doc__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  typer reads it
    return command


_Declared = tuple[str, Option, Any, Any]  # name, declaration, type and default of an option


def _options(work: Callable[..., None], name: str, kind: Any) -> Iterator[_Declared]:
    """The options that one parameter of the function stands for."""
    if not is_dataclass(kind):
        default = inspect.signature(work).parameters[name].default
        hint, declared = get_args(kind)
        yield name, declared, hint, MISSING if default is inspect.Parameter.empty else default
        return
    hints = hints_of(kind)
    for one in fields(kind):
        declared = one.metadata["option"]
        if not declared.is_for_python:
            yield one.name, declared, hints[one.name], one.default


def _parameter(name: str, declared: Option, kind: Any, default: Any) -> inspect.Parameter:
    shown: Any = {} if declared.shown is None else {"show_default": declared.shown}
    if declared.is_argument:
        info = typer.Argument(metavar=declared.metavar, help=declared.help, **shown)
    else:
        info = typer.Option(
            *(declared.flags or (flag_of(name),)),
            metavar=declared.metavar,
            help=declared.help,
            min=declared.least,
            max=declared.most,
            **shown,
        )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, info],
        default=inspect.Parameter.empty if default is MISSING else default,
    )
