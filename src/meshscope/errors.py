"""Errors a user can cause. Each message states the value, the rule and the remedy."""

import difflib
from collections.abc import Iterable


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


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A sentence that suggests known names: those that continue `name`, then similar ones.

    If there are none, it is `otherwise`, or else lists all known names.
    """
    names = sorted(known)
    lowered = {n.lower(): n for n in names}
    text = name.lower()
    short = text.rsplit("/", 1)[-1]
    by_prefix = [n for n in lowered if short and n.rsplit("/", 1)[-1].startswith(short)]
    similar = difflib.get_close_matches(text, lowered, n=3, cutoff=0.5)
    close = list(dict.fromkeys([*by_prefix, *similar]))[:3]
    if close:
        return "Did you mean " + " or ".join(f"'{lowered[c]}'" for c in close) + "?"
    return otherwise or "Known: " + ", ".join(names) + "."
