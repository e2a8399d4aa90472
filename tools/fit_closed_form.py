"""Fits the constants of the closed form to published steps and stores them in the package.

    python tools/fit_closed_form.py

The fit takes the fitted half of `tools/published_steps.csv`, and pulls every constant towards its prior: a
published microbenchmark, or what compiled programs show. A constant without a published step of its chip
keeps its prior. The widths of intervals come from the fitted half, too: each model is left out in turn, and
its steps are predicted by a fit to the other models. Kinds of steps without a fitted one, and chips, get the
error of a chip that is left out. Read the difference in
`src/meshscope/hardware/fitted_constants.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import log

import numpy as np
from constants_file import update_constants
from published_steps import Half, PublishedStep, closed_time, published_steps
from scipy.optimize import least_squares
from scipy.stats import t as student

from meshscope.cost.closed_form import PlanForm, plan_form
from meshscope.cost.predicted import steps_of
from meshscope.cost.rates import ChipEfficiency, ClosedConstants
from meshscope.events.step_time import TimeEstimate
from meshscope.hardware.chips import CHIPS, ChipKind
from meshscope.hardware.compiler_facts import ALL_CHIPS


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
        values={"v4": 0.6, "v5e": 0.69, "v5p": 0.69, "v6e": 0.21, "tpu7x": 0.21},
        error=0.4,
        error_fitted=0.4,
        source="bundles of jax's splash attention for heads of 128: 69 % on v5e and v5p, 21 % on v6e and tpu7x "
        "(compiler_facts.json); v4 is assumed. No step was fitted",
    ),
    "paged": Prior(
        values={ALL_CHIPS: 1.0},
        error=0.2,
        error_fitted=0.1,
        source="bundles of ragged paged attention, without stalls (operation_rates.json)",
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
    "groups_s": Prior(
        values={ALL_CHIPS: 0.6e-3 / 58},
        error=0.3,
        error_fitted=0.3,
        source="0.6 ms of routing in the 58 layers of meshscope's decode program of DeepSeek-R1 on v5e, as simulated",
    ),
    "row_s": Prior(
        values={ALL_CHIPS: 0.074e-6},
        error=0.9,
        error_fitted=0.3,
        source="a gather of a row of 7,168 numbers on v5e",
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
LEVEL = 0.9  # of the steps of a model that was not fitted, inside their intervals

Point = dict[str, float]  # constants by name; those of a chip as name@chip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Modeled time of a published step."""

    step: PublishedStep
    time: TimeEstimate

    @property
    def error(self) -> float:
        """The natural logarithm of modeled over published."""
        return float(np.log(self.time.value_s / self.step.nearest_s(self.time.value_s)))

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the published time."""
        return self.step.is_inside(self.time)


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What makes intervals wide: a factor of the errors of the constants, and the spread of models."""

    scale: float
    model_spread: float
    other_spread: float = 1.0  # of kinds of steps of which none was fitted


NO_WIDTHS = Widths(scale=1.0, model_spread=1.0)


def fit() -> None:
    """Least squares of logarithms, then the widths of intervals from models that are left out in turn."""
    steps = [step for step in published_steps() if step.half in {Half.FITTED, Half.JUDGING}]
    fitted = [step for step in steps if step.half is Half.FITTED]
    start = _start(fitted)
    point = _solved(fitted, start)
    widths = _widths(fitted)
    _report(_outcomes(steps, point, widths))
    _store(point, widths, fitted, n_judging=len(steps) - len(fitted))


def _solved(fitted: Sequence[PublishedStep], start: Point) -> Point:
    """The constants with the least squares of errors and of distances from their priors."""
    names = list(start)

    def residuals(logs: Sequence[float]) -> list[float]:
        point = dict(zip(names, np.exp(logs), strict=True))
        errors = [error / ERROR for error in _errors(fitted, point)]
        pulls = [
            float(np.log(point[name] / start[name])) / PRIORS[name.partition("@")[0]].error
            for name in names
        ]
        return [*errors, *pulls]

    solution = least_squares(residuals, np.log(list(start.values())))
    return {name: float(f"{v:.3g}") for name, v in zip(names, np.exp(solution.x), strict=True)}


@cache
def _form(step: PublishedStep) -> PlanForm:
    return plan_form(step.experiment, step.phase, attention=step.blocks)


def _errors(steps: Sequence[PublishedStep], point: Point) -> list[float]:
    """The natural logarithm of modeled over published time, for all steps at once."""
    efficiencies = {step.chip: _efficiency(point, step.chip, NO_WIDTHS) for step in steps}
    forms = [replace(_form(step), efficiency=efficiencies[step.chip]) for step in steps]
    seconds = steps_of(forms, [step.experiment.workload for step in steps]).step_s
    return [log(s / step.nearest_s(s)) for s, step in zip(seconds, steps, strict=True)]


def _widths(fitted: Sequence[PublishedStep]) -> Widths:
    """Widths of intervals by the errors for models, and for chips, that were left out of the fit.

    The scale covers nine tenths of the steps of models. A spread is that of a further model or chip: the root mean
    square of the errors of all, times Student's factor for as many.
    """
    left_out: list[tuple[PublishedStep, Point]] = []
    spreads: list[float] = []
    for group_of in (_model, _chip):
        squares: list[float] = []
        for group in dict.fromkeys(group_of(step) for step in fitted):
            others = [step for step in fitted if group_of(step) != group]
            of_group = [step for step in fitted if group_of(step) == group]
            point = _solved(others, _start(others))
            squares.append(float(np.mean(np.square(_errors(of_group, point)))))
            left_out += [(step, point) for step in of_group] if group_of is _model else []
            print(f"without {group}: {np.sqrt(squares[-1]):.1%}")
        quantile = float(student.ppf((1 + LEVEL) / 2, len(squares)))
        spreads.append(round(float(np.exp(quantile * np.sqrt(np.mean(squares)))), 3))
    scale = _covering_scale(left_out)
    return Widths(scale=scale, model_spread=spreads[0], other_spread=spreads[1])


def _model(step: PublishedStep) -> str:
    return step.experiment.model.name


def _chip(step: PublishedStep) -> str:
    return step.chip


def _covering_scale(left_out: Sequence[tuple[PublishedStep, Point]]) -> float:
    """The least scale whose intervals contain enough steps, each predicted without its model."""

    def covered_frac(scale: float) -> float:
        widths = Widths(scale=scale, model_spread=1.0)
        return float(np.mean([_outcomes([s], point, widths)[0].is_inside for s, point in left_out]))

    scales = np.arange(MIN_SCALE, 5.0, 0.1)
    return float(next(scale for scale in scales if covered_frac(scale) >= LEVEL))


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


def _efficiency(point: Point, chip: str, widths: Widths) -> ChipEfficiency:
    constants = ClosedConstants(**{name: _value(point, name, chip) for name in PRIORS})
    spreads = _spreads(point, chip, widths.scale)
    return ChipEfficiency(
        constants=constants,
        fast=constants.faster(spreads),
        slow=constants.faster({name: 1 / spread for name, spread in spreads.items()}),
        streams_weights=True,
        model_spread=widths.model_spread,
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


def _outcomes(
    steps: Sequence[PublishedStep], point: Point, widths: Widths = NO_WIDTHS
) -> list[Outcome]:
    efficiencies = {step.chip: _efficiency(point, step.chip, widths) for step in steps}
    return [Outcome(step=step, time=closed_time(step, efficiencies[step.chip])) for step in steps]


def _report(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        step, time = outcome.step, outcome.time
        print(
            f"{step.half:8s} {step.id:30s} {step.device_s * 1e3:8.2f} {time.value_s * 1e3:8.2f} ms "
            f"{np.expm1(outcome.error):+.0%} of {time.lower_s * 1e3:.2f} to {time.upper_s * 1e3:.2f}"
        )
    widths = [(o.time.upper_s - o.time.lower_s) / 2 / o.time.value_s for o in outcomes]
    errors = [abs(o.error) for o in outcomes if o.step.half is Half.JUDGING]
    n_inside = sum(outcome.is_inside for outcome in outcomes)
    print(f"holdout median {np.median(errors):.1%}, {n_inside} of {len(outcomes)} inside")
    print(f"median half-width {np.median(widths):.1%}")


def _store(
    point: Point, widths: Widths, fitted: Sequence[PublishedStep], *, n_judging: int
) -> None:
    chips = [chip.name for chip in CHIPS.values() if chip.kind is ChipKind.TPU]
    by_chip = {
        chip: {
            "constants": asdict(_efficiency(point, chip, widths).constants),
            "spreads": _spreads(point, chip, widths.scale),
            "model_spread": widths.model_spread,
            "other_spread": widths.other_spread,
            "fitted_kinds": sorted({step.kind[1:] for step in fitted if step.chip == chip}),
            "is_fitted": _is_fitted(point, chip),
        }
        for chip in chips
    }
    update_constants(
        "closed_form",
        by_chip | {ALL_CHIPS: by_chip["v6e"] | {"is_fitted": False, "fitted_kinds": []}},
        record={
            "source": "Fitted to every second published step of a kind in tools/published_steps.csv. Priors: "
            + "; ".join(f"{name}: {prior.source}" for name, prior in PRIORS.items()),
            "rows": [step.id for step in fitted],
            "n_fitted": len(fitted),
            "n_judging": n_judging,
        },
    )


if __name__ == "__main__":
    fit()
