"""Fits the constants of the closed form to published steps and stores them in the package.

    python tools/fit_closed_form.py

The fit takes the fitted half of `tools/published_steps.csv`, and pulls every constant towards its prior: a
published microbenchmark, or what compiled programs show. A constant without a published step of its chip
keeps its prior. The holdout gives the spreads. Read the difference in
`src/meshscope/spec/hardware/fitted_constants.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from constants_file import update_constants
from published_steps import Half, PublishedStep, closed_s, published_steps
from scipy.optimize import least_squares

from meshscope.cost.efficiency import ChipEfficiency, ClosedConstants
from meshscope.events.enums import Phase
from meshscope.spec.hardware.chips import CHIPS, ChipKind
from meshscope.spec.hardware.compiler_facts import ALL_CHIPS

# Shared by all chips. Weights and cache: decode of Llama-3.1-70B on v5e within 10 % of the HBM rate, and
# the growth of Qwen3-8B's decode step on v6e from 1k to 8k positions. Passes: cost/rates.py. Rows sorted by
# expert and small operations have no independent measurement: the priors are vague.
SHARED_PRIORS = {"weights": 0.92, "cache": 0.82, "passes": 0.76, "routed": 0.25, "op_s": 1e-6}
# Products in prefill, from the compiler's cycles in 200 compiled prefill steps: the median of all parts by
# FLOPs. Attention kernels: ragged paged attention on tpu7x (arXiv 2604.15464, 63 % of the peak with causal
# blocks, less outside of the best case); elsewhere assumed.
MATMUL_PRIORS = {"v4": 0.88, "v5e": 0.9, "v5p": 0.88, "v6e": 0.68, "tpu7x": 0.68}
ATTENTION_PRIORS = {"v4": 0.4, "v5e": 0.4, "v5p": 0.4, "v6e": 0.3, "tpu7x": 0.5}
# Widths of the priors, and of the errors of the model, as natural logarithms.
WIDTHS = {"routed": 0.7, "op_s": 0.7, "attention": 0.4}
WIDTH, ERROR = 0.1, 0.08
MIN_FRAC = 0.9  # of the holdout that the spread covers

Point = dict[str, float]  # constants by name; those of a chip as name@chip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Modeled and published seconds of a step."""

    step: PublishedStep
    modeled_s: float

    @property
    def error(self) -> float:
        """The natural logarithm of modeled over published."""
        return float(np.log(self.modeled_s / self.step.device_s))


def fit() -> None:
    """Least squares of logarithms, then the spreads of the holdout."""
    steps = [step for step in published_steps() if step.half is not Half.BOUND]
    fitted = [step for step in steps if step.half is Half.FITTED]
    priors = _priors(fitted)
    names = list(priors)

    def residuals(logs: Sequence[float]) -> list[float]:
        point = dict(zip(names, np.exp(logs), strict=True))
        errors = [outcome.error / ERROR for outcome in _outcomes(fitted, point)]
        pulls = [
            float(np.log(point[name] / priors[name])) / WIDTHS.get(name.partition("@")[0], WIDTH)
            for name in names
        ]
        return [*errors, *pulls]

    solution = least_squares(residuals, np.log(list(priors.values())))
    point = {name: float(f"{v:.3g}") for name, v in zip(names, np.exp(solution.x), strict=True)}
    outcomes = _outcomes(steps, point)
    for outcome in outcomes:
        _print(outcome)
    _store(point, outcomes)


def _priors(fitted: Sequence[PublishedStep]) -> Point:
    """The constants that the fit varies."""
    chips = dict.fromkeys(step.experiment.topology.chip.name for step in fitted)
    by_chip = {f"matmul@{chip}": MATMUL_PRIORS[chip] for chip in chips}
    by_chip |= {f"attention@{chip}": ATTENTION_PRIORS[chip] for chip in chips}
    return SHARED_PRIORS | by_chip


def _constants(point: Mapping[str, float], chip: str) -> ClosedConstants:
    shared = {name: point[name] for name in SHARED_PRIORS}
    return ClosedConstants(
        **shared,
        matmul=point.get(f"matmul@{chip}", MATMUL_PRIORS[chip]),
        attention=point.get(f"attention@{chip}", ATTENTION_PRIORS[chip]),
        streams_weights=True,
    )


def _outcomes(steps: Sequence[PublishedStep], point: Point) -> list[Outcome]:
    efficiencies = {
        chip: ChipEfficiency(constants=_constants(point, chip)) for chip in MATMUL_PRIORS
    }
    return [Outcome(step=step, modeled_s=closed_s(step, efficiencies[step.chip])) for step in steps]


def _print(outcome: Outcome) -> None:
    step = outcome.step
    print(
        f"{step.half:8s} {step.id:30s} {step.device_s * 1e3:8.2f} {outcome.modeled_s * 1e3:8.2f} ms "
        f"{np.expm1(outcome.error):+.0%}"
    )


def _store(point: Point, outcomes: Sequence[Outcome]) -> None:
    holdout = [outcome for outcome in outcomes if outcome.step.half is Half.HOLDOUT]
    spreads = {
        phase.value: _spread([o.error for o in holdout if o.step.phase is phase]) for phase in Phase
    }
    chips = [chip.name for chip in CHIPS.values() if chip.kind is ChipKind.TPU]
    by_chip = {chip: asdict(_constants(point, chip)) for chip in chips}
    update_constants(
        "closed_form",
        by_chip | {ALL_CHIPS: by_chip["v6e"]},
        record={
            "source": "Fitted to every second published step of tools/published_steps.csv, with the "
            "priors of tools/fit_closed_form.py; the other steps give the spreads.",
            "n_fitted": len(outcomes) - len(holdout),
            "n_holdout": len(holdout),
            "spreads": spreads,
        },
    )
    print(f"spreads {spreads}, holdout median {np.median([abs(o.error) for o in holdout]):.1%}")


def _spread(errors: Sequence[float]) -> float:
    """The factor that covers `MIN_FRAC` of the errors."""
    return float(f"{np.exp(np.quantile(np.abs(errors), MIN_FRAC, method='higher')):.3g}")


if __name__ == "__main__":
    fit()
