"""The closed form against published steps, as a table for docs/time.md."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from published_steps import Half, PublishedStep, closed_time, published_steps

from meshscope.events.enums import Phase

TARGET_ERROR = 0.15


def summary() -> None:
    """Prints the distribution of |predicted / published - 1|, by half and phase."""
    print_row = sys.stdout.write
    print_row("| half | phase | steps | within 15 % | median | worst |\n")
    print_row("| --- | --- | --- | --- | --- | --- |\n")
    steps = published_steps()
    for half in (Half.FITTED, Half.HOLDOUT):
        for phase in Phase:
            errors = _errors([s for s in steps if s.half is half and s.phase is phase])
            n_within = sum(error <= TARGET_ERROR for error in errors)
            figures = f"{n_within} | {median(errors):.1%} | {max(errors):.0%}"
            print_row(f"| {half} | {phase} | {len(errors)} | {figures} |\n")


def _errors(steps: Sequence[PublishedStep]) -> list[float]:
    return [abs(closed_time(step).value_s / step.device_s - 1) for step in steps]
