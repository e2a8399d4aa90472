"""What passes between a child process and its parent."""

from pathlib import Path

TOLD = "meshscope: "  # begins the child's lines for its parent; libraries write others

LEFT = "\t"  # stands before the seconds that are left, where they are known


def format_progress(words: str, left_s: float | None = None) -> str:
    """The line with which the child tells what is being done, and the seconds that all of it has left."""
    return f"{TOLD}{words}" + ("" if left_s is None else f"{LEFT}{left_s:.3f}")


def parse_progress(line: str) -> tuple[str, float | None] | None:
    """What a line of the child tells: words and the seconds left; None where a library wrote it."""
    if not line.startswith(TOLD):
        return None
    words, _, left = line.removeprefix(TOLD).partition(LEFT)
    return words, float(left) if left else None


def error_report(request: Path, name: str = "work") -> Path:
    """Where a child says why there is no report: beside what was asked of it, away from what it writes."""
    return request.with_name(f"{name}.error.json")
