"""Runs CCL-Bench's own tools over folders of `meshscope export --to ccl-bench`, and compares what they print.

python tools/ccl_bench.py CHECKOUT FOLDER ... with a clone of CCL-Bench and a Python that has pandas, numpy, duckdb and PyYAML.
Exit status 1 if a metric differs from `ccl_bench.value` of the folder's metrics.json by more than the tools' rounding.
"""

import json
import subprocess
import sys
from math import isclose, isnan
from pathlib import Path

ROUNDED = ("mfu", "memory_transfer_overhead")  # four digits after the point


def printed(checkout: Path, folder: Path, metric: str) -> float | None:
    """The value that the tool prints last; None if it prints none, -1 or nan."""
    tool = [sys.executable, str(checkout / "tools" / "main.py"), "--trace", str(folder)]
    ended = subprocess.run([*tool, "--metric", metric], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in ended.stderr:
        raise SystemExit(
            f"{metric}: {ended.stderr.splitlines()[-1]}. Its tools need it; install it."
        )
    try:
        value = float(ended.stdout.split()[-1])
    except (IndexError, ValueError):
        return None
    return None if isnan(value) or value == -1 else value


def main() -> int:
    """Prints each metric: what the tool prints, what the export says that it prints, and meshscope's value."""
    checkout, *folders = map(Path, sys.argv[1:])
    n_wrong = 0
    for folder in folders:
        entries = json.loads((folder / "meshscope" / "metrics.json").read_text())["metrics"]
        print(f"{folder}\n{'':7}{'metric':40} {'tool':>24} {'said':>24} {'ours':>24}")
        for name, entry in entries.items():
            said, value = entry["ccl_bench"]["value"], printed(checkout, folder, name)
            is_same = value in {None, 0.0} if said is None else value is not None
            if said is not None and value is not None:
                least = 5.1e-5 if name in ROUNDED else 1e-9
                is_same = isclose(said, value, rel_tol=1e-9, abs_tol=least)
            n_wrong += not is_same
            ours = entry["ours"]["value"]
            print(
                f"{'' if is_same else 'DIFFERS':7}{name:40} {value!s:>24} {said!s:>24} {ours!s:>24}"
            )
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
