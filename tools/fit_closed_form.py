"""Fits the constants of the closed form to published steps and stores them in the package.

    python tools/fit_closed_form.py

The fit takes the fitted half of `tools/published_steps.csv`, and pulls every constant towards its prior: a
published microbenchmark, or what compiled programs show. A constant without a published step of its chip
keeps its prior. Intervals are scaled until they cover the holdout. Read the difference in
`src/meshscope/spec/hardware/fitted_constants.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from constants_file import update_constants
from published_steps import Half, PublishedStep, closed_time, published_steps
from scipy.optimize import least_squares

from meshscope.cost.efficiency import ChipEfficiency, ClosedConstants
from meshscope.events.step_time import TimeEstimate
from meshscope.spec.hardware.chips import CHIPS, ChipKind
from meshscope.spec.hardware.compiler_facts import ALL_CHIPS


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is known of a constant before the fit, and its errors as natural logarithms.

    `values` are by chip, with `ALL_CHIPS` for the others; a constant with values by chip is fitted by chip.
    `error` is that of the prior, `error_fitted` that of the constant on chips with published steps.
    """

    values: Mapping[str, float]
    error: float
    error_fitted: float
    source: str


PRIORS = {
    "matmul": Prior(
        values={"v4": 0.88, "v5e": 0.9, "v5p": 0.88, "v6e": 0.68, "tpu7x": 0.7},
        error=0.1,
        error_fitted=0.05,
        source="the compiler's cycles in 200 compiled prefill steps, median of all parts by FLOPs",
    ),
    "attention": Prior(
        values={"v4": 0.6, "v5e": 0.6, "v5p": 0.6, "v6e": 0.3, "tpu7x": 0.4},
        error=0.4,
        error_fitted=0.15,
        source="bundles of jax's splash attention, 69 % on v5e and v5p, 21 % on v6e and tpu7x, and of ragged "
        "paged attention on v6e, 31 % (compiler_facts.py, attention_kernels.py); ragged paged attention on tpu7x "
        "reached 63 % at best (arXiv 2604.15464)",
    ),
    "experts": Prior(
        values={ALL_CHIPS: 0.55},
        error=0.2,
        error_fitted=0.15,
        source="bundles of meshscope's grouped matmul on v6e reach 70 % of the peak in tiles of 512 rows "
        "(docs/kernels.md), which are 80 % full at 2,048 rows of an expert",
    ),
    "weights": Prior(
        values={ALL_CHIPS: 0.92, "tpu7x": 0.87},
        error=0.1,
        error_fitted=0.05,
        source="HBM microbenchmark of tpu7x, 6,400 of 7,380 GB/s; decode of Llama-3.1-70B on v5e",
    ),
    "cache": Prior(
        values={ALL_CHIPS: 0.82},
        error=0.15,
        error_fitted=0.1,
        source="growth of the decode step of Qwen3-8B on v6e from 1k to 8k positions",
    ),
    "passes": Prior(
        values={ALL_CHIPS: 0.76},
        error=0.1,
        error_fitted=0.1,
        source="operation_rates.py: the median of 22 measured element-wise operations",
    ),
    "gathers": Prior(
        values={ALL_CHIPS: 1.0},
        error=0.15,
        error_fitted=0.15,
        source="static profile of gathers, with libtpu's model of DMA latency (compiler_facts.py)",
    ),
    "op_s": Prior(
        values={ALL_CHIPS: 1.1e-6},
        error=0.1,
        error_fitted=0.15,
        source="30 small operations of a training step on v5p, 1.02 to 1.25 us (openxla/xprof@5fe3589)",
    ),
    "overlap": Prior(
        values={ALL_CHIPS: 0.5},
        error=0.7,
        error_fitted=0.7,
        source="the simulated schedules of docs/time.md, in which few or all products wait for their weights",
    ),
}
ERROR = 0.08  # of the model itself
MIN_SCALE = 1.5  # of the errors at the bounds of an interval
MIN_FRAC = 0.9  # of the holdout that the intervals cover

Point = dict[str, float]  # constants by name; those of a chip as name@chip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Modeled time of a published step."""

    step: PublishedStep
    time: TimeEstimate

    @property
    def error(self) -> float:
        """The natural logarithm of modeled over published."""
        return float(np.log(self.time.value_s / self.step.device_s))

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the published time."""
        return self.time.lower_s <= self.step.device_s <= self.time.upper_s


def fit() -> None:
    """Least squares of logarithms, then intervals that cover the holdout."""
    steps = [step for step in published_steps() if step.half in {Half.FITTED, Half.HOLDOUT}]
    fitted = [step for step in steps if step.half is Half.FITTED]
    start = _start(fitted)
    names = list(start)

    def residuals(logs: Sequence[float]) -> list[float]:
        point = dict(zip(names, np.exp(logs), strict=True))
        errors = [outcome.error / ERROR for outcome in _outcomes(fitted, point, 1.0)]
        pulls = [
            float(np.log(point[name] / start[name])) / PRIORS[name.partition("@")[0]].error
            for name in names
        ]
        return [*errors, *pulls]

    solution = least_squares(residuals, np.log(list(start.values())))
    point = {name: float(f"{v:.3g}") for name, v in zip(names, np.exp(solution.x), strict=True)}
    scale = next(
        scale
        for scale in np.arange(MIN_SCALE, 5.0, 0.1)
        if _coverage(steps, point, scale) >= MIN_FRAC
    )
    _report(_outcomes(steps, point, scale))
    _store(point, float(scale), n_fitted=len(fitted), n_holdout=len(steps) - len(fitted))


def _start(fitted: Sequence[PublishedStep]) -> Point:
    """The priors of the constants that the fit varies."""
    chips = dict.fromkeys(step.chip for step in fitted)
    point: Point = {}
    for name, prior in PRIORS.items():
        if ALL_CHIPS in prior.values:
            point[name] = prior.values[ALL_CHIPS]
        else:
            point |= {f"{name}@{chip}": prior.values[chip] for chip in chips}
    return point


def _value(point: Point, name: str, chip: str) -> float:
    """A constant on a chip: as fitted on it or on all chips, unless only its prior knows the chip."""
    values = PRIORS[name].values
    if ALL_CHIPS in values and chip in values:
        return values[chip]
    return point.get(f"{name}@{chip}", point.get(name, values.get(chip, 0.0)))


def _efficiency(point: Point, chip: str, scale: float) -> ChipEfficiency:
    constants = ClosedConstants(**{name: _value(point, name, chip) for name in PRIORS})
    spreads = _spreads(point, chip, scale)
    return ChipEfficiency(
        constants=constants,
        fast=constants.faster(spreads),
        slow=constants.faster({name: 1 / spread for name, spread in spreads.items()}),
        streams_weights=True,
    )


def _spreads(point: Point, chip: str, scale: float) -> dict[str, float]:
    """The factor of each constant at the bounds of the interval."""
    is_fitted = _is_fitted(point, chip)
    return {
        name: round(float(np.exp(scale * (prior.error_fitted if is_fitted else prior.error))), 3)
        for name, prior in PRIORS.items()
    }


def _is_fitted(point: Point, chip: str) -> bool:
    """Whether published steps of the chip are known."""
    return f"matmul@{chip}" in point


def _outcomes(steps: Sequence[PublishedStep], point: Point, scale: float) -> list[Outcome]:
    efficiencies = {step.chip: _efficiency(point, step.chip, scale) for step in steps}
    return [Outcome(step=step, time=closed_time(step, efficiencies[step.chip])) for step in steps]


def _coverage(steps: Sequence[PublishedStep], point: Point, scale: float) -> float:
    """The fraction of the holdout inside the intervals."""
    holdout = [step for step in steps if step.half is Half.HOLDOUT]
    return float(np.mean([outcome.is_inside for outcome in _outcomes(holdout, point, scale)]))


def _report(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        step, time = outcome.step, outcome.time
        print(
            f"{step.half:8s} {step.id:30s} {step.device_s * 1e3:8.2f} {time.value_s * 1e3:8.2f} ms "
            f"{np.expm1(outcome.error):+.0%} of {time.lower_s * 1e3:.2f} to {time.upper_s * 1e3:.2f}"
        )
    widths = [(o.time.upper_s - o.time.lower_s) / 2 / o.time.value_s for o in outcomes]
    errors = [abs(o.error) for o in outcomes if o.step.half is Half.HOLDOUT]
    n_inside = sum(outcome.is_inside for outcome in outcomes)
    print(f"holdout median {np.median(errors):.1%}, {n_inside} of {len(outcomes)} inside")
    print(f"median half-width {np.median(widths):.1%}")


def _store(point: Point, scale: float, *, n_fitted: int, n_holdout: int) -> None:
    chips = [chip.name for chip in CHIPS.values() if chip.kind is ChipKind.TPU]
    by_chip = {
        chip: {
            "constants": asdict(_efficiency(point, chip, scale).constants),
            "spreads": _spreads(point, chip, scale),
            "is_fitted": _is_fitted(point, chip),
        }
        for chip in chips
    }
    update_constants(
        "closed_form",
        by_chip | {ALL_CHIPS: by_chip["v6e"] | {"is_fitted": False}},
        record={
            "source": "Fitted to every second published step of tools/published_steps.csv. Priors: "
            + "; ".join(f"{name}: {prior.source}" for name, prior in PRIORS.items()),
            "n_fitted": n_fitted,
            "n_holdout": n_holdout,
        },
    )


if __name__ == "__main__":
    fit()
