"""How many planted faults lint reports: small programs of every family over many plans, each with one fault at a time.

Run: python benchmarks/lint_mutants.py FOLDER [SECONDS], again to go on, then with 0 seconds for the table alone.
FOLDER keeps the text of each program and fault, so that the table needs no compiler. XLA's collectives on CPU may wait
for each other for ever in a program with a fault, which ends the process; its program is left out from then on.
"""

import csv
import gzip
import json
import os
import random
import sys
import time
from itertools import product
from pathlib import Path

from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase
from meshscope.plans.mesh import Mesh
from meshscope.plans.program import Loop, Partitioner

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("programs", "lint", "golden", "shared")]
from made import UNOPTIMIZED  # noqa: E402

os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}  # threads for all devices at once
os.environ["XLA_FLAGS"] = (
    f"{UNOPTIMIZED} --xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=20"
)
from planted import Case, golden, outcomes, reported  # noqa: E402  after the flags

TABLE = ROOT / "docs/evidence/lint_mutants.csv"
PLANS = (
    *("tp=8", "tp=8,sp", "dp=2,tp=4", "dp=2,tp=4,sp", "fsdp=2,tp=4", "fsdp=4,tp=2,sp", "fsdp=8"),
    *("fsdp=2,cp=2,tp=2", "dp=2,cp=2,tp=2", "cp=4,tp=2", "cp=8", "tp=8,ep=8", "tp=8,ep=8,sp"),
    *("dp=2,tp=4,ep=8,sp", "dp=2,tp=4,ep=8", "dp=4,tp=2,ep=4", "dp=8,ep=8", "fsdp=2,tp=4,ep=2"),
    *("fsdp=8,ep=8", "cp=2,tp=4,ep=4", "dp=2,cp=2,tp=2,ep=4"),
)


def every_case() -> list[Case]:
    """All programs, in an order that is the same each time."""
    phases, loops = (Phase.PREFILL, Phase.DECODE), (Loop.UNROLL, Loop.SCAN)
    every = [Case(*one) for one in product(golden.CONFIGS, PLANS, phases, Partitioner, loops)]
    random.Random(0).shuffle(every)
    return every


def plant(folder: Path, seconds: float) -> None:
    """Compiles and runs programs that have no file yet, until the time is over."""
    end = time.monotonic() + seconds
    for case in every_case():
        path = folder / f"{'-'.join(case)}.json.gz"
        if time.monotonic() > end:
            return
        if path.exists():
            continue
        path.touch()  # of a program that ends the process, or of a plan that is refused
        try:
            of_case = [
                {
                    "fault": mutant and mutant[:3],
                    "changes": changes,
                    "text": text,
                    "mesh": mesh.axes,
                }
                for mutant, changes, text, mesh in outcomes(case)
            ]
        except MeshscopeError:
            continue
        with gzip.open(path, "wt", compresslevel=1) as file:
            json.dump({"case": case, "programs": of_case}, file)
        print(*case, len(of_case), flush=True)


def tabulate(folder: Path) -> None:
    """Writes what lint says of each fault; a program without a fault must have no finding."""
    rows: list[tuple[object, ...]] = []
    for path in sorted(folder.glob("*.json.gz")):
        if not path.stat().st_size:
            continue
        with gzip.open(path, "rt") as file:
            stored = json.load(file)
        for one in stored["programs"]:
            mesh = Mesh(axes=tuple(map(tuple, one["mesh"])))
            said = reported(one["text"], mesh)
            if one["fault"] is not None:
                rows.append((*stored["case"], *one["fault"], one["changes"], said))
            elif said != "no":
                print("ALARM", path.name, said)
    fields = (*Case._fields, "collective", "name", "change", "changes_result", "reported")
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([fields, *sorted(rows)])
    changing = [row for row in rows if row[-2]]
    n_found = sum(row[-1] != "no" for row in changing)
    print(f"{n_found} of {len(changing)} faults that change the result are reported")


def main() -> None:
    """Goes on for the seconds that are given, by default ten minutes, then writes the table."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
    folder.mkdir(parents=True, exist_ok=True)
    plant(folder, seconds)
    tabulate(folder)


if __name__ == "__main__":
    main()
