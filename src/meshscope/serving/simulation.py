"""A serving load on the instances of a server: figures, and the rate beyond which the queue grows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshscope.errors import read_only
from meshscope.plans.experiment import Experiment
from meshscope.serving.apart import ApartServer
from meshscope.serving.engine import BatchingEngine, EnginePool, check_longest, run_engines
from meshscope.serving.load import BenchResult, Load
from meshscope.serving.results import (
    EngineRole,
    Percentiles,
    PoolFigures,
    RequestFigures,
    ServiceLimits,
    percentiles,
    pool_figures,
    request_figures,
)
from meshscope.serving.sequences import ServedRequests, ServedSequence, arriving, inboxes
from meshscope.serving.step_costs import BLOCK_TOKENS
from meshscope.serving.transfer import CacheTransfer, networks_of_engines

# The middle of a saturated run: ramp-up and the last requests are left out.
_SATURATED = (0.2, 0.8)
MIN_SATURATED = 64  # requests
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """The result, and what it was made from: requests, and the engines that were simulated by role."""

    result: SimulatedLoad
    requests: ServedRequests
    engines: Mapping[EngineRole, tuple[BatchingEngine, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPool:
    """Instances of a server: the slice and plan of each, and the engines of all."""

    experiment: Experiment
    n_instances: int
    pool: EnginePool

    @property
    def n_chips(self) -> int:
        """Chips of all instances."""
        return self.n_instances * self.experiment.topology.n_chips

    @property
    def n_cache_tokens(self) -> int:
        """Tokens in the cache of one engine."""
        return self.pool.blocks.n_blocks * BLOCK_TOKENS


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

    @property
    def is_host_bound(self) -> bool:
        """Whether the host takes more of a step than the device."""
        return self.host_s > self.device_itl_s


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
    objective: ServiceLimits
    left_out: LeftOut
    host_fit: HostFit | None
    simulation: Simulation

    @property
    def result(self) -> SimulatedLoad:
        """The figures."""
        return self.simulation.result

    @property
    def n_chips(self) -> int:
        """Chips of all instances."""
        return self.main.n_chips + (0 if self.prefill is None else self.prefill.n_chips)


def simulated_load(
    load: Load, pool: EnginePool, objective: ServiceLimits, *, max_concurrency: int | None = None
) -> Simulation:
    """The load dealt to the engines of a pool in turn, and simulated on the first.

    The engines share the requests that may be in flight equally.
    """
    n = pool.n_engines
    of_rank = load.only(slice(None, None, n))
    limit = None if max_concurrency is None else max_concurrency // n
    requests, engine = served_alone(of_rank, pool, max_concurrency=limit)
    saturated = n * saturated_rate(of_rank, pool)
    # The engine that gets the last request takes as long for it as the first does for its own.
    end_s = engine.now_s + float(load.arrival_s[-1] - of_rank.arrival_s[-1])
    share = of_rank.n_requests / load.n_requests
    offered = _offered(load)
    figures = request_figures(requests, objective, end_s=end_s, share=share, offered_per_s=offered)
    result = SimulatedLoad(
        offered_per_s=offered,
        max_concurrency=max_concurrency,
        saturated_per_s=saturated,
        figures=figures,
        pools=(
            pool_figures(
                EngineRole.BOTH,
                [engine],
                requests=requests,
                end_s=engine.now_s,
                saturated_per_s=saturated,
            ),
        ),
    )
    return Simulation(result=result, requests=requests, engines={EngineRole.BOTH: (engine,)})


def simulated_apart(  # noqa: PLR0913  both pools and the client
    load: Load,
    *,
    prefill: EnginePool,
    decode: EnginePool,
    transfer: CacheTransfer,
    objective: ServiceLimits,
    max_concurrency: int | None = None,
) -> Simulation:
    """The load on a disaggregated server, with at most so many requests in flight."""
    check_longest(int(load.n_prompt.max()) + 1, prefill.blocks)
    check_longest(int((load.n_prompt + load.n_output).max()), decode.blocks)
    server = _served_apart(load, prefill, decode, transfer, max_concurrency)
    engines = {EngineRole.PREFILL: server.prefill, EngineRole.DECODE: server.decode}
    rates = (prefill_rate(load, prefill), decode_rate(load, decode))
    requests, end_s = server.requests, max(e.now_s for of in engines.values() for e in of)
    saturated = _served_apart(_many(load, decode), prefill, decode, transfer)
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
    result = SimulatedLoad(
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
    return Simulation(result=result, requests=requests, engines=engines)


def _offered(load: Load) -> float | None:
    rate = load.rate_per_s
    return rate if np.isfinite(rate) and load.n_requests > 1 else None


def _served_apart(
    load: Load,
    prefill: EnginePool,
    decode: EnginePool,
    transfer: CacheTransfer,
    max_concurrency: int | None = None,
) -> ApartServer:
    of_prefill, of_decode = transfer.networks
    server = ApartServer(
        load=load,
        prefill_pool=prefill,
        decode_pool=decode,
        transfer_s=transfer.seconds,
        prefill_networks=networks_of_engines(prefill.n_engines, of_prefill),
        decode_networks=networks_of_engines(decode.n_engines, of_decode),
        max_concurrency=max_concurrency,
    )
    server.run()
    return server


def served_alone(
    load: Load, pool: EnginePool, *, max_concurrency: int | None = None
) -> tuple[ServedRequests, BatchingEngine]:
    """All requests on one engine of the pool, with at most `max_concurrency` in flight."""
    check_longest(int((load.n_prompt + load.n_output).max()), pool.blocks)
    requests = ServedRequests(load=load)
    (inbox,) = inboxes(requests, 1, max_concurrency)
    engine = BatchingEngine(pool=pool, requests=requests, inbox=inbox)
    run_engines([engine])
    return requests, engine


def saturated_rate(load: Load, pool: EnginePool) -> float:
    """Requests per second of an engine that never lacks requests of these lengths."""
    requests, _ = served_alone(_many(load, pool), pool)
    return _rate(requests)


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

    only_decodes = replace(pool, policy=limits)
    run_engines([BatchingEngine(pool=only_decodes, requests=requests, inbox=inbox, fetch=fetch)])
    share = decoded.n_requests / load.n_requests
    return pool.n_engines * _rate(requests) / share


def _n_at_once(load: Load, pool: EnginePool) -> int:
    """Sequences of the mean length that an engine holds to their end."""
    mean_blocks = pool.blocks.of(int((load.n_prompt + load.n_output).mean()))
    return max(1, min(pool.policy.max_sequences, pool.blocks.n_blocks // mean_blocks))


def _many(load: Load, pool: EnginePool) -> Load:
    """The requests again and again, all at once, and enough to fill the engines several times."""
    repeats = -(-max(MIN_SATURATED, 4 * _n_at_once(load, pool)) // load.n_requests)
    return Load(
        arrival_s=np.zeros(repeats * load.n_requests),
        n_prompt=np.tile(load.n_prompt, repeats),
        n_output=np.tile(load.n_output, repeats),
    )


def _rate(requests: ServedRequests) -> float:
    """Requests per second over the middle of the run, by their tokens.

    Requests of equal lengths finish together, so the tokens that have come are a steadier measure than
    the requests that are done. The tokens of a request are taken as evenly spread.
    """
    first_s, finish_s = requests.first_token_s, requests.finish_s
    end_s = float(finish_s.max())
    n_later, later_s = requests.n_output - 1, finish_s - first_s

    def n_tokens(at_s: float) -> float:
        share = np.divide(at_s - first_s, later_s, out=np.ones_like(later_s), where=later_s > 0)
        return float(((first_s <= at_s) * (1 + np.clip(share, 0, 1) * n_later)).sum())

    window_s = [frac * end_s for frac in _SATURATED]
    n_between = n_tokens(window_s[1]) - n_tokens(window_s[0])
    return n_between / (window_s[1] - window_s[0]) / float(requests.n_output.mean())


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
