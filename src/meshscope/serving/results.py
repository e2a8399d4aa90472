"""Percentiles, goodput and utilization of a simulated load."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshscope.serving.engine import Served

FloatArray = NDArray[np.float64]
MAX_SAMPLES = 400  # of the timeline in a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds: the mean and percentiles of a distribution."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Upper limits of a request, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSample:
    """The engine at the beginning of a step."""

    time_s: float
    n_running: int
    n_waiting: int
    cache_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFigures:
    """Figures of a rank; rates are per second until the last token. None without such an event."""

    n_requests: int
    n_finished: int
    ttft: Percentiles | None
    tpot: Percentiles | None  # mean time between the tokens of a request
    itl: Percentiles | None  # between two tokens, over all tokens
    e2e: Percentiles | None
    requests_per_s: float
    output_tokens_per_s: float
    goodput_frac: float  # requests within the objective, of all
    goodput_per_s: float
    busy_frac: float
    mean_running: float
    peak_waiting: int
    mean_cache_frac: float
    peak_cache_frac: float
    n_steps: int
    n_preemptions: int
    timeline: tuple[TimelineSample, ...]


def serving_figures(served: Served, objective: ServiceLimits, *, n_blocks: int) -> ServingFigures:
    """The figures of what was served; the objective decides which requests count as goodput."""
    is_done = ~np.isnan(served.finish_s)
    ttft_s = (served.first_token_s - served.arrival_s)[is_done]
    e2e_s = (served.finish_s - served.arrival_s)[is_done]
    n_later = served.n_output[is_done] - 1
    later_s = (served.finish_s - served.first_token_s)[is_done]
    tpot_s = np.divide(later_s, n_later, out=np.zeros(len(n_later)), where=n_later > 0)
    is_good = _within(ttft_s, objective.ttft_s) & _within(tpot_s, objective.tpot_s)
    span_s = max(served.end_s - float(served.arrival_s[0]), 1e-12) if len(is_done) else 1.0
    weights_s = np.diff(np.append(served.samples[:, 0], served.end_s))
    running, waiting, used = served.samples[:, 1:].T
    return ServingFigures(
        n_requests=len(is_done),
        n_finished=int(is_done.sum()),
        ttft=percentiles(ttft_s),
        tpot=percentiles(tpot_s[n_later > 0]),
        itl=percentiles(served.gaps_s, served.n_gaps),
        e2e=percentiles(e2e_s),
        requests_per_s=float(is_done.sum()) / span_s,
        output_tokens_per_s=served.n_tokens / span_s,
        goodput_frac=float(is_good.mean()) if len(is_good) else 0.0,
        goodput_per_s=float(is_good.sum()) / span_s,
        busy_frac=served.busy_s / span_s,
        mean_running=_mean(running, weights_s),
        peak_waiting=int(waiting.max(initial=0)),
        mean_cache_frac=_mean(used, weights_s) / n_blocks,
        peak_cache_frac=float(used.max(initial=0)) / n_blocks,
        n_steps=served.n_steps,
        n_preemptions=served.n_preemptions,
        timeline=_timeline(served.samples, n_blocks),
    )


def percentiles(seconds: FloatArray, counts: NDArray[np.int64] | None = None) -> Percentiles | None:
    """The smallest values that at least 50, 90 and 99 % do not exceed; None without a value."""
    if not len(seconds):
        return None
    weights = np.ones(len(seconds)) if counts is None else counts.astype(float)
    order = np.argsort(seconds)
    reached = np.cumsum(weights[order]) / weights.sum()

    def at(frac: float) -> float:
        index = int(np.searchsorted(reached, frac - 1e-12))
        return float(seconds[order][min(index, len(seconds) - 1)])

    mean_s = float(np.average(seconds, weights=weights))
    return Percentiles(mean_s=mean_s, p50_s=at(0.5), p90_s=at(0.9), p99_s=at(0.99))


def _within(seconds: FloatArray, limit_s: float | None) -> NDArray[np.bool_]:
    return np.ones(len(seconds), bool) if limit_s is None else seconds <= limit_s


def _mean(values: FloatArray, weights: FloatArray) -> float:
    return float(np.average(values, weights=weights)) if weights.sum() > 0 else 0.0


def _timeline(samples: FloatArray, n_blocks: int) -> tuple[TimelineSample, ...]:
    step = max(1, -(-len(samples) // MAX_SAMPLES))
    return tuple(
        TimelineSample(
            time_s=float(time_s),
            n_running=int(running),
            n_waiting=int(waiting),
            cache_frac=float(used) / n_blocks,
        )
        for time_s, running, waiting, used in samples[::step]
    )
