"""Percentiles, goodput and utilization of a simulated load."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from meshscope.serving.engine import BatchingEngine
from meshscope.serving.sequences import FloatArray, ServedRequests

MAX_SAMPLES = 300  # of a timeline


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


class EngineRole(StrEnum):
    """What the engines of a pool do."""

    BOTH = "engine"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """An engine from this time until the next sample: at a step, idle with no tokens, or means over both."""

    time_s: float
    n_running: float
    n_waiting: float
    cache_frac: float
    n_prompt_tokens: float  # of a step
    n_decode_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Utilization of `n_engines` equal engines: means over them, sums of steps, and one engine's timeline.

    `saturated_per_s` is the request rate of all engines if they never lack requests.
    """

    role: EngineRole
    n_engines: int
    saturated_per_s: float
    busy_frac: float
    host_frac: float  # of the busy time
    step_s: float | None  # the mean, host included
    mean_running: float
    peak_waiting: int
    mean_cache_frac: float
    peak_cache_frac: float
    n_steps: int
    n_preemptions: int
    timeline: tuple[TimelineSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """Times of requests, and rates of the whole load until the last token. None without such an event."""

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


def request_figures(
    requests: ServedRequests,
    objective: ServiceLimits,
    *,
    end_s: float,
    share: float = 1.0,
    offered_per_s: float | None = None,
) -> RequestFigures:
    """The figures of a load until its `end_s`, of which `requests` are a share.

    The objective decides which count as goodput. Rates are over the time in which so many requests arrive, if the
    last one ends before the next would come.
    """
    is_done = ~np.isnan(requests.finish_s)
    ttft_s = (requests.first_token_s - requests.arrival_s)[is_done]
    e2e_s = (requests.finish_s - requests.arrival_s)[is_done]
    n_later = requests.n_output[is_done] - 1
    later_s = (requests.finish_s - requests.first_token_s)[is_done]
    tpot_s = np.divide(later_s, n_later, out=np.zeros(len(n_later)), where=n_later > 0)
    is_good = ttft_s <= (np.inf if objective.ttft_s is None else objective.ttft_s)
    is_good &= tpot_s <= (np.inf if objective.tpot_s is None else objective.tpot_s)
    arrive_s = len(is_done) / share / offered_per_s if offered_per_s else 0.0
    span_s = max(_span_s(requests, end_s), arrive_s)
    n_good, n_done = float(is_good.sum()), float(is_done.sum())
    return RequestFigures(
        n_requests=len(is_done),
        n_finished=int(n_done),
        ttft=percentiles(ttft_s),
        tpot=percentiles(tpot_s[n_later > 0]),
        itl=percentiles(*requests.weighted_gaps),
        e2e=percentiles(e2e_s),
        requests_per_s=n_done / share / span_s,
        output_tokens_per_s=requests.n_tokens / share / span_s,
        goodput_frac=n_good / len(is_done),
        goodput_per_s=n_good / share / span_s,
    )


def _span_s(requests: ServedRequests, end_s: float) -> float:
    return max(end_s - float(requests.arrival_s[0]), 1e-12)


def pool_figures(
    role: EngineRole,
    engines: Sequence[BatchingEngine],
    *,
    requests: ServedRequests,
    end_s: float,
    saturated_per_s: float,
) -> PoolFigures:
    """The figures of the simulated engines of a pool, up to the end of the simulation."""
    pool, n = engines[0].pool, len(engines)
    first_s, span_s = float(requests.arrival_s[0]), _span_s(requests, end_s)
    busy_s, n_steps = sum(one.busy_s for one in engines), sum(one.n_steps for one in engines)
    samples, n_blocks = [one.samples for one in engines], pool.blocks.n_blocks
    # Sequences in an engine and used blocks, over the time from the first arrival on.
    running = used = 0.0
    for of_engine in samples if end_s > first_s else ():
        weights_s = np.diff(np.append(of_engine[:, 0], end_s))
        running += float(of_engine[:, 1] @ weights_s) / (end_s - first_s)
        used += float(of_engine[:, 3] @ weights_s) / (end_s - first_s)
    return PoolFigures(
        role=role,
        n_engines=pool.n_engines,
        saturated_per_s=saturated_per_s,
        busy_frac=busy_s / span_s / n,
        host_frac=pool.policy.host_s * n_steps / busy_s if busy_s else 0.0,
        step_s=busy_s / n_steps if n_steps else None,
        mean_running=running / n,
        peak_waiting=max(int(one[:, 2].max(initial=0)) for one in samples),
        mean_cache_frac=used / n / n_blocks,
        peak_cache_frac=max(float(one[:, 3].max(initial=0)) for one in samples) / n_blocks,
        n_steps=n_steps,
        n_preemptions=sum(one.n_preemptions for one in engines),
        timeline=_timeline(samples[0], end_s, n_blocks),
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


def _timeline(samples: FloatArray, end_s: float, n_blocks: int) -> tuple[TimelineSample, ...]:
    """The samples; if they are many, means over MAX_SAMPLES stretches of equal length.

    A value holds until the next sample.
    """
    if len(samples) > MAX_SAMPLES:
        times_s = np.append(samples[:, 0], end_s)
        edges_s = np.linspace(times_s[0], end_s, MAX_SAMPLES + 1)
        columns = [edges_s[:-1]]
        for values in samples[:, 1:].T:
            sums = np.append(0.0, np.cumsum(values * np.diff(times_s)))
            columns.append(np.diff(np.interp(edges_s, times_s, sums)) / np.diff(edges_s))
        samples = np.stack(columns, axis=1)
    return tuple(
        TimelineSample(time_s, running, waiting, used / n_blocks, n_prompt, n_decoded)
        for time_s, running, waiting, used, n_prompt, n_decoded in samples.tolist()
    )
