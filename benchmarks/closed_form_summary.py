"""The error distribution in benchmarks/closed_form.csv, as a table for docs/time.md."""

import csv
import sys
from pathlib import Path
from statistics import median

CSV = Path(__file__).with_name("closed_form.csv")
TARGET_ERROR = 0.15


def summary() -> None:
    """Prints the distribution of |closed / compiled - 1|, by half and phase."""
    with CSV.open() as file:
        rows = list(csv.DictReader(file))
    print_row = sys.stdout.write
    print_row("| half | phase | steps | within 15 % | median | worst |\n")
    print_row("| --- | --- | --- | --- | --- | --- |\n")
    for half in ("fitted", "holdout"):
        for phase in ("prefill", "decode"):
            steps = [r for r in rows if (r["half"], r["phase"]) == (half, phase)]
            errors = [abs(float(row["ratio"]) - 1) for row in steps]
            n_within = sum(error <= TARGET_ERROR for error in errors)
            figures = f"{n_within} | {median(errors):.1%} | {max(errors):.0%}"
            print_row(f"| {half} | {phase} | {len(errors)} | {figures} |\n")
    print_row(f"\n{len({row['experiment'] for row in rows})} of the grid's 200 experiments.\n")
