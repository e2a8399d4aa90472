"""An option is declared once, as a field of a request; Python signature, command line and help follow from it."""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, partial, wraps
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, ParamSpec, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from meshscope.errors import NUMBERS, SpecError, kinds_of, number_of, public, with_keywords
from meshscope.files import path_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
In = TypeVar("In")
Out = TypeVar("Out")

# Fields that say how a run is stored or shown, not what it is.
NO_CONDITIONS = frozenset({"out", "force", "progress"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What the command line needs besides name, type and default; `flags` default to the field's name."""

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    shown: str | None = None  # instead of the default
    is_argument: bool = False
    is_last: bool = False  # after the options of the subclass
    is_for_python: bool = False


def option(
    about: str | Option | type,
    *,
    default: Any = MISSING,
    kw_only: bool = True,
    converter: Callable[[In], Out] | None = None,
    **how: Any,
) -> Any:
    """A field of a request with its help, or declared as the field of this name in another request.

    `METAVAR: help` also says how its value is written. `kw_only=False` makes it a positional argument.
    `how` are fields of `Option`.
    """
    how["is_argument"] = not kw_only
    if isinstance(about, str):
        metavar, mark, text = about.partition(": ")
        has_metavar = mark and " " not in metavar and not metavar.islower()
        about = Option(help=text, metavar=metavar) if has_metavar else Option(help=about)
    if isinstance(about, Option):
        about = replace(about, **how)
    metadata = {"option": about, "how": how, "converter": converter}
    return field(default=default, kw_only=kw_only, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def request(kind: type[T]) -> type[T]:
    """A frozen dataclass whose fields are options."""
    for name, one in vars(kind).items():
        if isinstance(one, Field) and isinstance(other := one.metadata["option"], type):
            declared = replace(option_of(other, name), **one.metadata["how"])
            one.metadata = MappingProxyType({**one.metadata, "option": declared})
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


def option_of(kind: Any, name: str) -> Option:
    """The declaration of a field."""
    return kind.__dataclass_fields__[name].metadata["option"]


# What type checkers of Python users accept follows from the parameter of a converter.


def text(value: str | Path) -> str:
    """The name of a model or file as text."""
    given: Any = value
    if not isinstance(given, str | Path):
        raise TypeError("text")
    return str.__str__(given) if isinstance(given, str) else str(given)  # the value of an enum


def text_or_number(value: str | int | None) -> str:
    """A word or a whole number as text."""
    try:
        return value if isinstance(value, str) else str(number_of("", value, int))
    except SpecError:
        raise TypeError(NUMBERS[int]) from None


def numbers(value: str | float | Iterable[float] | None) -> str | None:
    """A number, several, or a range as text; None if there is none."""
    if value is None or isinstance(value, str):
        return value
    try:
        several = value if isinstance(value, Iterable) else [value]
        return ",".join(f"{number_of('', one, float):.17g}" for one in several)
    except SpecError:
        raise TypeError("a number, several, or a range as text") from None


def optional_path(value: str | Path | None) -> Path | None:
    """The path; None if there is none."""
    return None if value is None else path_of(value)


def choice(kind: type[E]) -> Callable[[E | str], E]:
    """Converts to a member of an enum."""

    def member(value: E | str) -> E:
        if value not in set(kind):
            raise ValueError(f"'{value}' is not one of {', '.join(kind)}.")
        return kind(value)

    return member


def optional_choice(kind: type[E]) -> Callable[[E | str | None], E | None]:
    """Converts to a member of an enum; None, which `request_of` keeps, is accepted, too."""
    return cast("Callable[[E | str | None], E | None]", choice(kind))


def texts(value: str | Path | Iterable[str | Path]) -> list[str]:
    """One path or several, as the caller named them."""
    given = [value] if isinstance(value, str | Path) else list(value)
    return [one if isinstance(one, str) else str(path_of(one)) for one in given]


def request_of(kind: Callable[..., R], values: Mapping[str, Any]) -> R:
    """The request with these option values; SpecError for a value of the wrong type.

    `values` may hold other names, which are ignored. Enum options accept their values as strings.
    """
    hints = hints_of(kind)
    return kind(
        **{
            one.name: _typed(one, values[one.name], hints[one.name])
            for one in fields(cast("Any", kind))
            if one.name in values
        }
    )


def requests_of(work: Callable[..., Any]) -> dict[str, Any]:
    """The requests of a command by its parameters; a parameter that is an option makes one of its own."""
    hints = get_type_hints(work)
    return {
        name: hints[name]
        if one.default is inspect.Parameter.empty
        else request(type(name, (), {"__annotations__": {name: hints[name]}, name: one.default}))
        for name, one in inspect.signature(work).parameters.items()
    }


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """The types of the fields."""
    return get_type_hints(kind, include_extras=False)


def _typed(one: "Field[Any]", value: Any, hint: Any) -> Any:
    if value is None and NoneType in get_args(hint):
        return None
    # A converter raises TypeError to say what the value must be, ValueError to say why not.
    kind, convert = kinds_of(hint)[0], one.metadata.get("converter")
    if convert is None and kind in NUMBERS:
        convert = partial(number_of, one.name, kind=kind)
    elif convert is None:
        known: dict[Any, Callable[[Any], Any]] = {Path: path_of, str: text}
        convert = choice(kind) if _is_a(kind, StrEnum) else known.get(kind, lambda given: given)
    try:
        converted = convert(value)
    except TypeError as error:
        raise SpecError(f"{one.name}: {value!r:.80} must be {error}.") from None
    except ValueError as error:
        raise SpecError(f"{one.name}: {error}") from None
    least, most = one.metadata["option"].least, one.metadata["option"].most
    if least is not None and converted < least:
        raise SpecError(f"{one.name}={converted} is too small. Use {least} or more.")
    if most is not None and converted > most:
        raise SpecError(f"{one.name}={converted} is too large. Use {most} or less.")
    return converted


def _is_a(kind: Any, *kinds: type) -> bool:
    return inspect.isclass(kind) and issubclass(kind, kinds)


def changed_options(options: Any) -> dict[str, Any]:
    """The conditions of a request that differ from their defaults, in the order of the command line."""
    return {
        one.name: value
        for one in fields(options)
        if one.name not in NO_CONDITIONS and (value := getattr(options, one.name)) != one.default
    }


def option_words(options: Mapping[str, Any], argument: str = "model") -> Iterable[str]:
    """The options as command-line words; `argument` is the positional one."""
    for name, value in options.items():
        flag = flag_of(name)
        if value is None or value is False:
            continue
        if name == argument:
            yield str(value)
        elif value is True:
            yield flag
        elif str(value).startswith("-"):
            yield f"{flag}={value}"  # in one word, as the value looks like an option
        else:
            yield from (flag, str(value))


def refuse(*rules: tuple[object, str], kind: type[Exception] = SpecError) -> None:
    """Raises an error with the message of the first rule that holds."""
    for is_wrong, message in rules:
        if is_wrong:
            raise kind(message)


def flag_of(name: str) -> str:
    """The option of the command line with this name."""
    return f"--{name.replace('_', '-')}"


def takes(name: str, kind: Callable[P, R], work: Callable[[R], T]) -> Callable[P, T]:
    """The public function for `work`, whose parameters are the options of the request."""
    returns = inspect.signature(work).return_annotation
    kinds = (kind, FromCommand) if "server" in hints_of(kind) else (kind,)
    parameters = [one for each in kinds for one in parameters_of(each)]
    signature = inspect.Signature(parameters, return_annotation=returns)

    @wraps(work)
    def called(bound: inspect.BoundArguments) -> T:
        return work(request_of(kind, bound.arguments))

    return cast("Callable[P, T]", documented(called, signature, *kinds, name=name))


def documented(
    work: Callable[[inspect.BoundArguments], T],
    signature: inspect.Signature,
    *kinds: Any,
    name: str,
) -> Callable[..., T]:
    """The public function with this signature, and with the options of the requests in its docstring."""

    @wraps(work)
    def called(*args: Any, **options: Any) -> T:
        if options.get("from_command") is not None:
            given = signature.bind_partial(*args, **options).arguments
            launched, not_simulated = launched_options(given, signature.parameters)
            if not_simulated:
                text = f"from_command: not simulated: {', '.join(not_simulated)}"
                warnings.warn(text, stacklevel=3)
            for option, value in launched.items():
                number = hints[option] if hints[option] in NUMBERS else str
                options[option] = number(value)
        try:
            bound = signature.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        return work(bound)

    hints = {one: kinds_of(hint)[0] for kind in kinds for one, hint in hints_of(kind).items()}
    names = {word: one for kind in kinds for word, one in other_names(kind).items()}
    helped = {one.name: help_of(kind, one.name) for kind in kinds for one in fields(kind)}
    lines = [f"    {one}: {helped[one]}" for one in signature.parameters if one in helped]
    head, mark, tail = inspect.cleandoc(work.__doc__ or "").partition("Returns:")
    called.__doc__ = "\n".join([head, "Args:", *lines, "", mark + tail])
    called.__name__ = called.__qualname__ = name
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    return public(called, names)


def launched_options(
    given: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What --from-command says of the options that are not given, as text, and its flags that are not simulated."""
    reader = import_module("meshscope.serving.launched")  # --help needs no YAML
    launched = reader.read_launch(given["from_command"], given.get("model"))
    return reader.taken(launched, set(names) - given.keys()), launched.not_simulated


def parameters_of(kind: Any) -> list[inspect.Parameter]:
    """The options as parameters of a Python function."""
    hints = hints_of(kind)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY
            if one.kw_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
            annotation=_accepted(hints[one.name], one.metadata.get("converter")),
        )
        for one in declared_fields(kind)
    ]


def _accepted(hint: Any, converter: Any) -> Any:
    if converter is texts:
        return str | Path | Iterable[str | Path]
    if converter is numbers:
        return hint | float | Iterable[float]
    if converter in {text, text_or_number}:
        return hint | (Path if converter is text else int)
    return hint | str if _is_a(kinds_of(hint)[0], StrEnum, Path) else hint


def declared_fields(*kinds: Any) -> "list[Field[Any]]":
    """The fields of requests in the order of the help."""
    every = (one for kind in kinds for one in fields(kind))
    return sorted(every, key=lambda one: one.metadata["option"].is_last)


def other_names(kind: Any) -> dict[str, str]:
    """The names of options by other words for them on the command line, for messages to Python users."""
    return {
        flag.removeprefix("--").replace("-", "_"): one.name
        for one in fields(kind)
        for flag in one.metadata["option"].flags
    }


def help_of(kind: Any, name: str) -> str:
    """The help of an option for Python users."""
    kinds = {one: kinds_of(hint) for one, hint in hints_of(kind).items()}
    return with_keywords(option_of(kind, name).help, kinds, other_names(kind), "`{}`")


@request
class FullOutput:
    """How much of its text a command prints."""

    full: bool = option("All that is known, not the answer alone.", default=False, is_last=True)


@request
class JsonOutput:
    """Whether a command prints one document."""

    as_json: bool = option(
        "Print one JSON document on stdout.", default=False, flags=("--json",), is_last=True
    )


@request
class RunOutput:
    """How a command prints its run."""

    rows: bool = option("Also the tables of collectives.", default=False, is_last=True)


@request
class FromCommand:
    """Where a command that simulates a server gets its options from."""

    from_command: str | None = option(
        "TEXT|FILE: Launch command of vLLM or SGLang-JAX, or its Kubernetes manifest, which gives model, plan, limits "
        "and load; other options replace them.",
        default=None,
        is_last=True,
    )
