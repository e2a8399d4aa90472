"""Compiles a dense model whose weights are gathered layer by layer, and writes docs/evidence/fsdp/*.csv.

python experiments/fsdp.py            compile what is missing, then write the files
python experiments/fsdp.py --read     write the files from stored cases
"""

import sys
from pathlib import Path

from cases import ROOT, cases_of
from results import run_study


def main() -> None:
    """Runs the experiment file."""
    is_reading = "--read" in sys.argv[1:]
    cases = cases_of(Path(__file__).with_name("fsdp.yaml"))
    run_study(
        [c for c in cases if not is_reading or c.is_compiled], ROOT / "docs" / "evidence" / "fsdp"
    )


if __name__ == "__main__":
    main()
