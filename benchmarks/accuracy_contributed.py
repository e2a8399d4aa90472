"""The table of contributed runs in docs/evidence/accuracy.md: steps that users measured on TPUs beside the prediction."""

import sys
from collections.abc import Iterator
from pathlib import Path

from meshscope.analysis.samples import (
    FOLDER,
    ContributedRun,
    ContributedStep,
    read_contributed,
)
from meshscope.units import format_seconds

HOME = Path(__file__).parents[1] / FOLDER
HEAD = ("model", "slice", "plan", "workload", "step", "measured", "predicted then", "range")


def contributed(folder: Path = HOME) -> None:
    """Prints a row for each step of each contributed run, or a sentence if there is none."""
    lines = [
        line for path in sorted(folder.glob("*.json")) for line in _lines(read_contributed(path))
    ]
    if not lines:
        sys.stdout.write("No run was contributed yet.\n")
        return
    for cells in (HEAD, ("---",) * len(HEAD), *lines):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


def _lines(run: ContributedRun) -> Iterator[tuple[str, ...]]:
    workload = f"batch {run.batch}, prompt {run.prompt}, output {run.output}"
    about = ((run.model or "unknown").rpartition("/")[2], run.topology, run.plan, workload)
    for step in run.steps:
        yield (*about, step.phase.value, format_seconds(step.seconds), *_predicted(step))


def _predicted(step: ContributedStep) -> tuple[str, str]:
    if step.predicted_s is None or step.predicted_low_s is None or step.predicted_high_s is None:
        return ("", "")
    low, high = format_seconds(step.predicted_low_s), format_seconds(step.predicted_high_s)
    return format_seconds(step.predicted_s), f"{low} to {high}"
