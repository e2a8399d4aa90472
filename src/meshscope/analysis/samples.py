"""Timed collectives, as calibration measures them, and the line through them.

Bandwidths are as nccl-tests defines them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor

KINDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.PERMUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """Seconds of one collective over a mesh axis; `repeats_s` are the single measurements."""

    axis: str
    groups: Groups
    kind: Kind
    payload_bytes: int
    seconds: float
    repeats_s: tuple[float, ...] = ()

    @property
    def group_size(self) -> int:
        """Devices of a group; 2 for a permute, whose groups are pairs."""
        return len(self.groups[0])

    @property
    def algbw_bytes_per_s(self) -> float:
        """nccl-tests' algorithm bandwidth: payload / time (PERFORMANCE.md)."""
        return self.payload_bytes / self.seconds

    @property
    def busbw_bytes_per_s(self) -> float:
        """nccl-tests' bus bandwidth: algbw x 2(n-1)/n for all-reduce, (n-1)/n, or 1 (PERFORMANCE.md)."""
        return self.algbw_bytes_per_s * float(wire_factor(self.kind, self.group_size))


_MIN_POINTS = 3  # two constants and one point to check them
_N_ROUNDS = 30
# Standard deviations beyond which a point loses weight (Huber 1981: 95 % efficiency).
_HUBER = 1.345
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_EXACT = 1e-12  # relative errors below this are rounding
_COVERAGE = 0.9  # of the intervals


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
    n_sizes, n_needed = len(set(x.tolist())), _MIN_POINTS if latency_s is None else 1
    if len(x) < n_needed or (latency_s is None and n_sizes < 2):
        raise SpecError(
            f"{name}: {len(x)} points of {n_sizes} sizes are too few to fit a latency and a bandwidth. "
            f"Give at least {n_needed} points of 2 sizes."
        )
    if (y <= 0).any():
        raise SpecError(f"{name}: a time of {y.min():g} s is not positive. Remove that point.")
    latency, slope = _weighted_line(x, y, 1 / y, latency_s)
    for _ in range(_N_ROUNDS):
        error = np.abs((latency + slope * x) / y - 1)
        scale = _NORMAL * float(np.median(error))
        if scale < _EXACT:
            break
        huber = np.minimum(1, _HUBER * scale / np.maximum(error, _EXACT))
        latency, slope = _weighted_line(x, y, np.sqrt(huber) / y, latency_s)
    if latency < 0 or slope <= 0:
        raise SpecError(
            f"{name}: the best line has a latency of {latency:.3g} s and {slope:.3g} s per unit of work; "
            "neither may be negative. Measure more small and large sizes on an idle machine."
        )
    errors = np.log((latency + slope * x) / y).tolist()
    return LineFit(latency_s=latency, inverse_bandwidth=slope, log_errors=tuple(errors))


def _weighted_line(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, latency_s: float | None
) -> tuple[float, float]:
    if latency_s is not None:
        slope = np.sum(weight**2 * x * (y - latency_s)) / np.sum((weight * x) ** 2)
        return latency_s, float(slope)
    solution, *_ = np.linalg.lstsq(np.stack([weight, weight * x], axis=1), weight * y, rcond=None)
    return float(solution[0]), float(solution[1])


def spread_of(log_errors: Sequence[float]) -> float:
    """The factor that covers 90 % of the errors, from holdout errors.

    Split conformal prediction: the ceil((n+1) x 0.9)-th smallest |ln error|. It assumes nothing about
    the error distribution (Vovk; Lei et al. 2018, "Distribution-free predictive inference for
    regression"). With fewer than 9 errors it is the largest one, which covers n/(n+1).
    """
    if not log_errors:
        raise SpecError("no holdout points, so no interval can be given. Add holdout points.")
    ordered = sorted(abs(error) for error in log_errors)
    rank = min(len(ordered), ceil((len(ordered) + 1) * _COVERAGE))
    return float(np.exp(ordered[rank - 1]))
