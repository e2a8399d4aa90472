"""A floor and a slowness through measured times: non-negative, robust, by relative error."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from meshscope.errors import SpecError

MIN_POINTS = 3  # two constants and something left to judge by
N_ROUNDS = 30
HUBER = 1.345  # standard deviations beyond which a point counts less (Huber 1981: 95 % efficiency)
NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
EXACT = 1e-12  # relative errors below are rounding
COVERAGE = 0.9  # of the intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFit:
    """seconds = `floor_s` + `slowness` x work; `log_errors` are ln(fitted / measured), point by point."""

    floor_s: float
    slowness: float
    log_errors: tuple[float, ...]


def fit_line(
    work: Sequence[float], seconds: Sequence[float], *, name: str, floor_s: float | None = None
) -> LineFit:
    """The line through (work, seconds) of least relative error, outliers counting less.

    Iteratively reweighted least squares with Huber's weights on relative errors. With `floor_s` only
    the slowness is fitted. SpecError for too few points or sizes, or where the best line has a
    negative floor or slowness, which no wire has.
    """
    x, y = np.asarray(work, dtype=float), np.asarray(seconds, dtype=float)
    n_needed = MIN_POINTS if floor_s is None else 1
    if len(x) < n_needed or (floor_s is None and len(set(work)) < 2):
        raise SpecError(
            f"{name}: {len(x)} points of {len(set(work))} sizes are too few to fit a floor and a rate. "
            f"Give at least {n_needed} points of 2 sizes."
        )
    if (y <= 0).any():
        raise SpecError(f"{name}: a time of {y.min():g} s is not positive. Remove that point.")
    floor, slowness = _solved(x, y, 1 / y, floor_s)
    for _ in range(N_ROUNDS):
        error = np.abs((floor + slowness * x) / y - 1)
        scale = NORMAL * float(np.median(error))
        if scale < EXACT:
            break
        robust = np.minimum(1, HUBER * scale / np.maximum(error, EXACT))
        floor, slowness = _solved(x, y, np.sqrt(robust) / y, floor_s)
    if floor < 0 or slowness <= 0:
        raise SpecError(
            f"{name}: the best line has a floor of {floor:.3g} s and {slowness:.3g} s per unit; neither may be "
            "negative. Measure more sizes, small and large, on an idle machine."
        )
    fitted = floor + slowness * x
    return LineFit(floor_s=floor, slowness=slowness, log_errors=tuple(np.log(fitted / y).tolist()))


def _solved(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, floor_s: float | None
) -> tuple[float, float]:
    if floor_s is not None:
        return floor_s, float(np.sum(weight**2 * x * (y - floor_s)) / np.sum((weight * x) ** 2))
    columns = np.stack([weight, weight * x], axis=1)
    solution, *_ = np.linalg.lstsq(columns, weight * y, rcond=None)
    floor, slowness = map(float, solution)
    return floor, slowness


def spread_of(log_errors: Sequence[float]) -> float:
    """The factor within which a prediction lies of the truth in 90 of 100 cases, from held-out errors.

    Split conformal prediction: the ceil((n+1) x 0.9)-th smallest |ln error|, which needs no
    assumption on how errors are distributed (Vovk; Lei et al. 2018, "Distribution-free predictive
    inference for regression"). With fewer than 9 errors it is the largest, which then covers n/(n+1).
    """
    if not log_errors:
        raise SpecError("no held-out points: an interval cannot be given. Add points that judge.")
    ordered = sorted(abs(error) for error in log_errors)
    rank = min(len(ordered), ceil((len(ordered) + 1) * COVERAGE))
    return float(np.exp(ordered[rank - 1]))
