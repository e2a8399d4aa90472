"""What a prefill of DeepSeek-V3.1 computes, part by part, and what share of the peak that is; for docs/evidence/experts.md.

    python benchmarks/prefill_compute.py FOLDER

compiles all 61 layers for 64 TPU v6e under both plans (some six minutes each on two cores), or reads the runs
that are in the folder, and stores the simulated times in prefill_compute.csv. Communication is shown apart.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import meshscope
from meshscope.hardware.topology import parse_topology
from meshscope.units import format_seconds

CSV = Path(__file__).with_suffix(".csv")
MODEL, TOPOLOGY = "deepseek-ai/DeepSeek-V3.1-Base", "v6e:8x8"
PLANS = ("dp=8,tp=8,ep=64", "dp=8,tp=8,ep=64,sp")
BETWEEN = "between parts"


class PartTime(NamedTuple):
    """A part of the prefill on one device; `peak_s` are its FLOPs at the bf16 peak."""

    plan: str
    part: str
    compute_s: float
    exposed_s: float
    peak_s: float


def measured(folder: Path) -> Iterator[PartTime]:
    """The parts under each plan, of runs that are compiled where they are missing."""
    peak = parse_topology(TOPOLOGY).chip.bf16_flops_per_s
    assert peak is not None
    for plan in PLANS:
        path = folder / plan.replace("=", "").replace(",", "-")
        run = (
            meshscope.open(path)
            if path.exists()
            else meshscope.compile(
                MODEL,
                topology=TOPOLOGY,
                plan=plan,
                batch=64,
                prompt=1024,
                output=8,
                prefill_chunk=8192,
            ).save(path)
        )
        for part in run.as_dict()["time"]["steps"]["prefill"]["parts"]:
            yield PartTime(
                plan,
                part["part"] or BETWEEN,
                part["compute_s"],
                part["exposed_s"],
                part["flops"] / peak,
            )


def store(rows: Iterator[PartTime]) -> None:
    """Writes the CSV."""
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PartTime._fields)
        writer.writerows((*row[:2], *(f"{s:.6g}" for s in row[2:])) for row in rows)


def stored() -> list[PartTime]:
    """The rows of the CSV."""
    with CSV.open() as file:
        return [
            PartTime(row["plan"], row["part"], *(float(row[f]) for f in PartTime._fields[2:]))
            for row in csv.DictReader(file)
        ]


def peak_frac(plan: str) -> float:
    """The share of the bf16 peak that the compute of the prefill reaches."""
    rows = [row for row in stored() if row.plan == plan]
    return sum(row.peak_s for row in rows) / sum(row.compute_s for row in rows)


def table() -> None:
    """Prints the parts of at least a millisecond under both plans."""
    rows = stored()
    print(
        "| part | FLOPs at the peak | " + " | ".join(f"compute, `{p}` | exposed" for p in PLANS),
        "|",
    )
    print("| --- | --- |" + " --- | --- |" * len(PLANS))
    for part in dict.fromkeys(row.part for row in rows):
        of_part = {row.plan: row for row in rows if row.part == part}
        if max(row.compute_s + row.exposed_s for row in of_part.values()) < 1e-3:
            continue
        cells = [format_seconds(max(row.peak_s for row in of_part.values()))]
        for plan in PLANS:
            cells += [
                format_seconds(of_part[plan].compute_s),
                format_seconds(of_part[plan].exposed_s),
            ]
        print(f"| {part} | " + " | ".join(cells) + " |")
    sums = [format_seconds(sum(r.peak_s for r in rows if r.plan == PLANS[0]))]
    for plan in PLANS:
        of_plan = [row for row in rows if row.plan == plan]
        sums += [format_seconds(sum(r.compute_s for r in of_plan))]
        sums += [format_seconds(sum(r.exposed_s for r in of_plan))]
    print("| all | " + " | ".join(sums) + " |")
    shares = "; ".join(f"`{plan}` {peak_frac(plan):.1%}" for plan in PLANS)
    print(f"\nShare of the peak that the compute reaches: {shares}.")


if __name__ == "__main__":
    store(measured(Path(sys.argv[1])))
    table()
