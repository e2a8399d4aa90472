"""What passes between a child process and its parent."""

from pathlib import Path

TOLD = "meshscope: "  # begins the child's lines for its parent; libraries write others


def error_report(report: Path) -> Path:
    """Where a child says why there is no report."""
    return report.with_suffix(".error.json")
