"""Progress lines between a worker process and its parent, and the path of its error report."""

from pathlib import Path

PREFIX = "meshscope: "  # of the worker's lines for its parent; libraries write others

SEPARATOR = "\t"  # before the seconds left, if they are known


def format_progress(step: str, left_s: float | None = None) -> str:
    """The line that reports a step, and the seconds that the whole work still needs."""
    return f"{PREFIX}{step}" + ("" if left_s is None else f"{SEPARATOR}{left_s:.3f}")


def parse_progress(line: str) -> tuple[str, float | None] | None:
    """The step and the seconds left of a worker's line; None for a line that a library wrote."""
    if not line.startswith(PREFIX):
        return None
    step, _, left = line.removeprefix(PREFIX).partition(SEPARATOR)
    return step, float(left) if left else None


def error_report(request: Path, name: str = "work") -> Path:
    """The file in which a worker reports its error: beside its request, apart from its output."""
    return request.with_name(f"{name}.error.json")
