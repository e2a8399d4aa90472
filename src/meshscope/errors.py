"""Errors a user can cause. Each message states the value, the rule and the remedy."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import FrozenInstanceError
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

IS_COMMAND_LINE = ContextVar("IS_COMMAND_LINE", default=False)  # whether messages name options
_OPTION = re.compile(r"--(force|out)(?: (?:DIR|FILE))?(?![\w-])")

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


class MissingToolError(MeshscopeError):
    """A required library or platform is missing; the message says what to install."""


def public(function: Callable[P, T]) -> Callable[P, T]:
    """A function for Python users: messages say force=True and out=, and a path that cannot be used is a message."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MeshscopeError as error:
            if not IS_COMMAND_LINE.get():
                error.args = (_with_keywords(str(error)),)
            raise
        except OSError as error:
            if error.filename is None:
                raise
            raise RunError(
                f"'{error.filename}' cannot be used: {error.strerror}. Give another path."
            ) from error

    return called


def read_only(kind: type[T]) -> type[T]:
    """A frozen class with slots whose properties, too, answer an assignment with FrozenInstanceError.

    The dataclass raises a TypeError about `super` for a name that is no field (python/cpython#90055).
    """

    def refuse(_self: T, name: str, _value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field '{name}'")

    kind.__setattr__ = refuse  # type: ignore[method-assign]
    return kind


def _with_keywords(message: str) -> str:
    """`--force` as `force=True` and `--out` as `out=`, unless the message has a whole command."""
    if "meshscope " in message:
        return message
    return _OPTION.sub(lambda match: "force=True" if match[1] == "force" else "out=", message)


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A sentence that suggests known names.

    Those that continue `name` come first, then those with the longest common start, then similar ones.

    If there are none, it is `otherwise`, or else lists all known names.
    """
    names = sorted(known)
    lowered = {n.lower(): n for n in names}
    text = name.lower()
    short = text.rsplit("/", 1)[-1]
    by_prefix = [n for n in lowered if short and n.rsplit("/", 1)[-1].startswith(short)]
    similar = difflib.get_close_matches(text, lowered, n=3, cutoff=0.5)
    close = list(dict.fromkeys([*by_prefix, *_by_common_start(short, lowered), *similar]))[:3]
    if close:
        return did_you_mean(lowered[name] for name in close)
    return "Known: " + ", ".join(names) + "." if otherwise is None else otherwise


def did_you_mean(names: Iterable[str]) -> str:
    """A question that names these."""
    return "Did you mean " + " or ".join(f"'{name}'" for name in names) + "?"


def _by_common_start(name: str, known: Iterable[str]) -> list[str]:
    """The names that share at least five characters and half of `name` with its start, the most first."""
    shared = {one: _n_common(name, one.rsplit("/", 1)[-1]) for one in known}
    least = max(MIN_COMMON_START, -(-len(name) // 2))
    return sorted(
        (one for one in shared if shared[one] >= least), key=lambda x: (-shared[x], len(x))
    )


def _n_common(one: str, other: str) -> int:
    """Characters at the start that both have."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
