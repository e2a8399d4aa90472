"""Compiles one layer of experts in several variants and writes docs/evidence/moe/*.csv.

python experiments/moe.py            compile what is missing, then write
python experiments/moe.py --read     write from what is compiled already
"""

import csv
import json
import sys
from pathlib import Path

from cases import ROOT, cases_of
from results import run_study
from ring import compile_ways
from schedule import schedule_of

from meshscope.readers.hlo.parse import read_hlo

FOLDER = ROOT / "docs" / "evidence" / "moe"
FILES = ("moe.yaml", "overlap.yaml")


def main() -> None:
    """Runs both experiment files and the ring."""
    is_reading = "--read" in sys.argv[1:]
    cases = [case for name in FILES for case in cases_of(Path(__file__).with_name(name))]
    run_study([c for c in cases if not is_reading or c.is_compiled], FOLDER)
    _write_rings(FOLDER / "rings.csv")


def _write_rings(path: Path) -> None:
    """One row per variant: its cycles, and those between start and done of a collective."""
    rows: list[dict[str, object]] = []
    for way, hlo in compile_ways():
        schedule = schedule_of(read_hlo(hlo))
        rows.append(
            {
                "way": way,
                "estimated_cycles": schedule.cycles,
                "covered_cycles": schedule.covered_cycles,
                "n_synchronous": sum(w.count for w in schedule.windows if not w.is_async),
                "n_asynchronous": sum(w.count for w in schedule.windows if w.is_async),
                "n_hiding": sum(w.count for w in schedule.windows if w.hidden_cycles),
                "unestimated": " ".join(f"{n}x{o}" for o, n in schedule.unestimated.items()),
                "libtpu": json.loads(hlo.with_suffix(".json").read_text())["libtpu"],
            }
        )
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
