"""Robust fit of latency and inverse bandwidth to measured times, by relative error."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from meshscope.errors import SpecError

MIN_POINTS = 3  # two constants and one point to check them
N_ROUNDS = 30
HUBER = 1.345  # standard deviations beyond which a point loses weight (Huber 1981: 95 % efficiency)
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
EXACT = 1e-12  # relative errors below this are rounding
COVERAGE = 0.9  # of the intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFit:
    """seconds = `latency_s` + `inverse_bandwidth` x work (the alpha-beta model).

    `log_errors` are ln(fitted / measured), point by point.
    """

    latency_s: float
    inverse_bandwidth: float
    log_errors: tuple[float, ...]


def fit_line(
    work: Sequence[float], seconds: Sequence[float], *, name: str, latency_s: float | None = None
) -> LineFit:
    """The alpha-beta line with the least relative error, robust against outliers.

    Iteratively reweighted least squares with Huber weights on relative errors. A given `latency_s` is
    kept and only the inverse bandwidth is fitted. SpecError for too few points or sizes, or if the best
    line has a negative latency or bandwidth.
    """
    x, y = np.asarray(work, dtype=float), np.asarray(seconds, dtype=float)
    _check_points(x, y, name=name, is_latency_given=latency_s is not None)
    latency, slope = _weighted_line(x, y, 1 / y, latency_s)
    for _ in range(N_ROUNDS):
        error = np.abs((latency + slope * x) / y - 1)
        scale = NORMAL * float(np.median(error))
        if scale < EXACT:
            break
        huber = np.minimum(1, HUBER * scale / np.maximum(error, EXACT))
        latency, slope = _weighted_line(x, y, np.sqrt(huber) / y, latency_s)
    if latency < 0 or slope <= 0:
        raise SpecError(
            f"{name}: the best line has a latency of {latency:.3g} s and {slope:.3g} s per unit of work; "
            "neither may be negative. Measure more small and large sizes on an idle machine."
        )
    log_errors = np.log((latency + slope * x) / y)
    return LineFit(
        latency_s=latency, inverse_bandwidth=slope, log_errors=tuple(log_errors.tolist())
    )


def _check_points(x: np.ndarray, y: np.ndarray, *, name: str, is_latency_given: bool) -> None:
    n_sizes = len(set(x.tolist()))
    n_needed = 1 if is_latency_given else MIN_POINTS
    if len(x) < n_needed or (not is_latency_given and n_sizes < 2):
        raise SpecError(
            f"{name}: {len(x)} points of {n_sizes} sizes are too few to fit a latency and a bandwidth. "
            f"Give at least {n_needed} points of 2 sizes."
        )
    if (y <= 0).any():
        raise SpecError(f"{name}: a time of {y.min():g} s is not positive. Remove that point.")


def _weighted_line(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, latency_s: float | None
) -> tuple[float, float]:
    if latency_s is not None:
        slope = np.sum(weight**2 * x * (y - latency_s)) / np.sum((weight * x) ** 2)
        return latency_s, float(slope)
    columns = np.stack([weight, weight * x], axis=1)
    solution, *_ = np.linalg.lstsq(columns, weight * y, rcond=None)
    latency, slope = map(float, solution)
    return latency, slope


def spread_of(log_errors: Sequence[float]) -> float:
    """The factor that covers 90 % of the errors, from holdout errors.

    Split conformal prediction: the ceil((n+1) x 0.9)-th smallest |ln error|. It assumes nothing about
    the error distribution (Vovk; Lei et al. 2018, "Distribution-free predictive inference for
    regression"). With fewer than 9 errors it is the largest one, which covers n/(n+1).
    """
    if not log_errors:
        raise SpecError("no holdout points, so no interval can be given. Add holdout points.")
    ordered = sorted(abs(error) for error in log_errors)
    rank = min(len(ordered), ceil((len(ordered) + 1) * COVERAGE))
    return float(np.exp(ordered[rank - 1]))
