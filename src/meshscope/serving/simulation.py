"""A serving load on the instances of a server: figures, and the rate beyond which the queue grows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import read_only
from meshscope.plans.experiment import Experiment
from meshscope.serving.apart import ApartServer, CacheTransfer
from meshscope.serving.benchmarks import BenchResult
from meshscope.serving.engine import (
    BatchingEngine,
    EnginePool,
    check_longest,
    run_engines,
    run_together,
)
from meshscope.serving.load import Load
from meshscope.serving.objective import Objective
from meshscope.serving.running import ServedSequence
from meshscope.serving.served_requests import ServedRequests, arriving, inboxes
from meshscope.serving.servers import ServingEngine
from meshscope.serving.step_costs import FloatArray, LoadedPrograms

MIN_SPAN_S = 1e-12


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds: the mean and percentiles of a distribution."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class EngineRole(StrEnum):
    """What the engines of a pool do."""

    BOTH = "engine"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Utilization of `n_engines` equal engines: means over them, and sums of steps.

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
    objective: Objective,
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
    n_later = requests.load.n_output[is_done] - 1
    later_s = (requests.finish_s - requests.first_token_s)[is_done]
    tpot_s = np.divide(later_s, n_later, out=np.zeros(len(n_later)), where=n_later > 0)
    is_good = objective.meets(ttft_s, tpot_s)
    arrive_s = len(is_done) / share / offered_per_s if offered_per_s else 0.0
    span_s = max(end_s - float(requests.arrival_s[0]), MIN_SPAN_S, arrive_s)
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
    first_s = float(requests.arrival_s[0])
    span_s = max(end_s - first_s, MIN_SPAN_S)
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
        host_frac=1 - sum(one.device_s for one in engines) / busy_s if busy_s else 0.0,
        step_s=busy_s / n_steps if n_steps else None,
        mean_running=running / n,
        peak_waiting=max(int(one[:, 2].max(initial=0)) for one in samples),
        mean_cache_frac=used / n / n_blocks,
        peak_cache_frac=max(float(one[:, 3].max(initial=0)) for one in samples) / n_blocks,
        n_steps=n_steps,
        n_preemptions=sum(one.n_preemptions for one in engines),
    )


def percentiles(seconds: FloatArray, counts: NDArray[np.int64] | None = None) -> Percentiles | None:
    """The smallest values that at least 50, 90 and 99 % do not exceed; None without a value."""
    if not len(seconds):
        return None
    weights = np.ones(len(seconds)) if counts is None else counts.astype(float)
    mean_s = float(np.average(seconds, weights=weights))
    levels = np.quantile(seconds, (0.5, 0.9, 0.99), weights=weights, method="inverted_cdf")
    return Percentiles(mean_s, *levels.tolist())


# The middle of a saturated run: ramp-up and the last requests are left out.
_SATURATED = (0.2, 0.8)
MIN_SATURATED = 64  # requests
MANY_REQUESTS = 8192
HOST_TOLERANCE = 0.005  # of the measured ITL
STABLE_FRAC = 0.98  # of the saturated rate; above, queues of random arrivals grow for long


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFigures:
    """Transfers of caches: bytes and seconds of the mean one, and the time from first token to arrival.

    `wait` is the time that a prompt's cache waits for room and for the network, and `busy_frac` the share of
    the time in which the busiest network of a host, or the busiest links of an instance, move caches.
    """

    mean_bytes: float
    mean_s: float
    wait: Percentiles
    busy_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Figures of a load; rates are requests per second of all instances.

    Equal instances take turns, and one is simulated; a disaggregated server is simulated whole.
    """

    offered_per_s: float | None  # None if all arrive at once
    saturated_per_s: float
    figures: RequestFigures
    pools: tuple[PoolFigures, ...]
    max_concurrency: int | None = None  # requests in flight at most
    prefix_hit_frac: float | None = None  # prompt tokens from a simulated prefix cache
    transfers: TransferFigures | None = None

    @property
    def is_stable(self) -> bool | None:
        """Whether requests are served as fast as they arrive; None if all arrive at once."""
        if self.offered_per_s is None:
            return None
        return self.offered_per_s <= STABLE_FRAC * self.saturated_per_s

    @property
    def slowest(self) -> PoolFigures:
        """The pool that limits the rate."""
        return min(self.pools, key=lambda pool: pool.saturated_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPool:
    """Instances of a server: the slice and plan of each, and the engines of all."""

    experiment: Experiment
    n_instances: int
    pool: EnginePool
    programs: LoadedPrograms | None = (
        None  # that give the steps their times; None for the closed form
    )

    @property
    def n_chips(self) -> int:
        """Chips of all instances."""
        return self.n_instances * self.experiment.topology.n_chips

    @property
    def n_cache_tokens(self) -> int:
        """Tokens in the cache of one engine."""
        return self.pool.blocks.n_blocks * self.pool.blocks.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Requests that are not simulated: without tokens, or longer than the model's context or the cache."""

    n_empty: int = 0
    n_beyond_context: int = 0
    n_beyond_cache: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Seconds of the host in a step, with the median ITL measured and without any host time."""

    host_s: float
    measured_itl_s: float
    device_itl_s: float


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOutcome:
    """The result of a simulation with what was simulated.

    `prefill` are the instances that only prefill, with the transfer of caches from them; None if all
    instances do both. `load` says in words what arrives.
    """

    main: PlacedPool
    prefill: PlacedPool | None
    transfer: CacheTransfer | None
    load: str
    mean_tokens: tuple[float, float]  # of prompts and outputs
    objective: Objective
    left_out: LeftOut
    host_fit: HostFit | None
    result: SimulatedLoad
    server: ServingEngine | None = None

    @property
    def n_chips(self) -> int:
        """Chips of all instances."""
        return self.main.n_chips + (0 if self.prefill is None else self.prefill.n_chips)


def _served(
    load: Load, pool: EnginePool, max_concurrency: int | None
) -> tuple[ServedRequests, list[BatchingEngine], dict[str, Any]]:
    """The load on all engines of a pool, or on the first one of equal engines with equal shares, and that share."""
    n = pool.n_engines
    is_shared = max_concurrency is None or max_concurrency % n == 0
    is_shared &= load.prefixes is None and load.conversations is None
    if (pool.policy.steps_together and n > 1) or not is_shared:
        requests, engines = served_whole(load, pool, max_concurrency=max_concurrency)
        return requests, engines, {"share": 1.0, "end_s": float(requests.finish_s.max())}
    of_rank = load.only(slice(None, None, n))
    limit = None if max_concurrency is None else max_concurrency // n
    requests, engine = served_alone(of_rank, pool, max_concurrency=limit)
    # The engine that gets the last request takes as long for it as the first does for its own.
    end_s = engine.now_s + float(load.arrival_s[-1] - of_rank.arrival_s[-1])
    return requests, [engine], {"share": of_rank.n_requests / load.n_requests, "end_s": end_s}


def load_figures(
    load: Load, pool: EnginePool, objective: Objective, *, max_concurrency: int | None = None
) -> RequestFigures:
    """The figures of a load on a pool, without the rate that it would serve at most."""
    requests, _, ends = _served(load, pool, max_concurrency)
    return request_figures(requests, objective, offered_per_s=_offered(load), **ends)


def simulated_load(
    load: Load, pool: EnginePool, objective: Objective, *, max_concurrency: int | None = None
) -> SimulatedLoad:
    """The load dealt to the engines of a pool.

    Equal engines take requests in turn, share those in flight equally, and one is simulated. Ranks that step
    together are all simulated, and so are engines with unequal shares.
    """
    (requests, engines, ends), offered = _served(load, pool, max_concurrency), _offered(load)
    n = pool.n_engines
    if n > 1 and (pool.policy.steps_together or load.prefixes or load.conversations):
        saturated = _rate(served_whole(_many(load, pool, n), pool)[0])
    else:
        saturated = n * saturated_rate(load.only(slice(None, None, n)), pool)
    caches = [one.prefixes for one in engines if one.prefixes is not None]
    n_asked, end_s = sum(one.n_asked for one in caches), engines[0].now_s
    if ends["share"] == 1:
        end_s = ends["end_s"]
    of_pool = pool_figures(
        EngineRole.BOTH, engines, requests=requests, end_s=end_s, saturated_per_s=saturated
    )
    return SimulatedLoad(
        offered_per_s=offered,
        max_concurrency=max_concurrency,
        saturated_per_s=saturated,
        prefix_hit_frac=sum(one.n_hit for one in caches) / n_asked if n_asked else None,
        figures=request_figures(requests, objective, offered_per_s=offered, **ends),
        pools=(of_pool,),
    )


def reach_sizes(load: Load, pool: EnginePool, max_concurrency: int | None) -> None:
    """Asks the costs of the pool for the sizes of steps that the load reaches on new engines."""
    _served(load, pool, max_concurrency)


def simulated_apart(  # noqa: PLR0913  both pools and the client
    load: Load,
    *,
    prefill: EnginePool,
    decode: EnginePool,
    transfer: CacheTransfer,
    objective: Objective,
    max_concurrency: int | None = None,
) -> SimulatedLoad:
    """The load on a disaggregated server, with at most so many requests in flight."""
    check_longest(int(load.n_prompt.max()) + 1, prefill.blocks)
    check_longest(int((load.n_prompt + load.n_output).max()), decode.blocks)
    pools = partial(ApartServer, prefill_pool=prefill, decode_pool=decode, transfer=transfer)
    server = pools(load=load, max_concurrency=max_concurrency).run()
    engines = {EngineRole.PREFILL: server.prefill, EngineRole.DECODE: server.decode}
    rates = (prefill_rate(load, prefill), decode_rate(load, decode))
    requests, end_s = server.requests, max(e.now_s for of in engines.values() for e in of)
    saturated = pools(load=_many(load, decode)).run()
    offered = _offered(load)
    wait = percentiles(np.array([one.start_s - one.ready_s for one in server.transfers]))
    transfers = None
    if wait is not None:
        moved = load.n_prompt[load.n_output > 1]
        transfers = TransferFigures(
            mean_bytes=float(np.mean([transfer.n_bytes(int(n)) for n in moved])),
            mean_s=float(np.mean([one.end_s - one.start_s for one in server.transfers])),
            wait=wait,
            busy_frac=server.busiest_network_s / end_s,
        )
    return SimulatedLoad(
        offered_per_s=offered,
        max_concurrency=max_concurrency,
        saturated_per_s=_rate(saturated.requests),
        figures=request_figures(requests, objective, end_s=end_s, offered_per_s=offered),
        pools=tuple(
            pool_figures(role, of, requests=requests, end_s=end_s, saturated_per_s=rate)
            for (role, of), rate in zip(engines.items(), rates, strict=True)
        ),
        transfers=transfers,
    )


def _offered(load: Load) -> float | None:
    rate = load.rate_per_s
    return rate if np.isfinite(rate) and load.n_requests > 1 else None


def served_alone(
    load: Load, pool: EnginePool, *, max_concurrency: int | None = None
) -> tuple[ServedRequests, BatchingEngine]:
    """All requests on one engine of the pool, with at most `max_concurrency` in flight."""
    requests, (engine,) = served_whole(load, pool, max_concurrency=max_concurrency, is_alone=True)
    return requests, engine


def served_whole(
    load: Load, pool: EnginePool, *, max_concurrency: int | None = None, is_alone: bool = False
) -> tuple[ServedRequests, list[BatchingEngine]]:
    """All requests on all engines of the pool: ranks that take every step together, or engines in turn."""
    check_longest(int((load.n_prompt + load.n_output).max()), pool.blocks)
    requests, n_engines = ServedRequests(load=load), 1 if is_alone else pool.n_engines
    is_joint = pool.policy.steps_together and not is_alone
    n, delay_s = 1 if is_joint else n_engines, pool.policy.host_request_s
    boxes = inboxes(requests, n, max_concurrency, delay_s=delay_s)
    engines = [
        BatchingEngine(pool=pool, requests=requests, inbox=[] if is_joint else boxes[at])
        for at in range(n_engines)
    ]
    if is_joint:
        run_together(engines, boxes[0])
    else:
        run_engines(engines, senders=engines)
    return requests, engines


def saturated_rate(load: Load, pool: EnginePool) -> float:
    """Requests per second of an engine that never lacks requests of these lengths."""
    return _rate(served_alone(_many(load, pool), pool)[0])


def prefill_rate(load: Load, pool: EnginePool) -> float:
    """Prompts per second of a pool that only prefills and never lacks requests."""
    only_first = replace(load, n_output=np.ones_like(load.n_output))
    return pool.n_engines * saturated_rate(only_first, pool)


def decode_rate(load: Load, pool: EnginePool) -> float:
    """Requests per second of a pool that only decodes, with every cache there at once.

    It takes no more sequences than the cache holds to their end, so none is preempted as long as lengths
    are equal. Infinite if no request has a second token.
    """
    decoded = load.only(load.n_output > 1)
    if not decoded.n_requests:
        return np.inf
    limits = replace(pool.policy, max_sequences=_n_at_once(decoded, pool))
    many = _many(decoded, pool)
    requests, inbox = ServedRequests(load=many), arriving(many)
    for _, _, sequence in inbox:
        sequence.n_left -= 1
        sequence.last_token_s, sequence.prefill_engine = 0.0, 0

    def fetch(sequence: ServedSequence, now_s: float) -> float:
        requests.first_token_s[sequence.number] = now_s
        return now_s

    decodes = replace(pool, policy=limits)
    run_engines([BatchingEngine(pool=decodes, requests=requests, inbox=inbox, fetch=fetch)])
    share = decoded.n_requests / load.n_requests
    return pool.n_engines * _rate(requests) / share


def _n_at_once(load: Load, pool: EnginePool) -> int:
    """Sequences of the mean length that an engine holds to their end."""
    mean_blocks = pool.blocks.of(int((load.n_prompt + load.n_output).mean()))
    return max(1, min(pool.policy.max_sequences, pool.blocks.n_blocks // mean_blocks))


def _many(load: Load, pool: EnginePool, n_engines: int = 1) -> Load:
    """The requests again and again, all there at 0, and enough to fill the engines several times."""
    n_requests = n_engines * max(MIN_SATURATED, 4 * _n_at_once(load, pool))
    is_plain = load.prefixes is None and load.conversations is None
    if is_plain and load.n_requests > max(MANY_REQUESTS, 4 * n_requests):  # some stand for all
        load = load.only(slice(None, None, load.n_requests // (2 * n_requests)))
    many = load.at_once(n_requests)
    return replace(many, arrival_s=many.arrival_s - pool.policy.host_request_s)


def _rate(requests: ServedRequests) -> float:
    """Requests per second over the middle of the run, by their tokens.

    Requests of equal lengths finish together, so the tokens that have come are a steadier measure than
    the requests that are done. The tokens of a request are taken as evenly spread.
    """
    first_s, finish_s = requests.first_token_s, requests.finish_s
    end_s = float(finish_s.max())
    n_later, later_s = requests.load.n_output - 1, finish_s - first_s

    def n_tokens(at_s: float) -> float:
        share = np.divide(at_s - first_s, later_s, out=np.ones_like(later_s), where=later_s > 0)
        return float(((first_s <= at_s) * (1 + np.clip(share, 0, 1) * n_later)).sum())

    window_s = [frac * end_s for frac in _SATURATED]
    n_between = n_tokens(window_s[1]) - n_tokens(window_s[0])
    return n_between / (window_s[1] - window_s[0]) / float(requests.load.n_output.mean())


def fitted_host(bench: BenchResult, pool: EnginePool) -> HostFit:
    """The host time at which the simulated median ITL is the measured one; 0 if it is longer anyway."""
    load, most = bench.load().only(slice(None, None, pool.n_engines)), bench.max_concurrency
    of_engine = None if most is None else max(1, most // pool.n_engines)

    def itl_s(host_s: float) -> float:
        limits = replace(pool.policy, host_s=host_s)
        requests, _ = served_alone(load, replace(pool, policy=limits), max_concurrency=of_engine)
        gaps = percentiles(*requests.weighted_gaps)
        assert gaps is not None  # requests have at least two output tokens
        return gaps.p50_s

    device_s = itl_s(0.0)
    low_s, high_s = 0.0, bench.itl_s if device_s < bench.itl_s else 0.0
    while high_s - low_s > HOST_TOLERANCE * bench.itl_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if itl_s(middle_s) < bench.itl_s else (low_s, middle_s)
    return HostFit(host_s=(low_s + high_s) / 2, measured_itl_s=bench.itl_s, device_itl_s=device_s)
