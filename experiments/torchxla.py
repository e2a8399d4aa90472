"""Compares the runs of torchxla.yaml, JAX beside TorchXLA, and writes docs/evidence/torchxla/compared.csv.

meshscope sweep experiments/torchxla.yaml
python experiments/torchxla.py [RUNS]     the folder of the sweep (default: runs/torchxla)

Lines of pairs that the folder does not have stay as they are.
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cases import ROOT

from meshscope.analysis.join import Comparison, Verdict, compare
from meshscope.analysis.totals import step_totals
from meshscope.events.enums import REQUEST_PHASES, Phase, Source
from meshscope.plans.program import Frontend, Partitioner
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord

CSV = ROOT / "docs" / "evidence" / "torchxla" / "compared.csv"
SIDES = (Frontend.JAX, Frontend.TORCHXLA)


def main() -> None:
    """Reads the runs and writes the file."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "torchxla"
    renewed = [line for left, right in _pairs(folder) for line in _lines(left, right)]
    if not renewed:
        sys.exit(f"'{folder}' has no two runs to compare; make them: meshscope sweep torchxla.yaml")
    stored: list[dict[str, Any]] = []
    if CSV.exists():
        stored = list(csv.DictReader(CSV.read_text("utf-8").splitlines()))
    lines = {_key(line): line for line in [*stored, *renewed]}
    CSV.parent.mkdir(exist_ok=True)
    with CSV.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(renewed[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(line for _, line in sorted(lines.items()))


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a line is about, as it is ordered: model and plan, auto partitioner last, prefill first."""
    return (
        line["model"].lower(),
        line["plan"],
        line["partitioner"] != Partitioner.MANUAL,
        REQUEST_PHASES.index(Phase(line["phase"])),
    )


def _pairs(folder: Path) -> Iterator[tuple[RunRecord, RunRecord]]:
    """The pairs of runs from both front ends."""
    pairs: dict[tuple[str, ...], dict[str, RunRecord]] = {}
    for path in sorted(folder.glob("[!.]*/manifest.json")):
        run = read_run(path.parent)
        experiment = run.manifest.experiment
        model, program = experiment.architecture, experiment.program
        if model is not None and program is not None:
            key = (model.name, str(experiment.plan), program.partitioner)
            pairs.setdefault(key, {})[program.frontend] = run
    for sides in pairs.values():
        if all(side in sides for side in SIDES):
            yield sides[SIDES[0]], sides[SIDES[1]]


def _lines(left: RunRecord, right: RunRecord) -> Iterator[dict[str, Any]]:
    """One line per phase."""
    experiment = right.manifest.experiment
    assert experiment.program is not None
    rows = [run.rows_of(Source.COMPILED) for run in (left, right)]
    for phase in REQUEST_PHASES:
        both = [[row for row in side if row.phase is phase] for side in rows]
        line = {
            "model": experiment.model_name,
            "n_layers": experiment.n_layers,
            "plan": str(experiment.plan),
            "partitioner": experiment.program.partitioner.value,
            "phase": phase.value,
            "of_jax": _counts(compare(*both)),
        }
        for side, run, rows_of_side in zip(SIDES, (left, right), both, strict=True):
            total = step_totals(rows_of_side)[phase]
            line |= {
                f"{side}_count": total.count,
                f"{side}_wire_bytes": int(total.wire_bytes),
                f"{side}_temp_bytes": run.memory[Source.COMPILED].temp_bytes,
                f"{side}_unattributed": sum(row.count for row in rows_of_side if row.axis is None),
            }
        yield line


def _counts(comparison: Comparison) -> str:
    """The number of collectives of a step by verdict."""
    counts = dict.fromkeys(Verdict, 0)
    for match in comparison.matches:
        counts[match.verdict] += match.count
    return " ".join(f"{n}x{verdict}" for verdict, n in counts.items() if n)


if __name__ == "__main__":
    main()
