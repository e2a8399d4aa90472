"""The closed form against compiled programs, and how many plans a second it evaluates.

    python benchmarks/closed_form.py speed
    python benchmarks/closed_form.py compare CACHE     CACHE: the folder of closed_form_grid.py
    python benchmarks/closed_form.py fit CACHE         constants: meshscope/timing/fitted.json

`compare` reads the compiled programs of the grid, writes benchmarks/closed_form.csv (one line a phase)
and prints the distribution of |closed / compiled - 1|, apart for the half on which the constants were
fitted (every other experiment in the order of the grid, which is random) and the half that judges them.
"""

import csv
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from closed_form_grid import experiments
from scipy.optimize import nnls

from meshscope.backends.compile.compile import read_phase
from meshscope.cost.closed_form import ClosedSteps, PlanForm, closed_steps, plan_form, stacked
from meshscope.cost.efficiency import ALL_CHIPS, FITTED, PEAKS, Efficiency
from meshscope.cost.features import (
    ACTS,
    CACHE,
    KERNEL,
    MATMUL,
    MOVED,
    PARTS,
    PREFETCHED,
    RUNS,
    TILES,
    VECTOR,
    WEIGHTS,
    WIDE,
)
from meshscope.cost.predicted import step_time
from meshscope.cost.rates import KERNEL_FRAC, PASS_FRAC
from meshscope.cost.shares import Shares
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Part, Phase
from meshscope.events.step_time import StepTime
from meshscope.spec.experiment import Experiment, experiment_from_dict, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload

CSV = Path(__file__).with_suffix(".csv")
WANTED_PER_S = 10_000
AIM = 0.15


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One phase of an experiment, compiled."""

    at: int
    name: str
    experiment: Experiment
    phase: Phase
    compiled: StepTime

    @property
    def is_fitted(self) -> bool:
        """Whether the constants may be fitted to it."""
        return self.at % 2 == 0

    @property
    def chip(self) -> str:
        """The chip's name."""
        return self.experiment.topology.chip.name


def pairs(cache: Path) -> Iterator[Pair]:
    """The compiled programs of the grid, in its order."""
    for at, (name, _) in enumerate(experiments()):
        folder = cache / name
        if not (folder / "done").exists() or (folder / "done").read_text() != "compiled":
            continue
        experiment = experiment_from_dict(json.loads((folder / "experiment.json").read_text()))
        for phase in experiment.phases:
            _, step = read_phase(experiment, phase, folder / f"{phase}.hlo.txt.gz")
            yield Pair(at=at, name=name, experiment=experiment, phase=phase, compiled=step.time)


def closed(pair: Pair, efficiency: Efficiency | None = None) -> tuple[PlanForm, ClosedSteps]:
    """The closed form of the same step."""
    form = plan_form(pair.experiment, pair.phase, efficiency=efficiency)
    workload = pair.experiment.workload
    sizes = {n: np.array([float(getattr(workload, n))]) for n in ("batch", "prompt", "output")}
    found = closed_steps(stacked([form]), np.zeros(1, dtype=np.int64), **sizes)
    return form, found


def compare(cache: Path) -> None:
    """Writes the CSV and prints the distribution."""
    lines = []
    for pair in pairs(cache):
        ours = step_time(*closed(pair))
        theirs = pair.compiled
        lines.append(
            {
                "experiment": pair.name,
                "phase": pair.phase.value,
                "half": "fitted" if pair.is_fitted else "judging",
                "compiled_s": f"{theirs.step.value_s:.6g}",
                "closed_s": f"{ours.step.value_s:.6g}",
                "ratio": f"{ours.step.value_s / theirs.step.value_s:.4f}",
                "compiled_compute_s": f"{theirs.compute_s:.6g}",
                "closed_compute_s": f"{ours.compute_s:.6g}",
                "compiled_exposed_s": f"{theirs.exposed_s:.6g}",
                "closed_exposed_s": f"{ours.exposed_s:.6g}",
            }
        )
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    for half in ("fitted", "judging"):
        for phase in Phase:
            own = [line for line in lines if line["half"] == half and line["phase"] == phase]
            if own:
                print(f"{half:8s} {phase:8s} {_distribution([float(o['ratio']) for o in own])}")


def _distribution(ratios: list[float]) -> str:
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    inside = sum(error <= AIM for error in errors)
    quantiles = ", ".join(f"p{q} {np.quantile(errors, q / 100):.1%}" for q in (50, 75, 90, 100))
    return (
        f"{len(errors)} steps, within {AIM:.0%}: {inside} ({inside / len(errors):.0%}); {quantiles}"
    )


NAMES = (
    "matmul",
    "vector",
    "weight",
    "matvec",
    "cache",
    "act",
    "wide",
    "tile_cycles",
    "run_cycles",
)
PULL = 0.1  # of a chip's constants towards those of all chips, as a relative error
PULL_OF_TILES = 1.0  # few steps lay much out anew, and of some chips none that is fitted to
FEW_STEPS = 30  # do not tell cycles from bytes: those stay near where they begin
# Nothing computes or reads faster than the peak: caches that lie in VMEM here do not in a whole model.
AT_MOST_PEAK = frozenset({"matmul", "weight", "matvec", "cache"})
FILE = Path(__file__).parents[1] / "src" / "meshscope" / "cost" / FITTED
SAYS = (
    "Constants of the closed form, made by benchmarks/closed_form.py fit: fitted to a random half of "
    "the compiled experiments of benchmarks/closed_form_grid.py (layers scanned); the others judge, "
    "and 90 of 100 of their compute times lie within the factor 'spread'. A share below the HBM's own "
    "tells that arrays are read several times or laid out anew; those of matrix units, weights and cache "
    "are at most 1."
)


def fit(cache: Path) -> None:
    """Least squares of errors relative to the step's compute: of all chips, then of each, pulled to all."""
    grid = list(pairs(cache))
    rows = [row for pair in grid if pair.is_fitted for row in _rows(pair)]
    judging = [pair for pair in grid if not pair.is_fitted]
    everyone = {part: _solve([r for r in rows if r.part is part]) for part in PARTS}
    fitted = {ALL_CHIPS: everyone}
    for chip in dict.fromkeys(pair.chip for pair in grid):
        of_chip = [row for row in rows if row.chip == chip]
        fitted[chip] = {
            part: _solve([r for r in of_chip if r.part is part], everyone[part]) for part in PARTS
        }
    errors = [abs(np.log(_compute_s(pair, fitted) / pair.compiled.compute_s)) for pair in judging]
    spread = float(np.exp(np.quantile(errors, 0.9)))
    document = {
        "is": SAYS,
        "libtpu": version("libtpu"),
        "n_fitted": len(grid) - len(judging),
        "n_judging": len(judging),
        "spread": float(f"{spread:.4g}"),
        "chips": {
            chip: {part.value: _rounded(values) for part, values in parts.items() if values}
            for chip, parts in fitted.items()
        },
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {FILE.name}: spread {spread:.3f}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def _compute_s(pair: Pair, fitted: dict[str, dict[Part, dict[str, float]]]) -> float:
    own = tuple((part, Shares(**values)) for part, values in fitted[pair.chip].items() if values)
    return float(closed(pair, replace(PEAKS, parts=own))[1].compute_s[0])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part of a compiled step: its time at the peaks, by what it does, and what was compiled."""

    chip: str
    part: Part
    at_peak: dict[str, float]  # seconds; of cycles, seconds at one cycle each
    known_s: float  # of kernels and passes, by constants that are not fitted here
    compiled_s: float
    total_s: float


def _rows(pair: Pair) -> Iterator[Row]:
    form, found = closed(pair, PEAKS)
    quantities, rates = found.quantities[0], form.rates
    by_part = {p.part: p.compute_s for p in pair.compiled.parts}
    # What has no part are copies of the cache, and slices of stacked weights.
    by_part[Part.ATTN] = by_part.get(Part.ATTN, 0.0) + by_part.get(None, 0.0)
    by_part[Part.LM_HEAD] = by_part.get(Part.LM_HEAD, 0.0) + by_part.get(Part.SAMPLE, 0.0)
    experts = [by_part.get(p, 0.0) for p in (Part.MOE_DISPATCH, Part.MOE_COMBINE)]
    by_part[Part.MOE_EXPERTS] = by_part.get(Part.MOE_EXPERTS, 0.0) + sum(experts)
    n_sequences = pair.experiment.workload.batch / pair.experiment.plan.data_size
    for at, part in enumerate(PARTS):
        q = quantities[at]
        if not q.any():
            continue
        is_single = n_sequences == 1 and (pair.phase is Phase.DECODE or part is Part.LM_HEAD)
        weight_bytes = q[WEIGHTS] + (q[PREFETCHED] if is_single else 0.0)
        weights_s = weight_bytes / rates.hbm_bytes_per_s
        yield Row(
            chip=pair.chip,
            part=part,
            at_peak={
                "matmul": q[MATMUL] / rates.flops_per_s,
                "vector": q[VECTOR] / rates.flops_per_s,
                "matvec" if is_single else "weight": weights_s,
                "cache": q[CACHE] / rates.hbm_bytes_per_s,
                "act": q[ACTS] / rates.hbm_bytes_per_s,
                "wide": q[WIDE] / rates.hbm_bytes_per_s,
                "tile_cycles": q[TILES] / rates.clock_hz,
                "run_cycles": q[RUNS] / rates.clock_hz,
            },
            known_s=q[KERNEL] / rates.flops_per_s / KERNEL_FRAC
            + q[MOVED] / rates.hbm_bytes_per_s / PASS_FRAC,
            compiled_s=by_part.get(part, 0.0),
            total_s=pair.compiled.compute_s,
        )


def _solve(rows: list[Row], prior: dict[str, float] | None = None) -> dict[str, float]:
    """Shares (and cycles) of a part; of products and weights the longer counts, found in turns."""
    if not rows:
        return dict(prior or {})
    start = {
        "matmul": 1.3,
        "vector": 1.0,
        "weight": 1.3,
        "matvec": 2.0,
        "cache": 1.3,
        "act": 5,
        "wide": 5,
    }
    inverse = {n: v if n.endswith("_cycles") else 1 / v for n, v in (prior or {}).items()} or {
        **start,
        "tile_cycles": 8.0,
        "run_cycles": 5000.0,
    }
    guess = dict(inverse)
    for _ in range(50):
        matrix, target = [], []
        for row in rows:
            of_weights = "matvec" if "matvec" in row.at_peak else "weight"
            line = {n: row.at_peak.get(n, 0.0) for n in NAMES}
            is_products = line["matmul"] * guess["matmul"] >= line[of_weights] * guess[of_weights]
            line[of_weights if is_products else "matmul"] = 0.0
            matrix.append([line[n] * guess[n] / row.total_s for n in NAMES])
            target.append((row.compiled_s - row.known_s) / row.total_s)
        for at, name in enumerate(NAMES):
            of_name = PULL_OF_TILES if name == "tile_cycles" else PULL
            is_vague = len(rows) < FEW_STEPS and name.endswith("_cycles")
            weight = of_name if prior or is_vague else 1e-3
            pull = [0.0] * len(NAMES)
            pull[at] = weight * guess[name] / inverse[name]
            matrix.append(pull)
            target.append(weight)
        found, _ = nnls(np.array(matrix), np.array(target))
        new = {
            n: max(f * guess[n], 1.0 if n in AT_MOST_PEAK else 1e-3)
            for n, f in zip(NAMES, found, strict=True)
        }
        if all(abs(new[n] / guess[n] - 1) < 1e-4 for n in NAMES):
            break
        guess = new
    return {n: v if n.endswith("_cycles") else 1 / v for n, v in guess.items()}


def speed() -> None:
    """Plans a second, with finding the coefficients and without, as ratios of what is wanted."""
    model, topology = read_model("Qwen/Qwen3-32B"), parse_topology("v6e:16x16")
    splits = [(tp, pp) for tp in (1, 2, 4, 8, 16, 32, 64) for pp in (1, 2, 4)]
    asked = [
        f"pp={pp},{data}={256 // (tp * pp)},tp={tp}{sp}"
        for tp, pp in splits
        for data in ("dp", "fsdp")
        for sp in (("", ",sp") if tp > 1 else ("",))
    ]
    started = time.process_time()
    forms = []
    for plan in asked:
        try:
            experiment = experiment_of(
                model=model,
                plan=parse_plan(plan),
                topology=topology,
                workload=Workload(batch=1024, prompt=1024, output=128),
            )
        except MeshscopeError:
            continue
        forms += [plan_form(experiment, phase) for phase in Phase]
    found_s = time.process_time() - started
    n = 20_000
    rng = np.random.default_rng(1)
    at = rng.integers(0, len(forms) // 2, n)
    batch = 1024.0 * rng.integers(1, 5, n)
    prompt = 128.0 * rng.integers(1, 65, n)
    output = rng.integers(2, 1000, n).astype(float)
    arrays = stacked(forms)
    started = time.process_time()
    for phase_at in (0, 1):
        for first in range(0, n, 2048):
            cut = slice(first, first + 2048)
            closed_steps(
                arrays,
                2 * at[cut] + phase_at,
                batch=batch[cut],
                prompt=prompt[cut],
                output=output[cut],
            )
    evaluated_s = time.process_time() - started
    per_s = n / evaluated_s
    whole = n / (evaluated_s + found_s)
    print(
        f"{len(forms) // 2} plans of {model.name} on {topology.name}, coefficients: {found_s:.2f} s"
    )
    print(f"{n} plans and workloads, prefill and decode: {evaluated_s:.2f} s of one core")
    print(f"{per_s:,.0f} a second, {per_s / WANTED_PER_S:.1f} x {WANTED_PER_S:,}")
    print(f"with finding the coefficients {whole:,.0f}, {whole / WANTED_PER_S:.1f} x")


def main() -> None:
    """Runs what the first argument names."""
    what, *rest = sys.argv[1:] or ["speed"]
    if what == "speed":
        speed()
    else:
        {"compare": compare, "fit": fit}[what](Path(rest[0]))


if __name__ == "__main__":
    main()
