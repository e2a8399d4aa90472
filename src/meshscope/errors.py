"""The faults that a user can cause: each carries one message that says what, by which rule, and the remedy."""

import difflib
from collections.abc import Iterable


class MeshscopeError(Exception):
    """A fault of the input or of the machine, told in one message; the command line exits 1 on it."""


class SpecError(MeshscopeError):
    """A model, chip, topology or workload that is unknown or contradicts itself."""


class PlanError(MeshscopeError):
    """A parallel plan that does not divide the model, the batch or the slice."""


class ParseError(MeshscopeError):
    """A file that does not hold what its reader expects; the message starts with file and line."""


class CompileError(MeshscopeError):
    """The compiler refused the program, crashed, or ran out of memory."""


class RunError(MeshscopeError):
    """A run folder that is missing, half-written, of another schema, or in the way."""


class RunFailedError(MeshscopeError):
    """Live devices could not run the program: the framework refused, crashed, or ran out of memory."""


class MissingToolError(MeshscopeError):
    """A library or a platform that the command needs is not here; the message says what to install."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the known names nearest to `name`, or all of them when none is near."""
    names = sorted(known)
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(f"'{lowered[c]}'" for c in close) + "?"
    return "Known: " + ", ".join(names) + "."
