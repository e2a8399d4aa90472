"""The closed form against compiled programs, and its speed in plans per second.

    python benchmarks/closed_form.py speed
    python benchmarks/closed_form.py compare CACHE     CACHE: the folder of closed_form_grid.py

`compare` reads the compiled programs of the grid, writes benchmarks/closed_form.csv (one row per phase) and
prints the distribution of |closed / compiled - 1|, separately for the fitted half (every other
experiment of the grid, whose order is random) and the holdout. `tools/fit_closed_form.py` fits the
constants.
"""

import csv
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from closed_form_grid import experiments

from meshscope.backends.compile.compile import read_phase
from meshscope.cost.closed_form import ClosedSteps, PlanForm, closed_steps, plan_batch, plan_form
from meshscope.cost.efficiency import ChipEfficiency
from meshscope.cost.predicted import step_time
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.spec.experiment import Experiment, experiment_from_dict, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload

CSV = Path(__file__).with_suffix(".csv")
TARGET_PER_S = 10_000
TARGET_ERROR = 0.15
HALVES = ("fitted", "holdout")


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """One phase of an experiment of the grid, compiled."""

    index: int
    name: str
    experiment: Experiment
    phase: Phase
    time: StepTime

    @property
    def is_fitted(self) -> bool:
        """Whether the constants may be fitted to it."""
        return self.index % 2 == 0

    @property
    def chip(self) -> str:
        """The chip's name."""
        return self.experiment.topology.chip.name


def compiled_steps(cache: Path) -> Iterator[CompiledStep]:
    """The compiled programs of the grid, in its order."""
    for index, (name, _) in enumerate(experiments()):
        folder = cache / name
        if not (folder / "done").exists() or (folder / "done").read_text() != "compiled":
            continue
        experiment = experiment_from_dict(json.loads((folder / "experiment.json").read_text()))
        for phase in experiment.phases:
            _, step = read_phase(experiment, phase, folder / f"{phase}.hlo.txt.gz")
            yield CompiledStep(
                index=index, name=name, experiment=experiment, phase=phase, time=step.time
            )


def closed(
    compiled: CompiledStep, efficiency: ChipEfficiency | None = None
) -> tuple[PlanForm, ClosedSteps]:
    """The closed form of the same step."""
    form = plan_form(compiled.experiment, compiled.phase, efficiency=efficiency)
    workload = compiled.experiment.workload
    sizes = {n: np.array([float(getattr(workload, n))]) for n in ("batch", "prompt", "output")}
    return form, closed_steps(plan_batch([form]), np.zeros(1, dtype=np.int64), **sizes)


def compare(cache: Path) -> None:
    """Writes the CSV file and prints the distribution."""
    rows = [_row(compiled) for compiled in compiled_steps(cache)]
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for half in HALVES:
        for phase in Phase:
            ratios = [
                float(row["ratio"]) for row in rows if (row["half"], row["phase"]) == (half, phase)
            ]
            if ratios:
                print(f"{half:8s} {phase:8s} {_distribution(ratios)}")


def _row(compiled: CompiledStep) -> dict[str, str]:
    ours, theirs = step_time(*closed(compiled)), compiled.time
    return {
        "experiment": compiled.name,
        "phase": compiled.phase.value,
        "half": HALVES[0] if compiled.is_fitted else HALVES[1],
        "compiled_s": f"{theirs.step.value_s:.6g}",
        "closed_s": f"{ours.step.value_s:.6g}",
        "ratio": f"{ours.step.value_s / theirs.step.value_s:.4f}",
        "compiled_compute_s": f"{theirs.compute_s:.6g}",
        "closed_compute_s": f"{ours.compute_s:.6g}",
        "compiled_exposed_s": f"{theirs.exposed_s:.6g}",
        "closed_exposed_s": f"{ours.exposed_s:.6g}",
    }


def _distribution(ratios: list[float]) -> str:
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    n_within = sum(error <= TARGET_ERROR for error in errors)
    quantiles = ", ".join(f"p{q} {np.quantile(errors, q / 100):.1%}" for q in (50, 75, 90, 100))
    frac = n_within / len(errors)
    return f"{len(errors)} steps, within {TARGET_ERROR:.0%}: {n_within} ({frac:.0%}); {quantiles}"


def speed() -> None:
    """Prints plans per second, with and without the coefficients, relative to the target."""
    started = time.process_time()
    forms = _forms()
    coefficients_s = time.process_time() - started
    n = 20_000
    started = time.process_time()
    _evaluate(forms, n)
    evaluation_s = time.process_time() - started
    per_s, total_per_s = n / evaluation_s, n / (evaluation_s + coefficients_s)
    print(
        f"{len(forms) // 2} plans of Qwen/Qwen3-32B on v6e:16x16, coefficients: {coefficients_s:.2f} s"
    )
    print(f"{n} plans and workloads, prefill and decode: {evaluation_s:.2f} s on one core")
    print(f"{per_s:,.0f} per second, {per_s / TARGET_PER_S:.1f} x {TARGET_PER_S:,}")
    print(f"with coefficients {total_per_s:,.0f} per second, {total_per_s / TARGET_PER_S:.1f} x")


def _forms() -> list[PlanForm]:
    """The closed forms of all valid plans on 256 chips, both phases of each."""
    model, topology = read_model("Qwen/Qwen3-32B"), parse_topology("v6e:16x16")
    workload = Workload(batch=1024, prompt=1024, output=128)
    forms: list[PlanForm] = []
    for plan in _plans():
        try:
            experiment = experiment_of(
                model=model, plan=parse_plan(plan), topology=topology, workload=workload
            )
        except MeshscopeError:
            continue
        forms += [plan_form(experiment, phase) for phase in Phase]
    return forms


def _plans() -> Iterator[str]:
    for tp in (1, 2, 4, 8, 16, 32, 64):
        for pp in (1, 2, 4):
            for data in ("dp", "fsdp"):
                for sp in ("", ",sp") if tp > 1 else ("",):
                    yield f"pp={pp},{data}={256 // (tp * pp)},tp={tp}{sp}"


def _evaluate(forms: list[PlanForm], n: int) -> None:
    """Evaluates `n` random plans and workloads in blocks."""
    rng = np.random.default_rng(1)
    at = rng.integers(0, len(forms) // 2, n)
    batch = 1024.0 * rng.integers(1, 5, n)
    prompt = 128.0 * rng.integers(1, 65, n)
    output = rng.integers(2, 1000, n).astype(float)
    plans = plan_batch(forms)
    for phase_at in (0, 1):
        for first in range(0, n, 2048):
            cut = slice(first, first + 2048)
            sizes = {"batch": batch[cut], "prompt": prompt[cut], "output": output[cut]}
            closed_steps(plans, 2 * at[cut] + phase_at, **sizes)


def main() -> None:
    """Runs the command in the first argument."""
    command, *arguments = sys.argv[1:] or ["speed"]
    if command == "speed":
        speed()
    else:
        {"compare": compare}[command](Path(arguments[0]))


if __name__ == "__main__":
    main()
