"""Errors a user can cause. Each message states the value, the rule and the remedy."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import FrozenInstanceError, is_dataclass
from enum import EnumType
from functools import wraps
from operator import index
from types import NoneType, UnionType
from typing import Any, ParamSpec, Self, TypeVar, get_args

P = ParamSpec("P")
T = TypeVar("T")

IS_COMMAND_LINE = ContextVar("IS_COMMAND_LINE", default=False)  # whether messages name options
# A whole command, which stays, or an option with the word that follows it.
_OPTION = re.compile(
    r"meshscope [a-z-]+(?: [^\s,;'`]*[^\s,;'`.:])*|--([a-z][a-z0-9-]*)(?![\w-])(?:[ =]('[^']*'|[^\s;'`]*[^\s;'`.,:)]))?"
)
_PLACEHOLDER = re.compile(r"[A-Z_:]+|NAME=SIZE,\.\.")
_WORDS = frozenset(
    {"auto", "off", "on", "none", "mtp", "eagle", "profile", "dcn", "ici", "any", "all"}
)
NUMBERS = {int: "a whole number", float: "a finite number", bool: "true or false"}
_NUMBER_KINDS = {(kind,) for kind in NUMBERS}

MIN_COMMON_START = 5  # characters that two names share at their start to count as near


class MeshscopeError(Exception):
    """An input or environment error with a single message; the command line exits with status 1."""


class SpecError(MeshscopeError):
    """An unknown or inconsistent model, chip, topology or workload."""


class PlanError(MeshscopeError):
    """A parallel plan that does not fit the model, the batch or the slice."""


class ParseError(MeshscopeError):
    """A malformed file; the message starts with file and line."""


class CompileError(MeshscopeError):
    """The compiler refused the program, crashed, or ran out of memory."""


class RunError(MeshscopeError):
    """A run folder that is missing, incomplete, of another schema, or already exists."""


class TraceError(MeshscopeError):
    """A profile that is damaged, truncated, too large, or of a different program than expected."""


class RunFailedError(MeshscopeError):
    """The program failed on live devices: the framework refused, crashed, or ran out of memory."""


class UsageError(Exception):
    """Options that make no sense together; the command line prints its usage and exits with status 2."""


class MissingToolError(MeshscopeError):
    """A required library or platform is missing; the message says what to install."""

    @classmethod
    def of_extra(cls, needed: str, extra: str, advice: str = "") -> Self:
        """The error that names the extra; pip adds it to an installed meshscope, from a wheel as from a clone."""
        return cls(f"{needed}. Install the extra: pip install 'meshscope[{extra}]'{advice}.")


def public(function: Callable[P, T], names: Mapping[str, str] | None = None) -> Callable[P, T]:
    """A function for Python users; `names` maps command-line words to its parameters.

    NumPy numbers become Python numbers, messages say plan= and force=True, and an unusable path is a message.
    """
    hints = {name: kinds_of(hint) for name, hint in function.__annotations__.items()}
    numbers = {name: kinds[0] for name, kinds in hints.items() if kinds in _NUMBER_KINDS}

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            for name in numbers.keys() & kwargs.keys():
                if kwargs[name] is not None:
                    kwargs[name] = number_of(name, kwargs[name], numbers[name])
            return function(*args, **kwargs)
        except MeshscopeError as error:
            if not IS_COMMAND_LINE.get():
                error.args = (with_keywords(str(error), hints, names or {}),)
            raise
        except OSError as error:
            if error.filename is None:
                raise
            raise RunError(
                f"'{error.filename}' cannot be used: {error.strerror}. Give another path."
            ) from error

    return called


def read_only(kind: type[T]) -> type[T]:
    """A class of results that names its fields when an unknown one is read.

    A frozen one answers any assignment and deletion with FrozenInstanceError: the dataclass raises a TypeError about
    `super` for a name that is no field (python/cpython#90055).
    """

    def refuse(_self: T, name: str, _value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field '{name}'")

    def keep(_self: T, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field '{name}'")

    def unknown(self: T, name: str) -> object:
        if hasattr(kind, name):  # a property raised it
            return object.__getattribute__(self, name)
        known = ", ".join(one for one in dir(kind) if not one.startswith("_"))
        raise AttributeError(
            f"'{kind.__name__}' has no field '{name}'. Known: {known}.", name=name, obj=self
        )

    if is_dataclass(kind):
        kind.__setattr__ = refuse  # type: ignore[method-assign]
        kind.__delattr__ = keep  # type: ignore[method-assign]
    kind.__getattr__ = unknown  # type: ignore[attr-defined]
    return kind


def number_of(name: str, value: Any, kind: Any) -> Any:
    """The value as a bool, int or float, also of NumPy, polars or JAX; SpecError for another kind of value."""
    is_bool = type(value).__name__ in {"bool", "bool_"}
    if is_bool == (kind is bool) and not isinstance(value, str):
        with suppress(TypeError, ValueError, OverflowError):
            number = index(value) if kind is int else kind(value)
            if math.isfinite(number):
                return number
    is_option = IS_COMMAND_LINE.get() and name
    given = f"--{name.replace('_', '-')} {value}" if is_option else f"{name}: {value!r:.80}"
    raise SpecError(f"{given} must be {NUMBERS[kind]}.")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The kinds of values of an argument."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


def with_keywords(
    message: str, hints: Mapping[str, tuple[Any, ...]], names: Mapping[str, str], bare: str = "{}="
) -> str:
    """`--plan tp=8` as `plan="tp=8"`, `--force` as `force=True`, `--out` as `out=` and `--slo:` as `slo:`.

    A whole command stays as it is.
    """

    def keyword(match: re.Match[str]) -> str:
        name, word = (match[1] or "").replace("-", "_"), match[2] or ""
        name = names.get(name, name)
        if name not in {*hints, "force", "out"}:
            return match[0]
        kinds = hints.get(name, (bool,) if name == "force" else (str,))
        shown = "path" if name == "out" and name not in hints and "path" in hints else name
        after, form = f" {word}" if word else "", bare
        if match.string.startswith(":", match.end()):
            form = bare.removesuffix("=")
        if kinds == (bool,):
            return f"{shown}=True{after}"
        known = {one for kind in kinds if isinstance(kind, EnumType) for one in kind} | _WORDS
        if _PLACEHOLDER.fullmatch(word):
            return form.format(shown)
        if word in known or re.search(r"[\d=/']", word):
            is_number = kinds[0] in NUMBERS
            return f"{shown}={word}" if is_number else f'{shown}="{word.strip(chr(39))}"'
        return f"{form.format(shown)}{after}"

    return _OPTION.sub(keyword, message)


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A sentence that suggests known names.

    Names that continue `name` come first, then the longest common prefixes (at least five characters and half of
    `name`), then similar names. If there are none, it is `otherwise`, or else lists all known names.
    """
    names = sorted(known)
    lowered = {n.lower(): n for n in names}
    text = name.lower()
    short = text.rsplit("/", 1)[-1]
    by_prefix = [n for n in lowered if short and n.rsplit("/", 1)[-1].startswith(short)]
    starts = [short[:n] for n in range(len(short) + 1)]
    shared = {n: sum(map(n.rsplit("/", 1)[-1].startswith, starts)) - 1 for n in lowered}
    least = max(MIN_COMMON_START, -(-len(short) // 2))
    by_start = [n for n in lowered if shared[n] >= least]
    by_start.sort(key=lambda n: (-shared[n], len(n)))
    similar = difflib.get_close_matches(text, lowered, n=3, cutoff=0.5)
    close = list(dict.fromkeys([*by_prefix, *by_start, *similar]))[:3]
    if close:
        return did_you_mean(lowered[name] for name in close)
    return "Known: " + ", ".join(names) + "." if otherwise is None else otherwise


def did_you_mean(names: Iterable[str]) -> str:
    """A question that names these."""
    return "Did you mean " + " or ".join(f"'{name}'" for name in names) + "?"
