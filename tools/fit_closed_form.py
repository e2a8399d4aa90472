"""Fits the closed form's efficiencies to the compiled programs of the grid and stores them in the package.

    python tools/fit_closed_form.py CACHE     CACHE: the folder of benchmarks/closed_form_grid.py

The fit takes every other experiment of the grid, whose order is random. The others, the holdout, give the
`spread`. Read the difference in `src/meshscope/spec/hardware/fitted_constants.json`.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from constants_file import update_constants
from scipy.optimize import nnls

from meshscope.cost.efficiency import PEAKS, PartEfficiency
from meshscope.cost.features import PARTS, Cost, FloatArray
from meshscope.cost.rates import ELEMENTWISE_FRAC, KERNEL_FRAC, Rates
from meshscope.events.enums import Part, Phase
from meshscope.spec.hardware.compiler_facts import ALL_CHIPS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from closed_form import CompiledStep, closed, compiled_steps

Constants = Mapping[str, float]  # fields of PartEfficiency
NAMES = (
    *("matmul", "vector", "weight", "matvec", "cache", "act", "wide"),
    *("tile_cycles", "run_cycles"),
)
PULL = 0.1  # weight of the constants of all chips in a chip's fit, as a relative error
PULL_OF_TILES = 1.0  # few steps have relayouts, and some chips have none in the fitted half
FEW_STEPS = 30  # fewer steps cannot separate cycles from bytes: cycles stay near their start
# Nothing exceeds the peak. Caches that fit VMEM in these shortened models do not in whole ones.
AT_MOST_PEAK = frozenset({"matmul", "weight", "matvec", "cache"})
# Inverse efficiencies, and cycles, from which the fit over all chips starts.
START: Constants = {
    "matmul": 1.3,
    "vector": 1.0,
    "weight": 1.3,
    "matvec": 2.0,
    "cache": 1.3,
    "act": 5,
    "wide": 5,
    "tile_cycles": 8.0,
    "run_cycles": 5000.0,
}


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """One part of a compiled step: seconds of each cost at the peaks, and the compiled time."""

    chip: str
    part: Part
    at_peak: Constants  # for cycles: seconds at one cycle each
    fixed_s: float  # kernels and moved bytes, whose constants are not fitted here
    compiled_s: float
    step_compute_s: float


def fit(cache: Path) -> None:
    """Least squares of errors relative to the step's compute: over all chips, then per chip."""
    steps = list(compiled_steps(cache))
    rows = [row for step in steps if step.is_fitted for row in _rows(step)]
    holdout = [step for step in steps if not step.is_fitted]
    common = {part: _solve([r for r in rows if r.part is part]) for part in PARTS}
    fitted = {ALL_CHIPS: common}
    for chip in dict.fromkeys(step.chip for step in steps):
        chip_rows = [row for row in rows if row.chip == chip]
        fitted[chip] = {
            part: _solve([r for r in chip_rows if r.part is part], common[part]) for part in PARTS
        }
    errors = [abs(np.log(_compute_s(s, fitted[s.chip]) / s.time.compute_s)) for s in holdout]
    spread = float(np.exp(np.quantile(errors, 0.9)))
    update_constants(
        "closed_form",
        {chip: _rounded(parts) for chip, parts in fitted.items()},
        record={
            "n_fitted": len(steps) - len(holdout),
            "n_holdout": len(holdout),
            "spread": float(f"{spread:.4g}"),
        },
    )
    print(f"spread {spread:.3f}")


def _rounded(parts: Mapping[Part, Constants]) -> dict[str, dict[str, float]]:
    return {
        part.value: {name: float(f"{value:.3g}") for name, value in values.items()}
        for part, values in parts.items()
        if values
    }


def _compute_s(step: CompiledStep, parts: Mapping[Part, Constants]) -> float:
    """Compute seconds of the closed form with these constants."""
    efficiencies = tuple((p, PartEfficiency(**values)) for p, values in parts.items() if values)
    return float(closed(step, replace(PEAKS, parts=efficiencies))[1].compute_s[0])


def _rows(step: CompiledStep) -> Iterator[PartRow]:
    form, steps = closed(step, PEAKS)
    compiled_s = _compiled_parts(step)
    n_sequences = step.experiment.workload.batch / step.experiment.plan.data_size
    for at, part in enumerate(PARTS):
        costs = steps.costs[0, at]
        if not costs.any():
            continue
        is_single = n_sequences == 1 and (step.phase is Phase.DECODE or part is Part.LM_HEAD)
        moved_s = costs[Cost.MOVED_BYTES] / form.rates.hbm_bytes_per_s / ELEMENTWISE_FRAC
        yield PartRow(
            chip=step.chip,
            part=part,
            at_peak=_at_peak(costs, form.rates, is_single=is_single),
            fixed_s=costs[Cost.KERNEL_FLOPS] / form.rates.flops_per_s / KERNEL_FRAC + moved_s,
            compiled_s=compiled_s.get(part, 0.0),
            step_compute_s=step.time.compute_s,
        )


def _compiled_parts(step: CompiledStep) -> dict[str | None, float]:
    """Compiled seconds by part of the closed form.

    Attention gets what has no part (copies of the cache and slices of stacked weights), the head gets
    sampling, and the experts get dispatch and combine.
    """
    by_part = {part.part: part.compute_s for part in step.time.parts}
    merged: dict[Part, tuple[Part | None, ...]] = {
        Part.ATTN: (None,),
        Part.LM_HEAD: (Part.SAMPLE,),
        Part.MOE_EXPERTS: (Part.MOE_DISPATCH, Part.MOE_COMBINE),
    }
    for part, others in merged.items():
        extra = sum(by_part.get(other, 0.0) for other in others)
        by_part[part] = by_part.get(part, 0.0) + extra
    return by_part


def _at_peak(costs: FloatArray, rates: Rates, *, is_single: bool) -> Constants:
    assert rates.clock_hz is not None
    weight_bytes = costs[Cost.WEIGHT_BYTES] + (costs[Cost.PREFETCHED_BYTES] if is_single else 0.0)
    return {
        "matmul": costs[Cost.MATMUL_FLOPS] / rates.flops_per_s,
        "vector": costs[Cost.VECTOR_FLOPS] / rates.flops_per_s,
        "matvec" if is_single else "weight": weight_bytes / rates.hbm_bytes_per_s,
        "cache": costs[Cost.CACHE_BYTES] / rates.hbm_bytes_per_s,
        "act": costs[Cost.RESIDUAL_BYTES] / rates.hbm_bytes_per_s,
        "wide": costs[Cost.WIDE_BYTES] / rates.hbm_bytes_per_s,
        "tile_cycles": costs[Cost.TILES] / rates.clock_hz,
        "run_cycles": costs[Cost.RUNS] / rates.clock_hz,
    }


def _solve(rows: list[PartRow], prior: Constants | None = None) -> dict[str, float]:
    """Constants of a part; alternates between the fit and the choice of products or weight reads."""
    if not rows:
        return dict(prior or {})
    start = _inverted(prior) if prior else dict(START)
    guess = dict(start)
    for _ in range(50):
        matrix, target = _equations(rows, guess)
        pulls, weights = _pulls(guess, start, has_prior=bool(prior), is_vague=len(rows) < FEW_STEPS)
        factors, _ = nnls(np.array([*matrix, *pulls]), np.array([*target, *weights]))
        new = {
            name: max(factor * guess[name], 1.0 if name in AT_MOST_PEAK else 1e-3)
            for name, factor in zip(NAMES, factors, strict=True)
        }
        if all(abs(new[name] / guess[name] - 1) < 1e-4 for name in NAMES):
            break
        guess = new
    return _inverted(guess)


def _inverted(constants: Constants) -> dict[str, float]:
    """Efficiencies as inverse efficiencies, or back; cycles unchanged."""
    return {n: v if n.endswith("_cycles") else 1 / v for n, v in constants.items()}


def _equations(rows: list[PartRow], guess: Constants) -> tuple[list[list[float]], list[float]]:
    """One equation per row, relative to the step; the shorter of products and weight reads is dropped."""
    matrix: list[list[float]] = []
    target: list[float] = []
    for row in rows:
        weights = "matvec" if "matvec" in row.at_peak else "weight"
        seconds = {name: row.at_peak.get(name, 0.0) for name in NAMES}
        has_longer_products = seconds["matmul"] * guess["matmul"] >= (
            seconds[weights] * guess[weights]
        )
        seconds[weights if has_longer_products else "matmul"] = 0.0
        matrix.append([seconds[name] * guess[name] / row.step_compute_s for name in NAMES])
        target.append((row.compiled_s - row.fixed_s) / row.step_compute_s)
    return matrix, target


def _pulls(
    guess: Constants, start: Constants, *, has_prior: bool, is_vague: bool
) -> tuple[list[list[float]], list[float]]:
    """One equation per constant that pulls it towards its start."""
    matrix: list[list[float]] = []
    weights: list[float] = []
    for at, name in enumerate(NAMES):
        is_pulled = has_prior or (is_vague and name.endswith("_cycles"))
        pull = PULL_OF_TILES if name == "tile_cycles" else PULL
        weight = pull if is_pulled else 1e-3
        row = [0.0] * len(NAMES)
        row[at] = weight * guess[name] / start[name]
        matrix.append(row)
        weights.append(weight)
    return matrix, weights


if __name__ == "__main__":
    fit(Path(sys.argv[1]))
