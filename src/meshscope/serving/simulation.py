"""A serving load on the instances of a server: figures, and the rate beyond which the queue grows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshscope.serving.apart import ApartServer, EnginePool
from meshscope.serving.engine import EngineTrace, check_longest
from meshscope.serving.load import Load
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
from meshscope.serving.sequences import (
    ServedRequests,
    ServedSequence,
    TokenLog,
    arriving,
    inboxes,
)
from meshscope.serving.transfer import CacheTransfer, networks_of_engines

# The middle of a saturated run: ramp-up and the last requests are left out.
_SATURATED = (0.2, 0.8)
MIN_SATURATED = 64  # requests
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

    Equal instances take turns, and one is simulated; prefill and decode apart are simulated whole.
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
    traces: Mapping[EngineRole, tuple[EngineTrace, ...]]


def simulated_load(
    load: Load, pool: EnginePool, objective: ServiceLimits, *, max_concurrency: int | None = None
) -> Simulation:
    """The load dealt to the engines of a pool in turn, and simulated on the first.

    The engines share the requests that may be in flight equally.
    """
    n = pool.n_engines
    of_rank = load.every(n)
    limit = None if max_concurrency is None else max(1, max_concurrency // n)
    requests, trace = served_alone(of_rank, pool, max_concurrency=limit)
    saturated = n * saturated_rate(of_rank, pool)
    result = SimulatedLoad(
        offered_per_s=_offered(load),
        max_concurrency=max_concurrency,
        saturated_per_s=saturated,
        figures=request_figures(requests, objective, end_s=trace.end_s, n_ranks=n),
        pools=(
            pool_figures(
                EngineRole.BOTH,
                [trace],
                requests=requests,
                end_s=trace.end_s,
                n_engines=n,
                n_blocks=pool.blocks.n_blocks,
                host_s=pool.policy.host_s,
                saturated_per_s=saturated,
            ),
        ),
    )
    return Simulation(result=result, requests=requests, traces={EngineRole.BOTH: (trace,)})


def simulated_apart(  # noqa: PLR0913  both pools and the client
    load: Load,
    *,
    prefill: EnginePool,
    decode: EnginePool,
    transfer: CacheTransfer,
    objective: ServiceLimits,
    max_concurrency: int | None = None,
) -> Simulation:
    """The load on prefill and decode instances that are apart, with at most so many requests in flight."""
    check_longest(int(load.n_prompt.max()) + 1, prefill.blocks)
    check_longest(int((load.n_prompt + load.n_output).max()), decode.blocks)
    server = _apart(load, prefill, decode, transfer, max_concurrency=max_concurrency)
    server.run()
    requests = server.log.requests()
    end_s = max(engine.now_s for engine in (*server.prefill, *server.decode))
    pools = {
        EngineRole.PREFILL: (prefill, server.prefill, prefill_rate(load, prefill)),
        EngineRole.DECODE: (decode, server.decode, decode_rate(load, decode)),
    }
    traces = {
        role: tuple(engine.trace() for engine in engines) for role, (_, engines, _) in pools.items()
    }
    result = SimulatedLoad(
        offered_per_s=_offered(load),
        max_concurrency=max_concurrency,
        saturated_per_s=_saturated_apart(load, prefill, decode, transfer),
        figures=request_figures(requests, objective, end_s=end_s),
        pools=tuple(
            pool_figures(
                role,
                traces[role],
                requests=requests,
                end_s=end_s,
                n_engines=pool.n_engines,
                n_blocks=pool.blocks.n_blocks,
                host_s=pool.policy.host_s,
                saturated_per_s=rate,
            )
            for role, (pool, _, rate) in pools.items()
        ),
        transfers=_transfer_figures(load, transfer, server, end_s=end_s),
    )
    return Simulation(result=result, requests=requests, traces=traces)


def _offered(load: Load) -> float | None:
    rate = load.rate_per_s
    return rate if np.isfinite(rate) and load.n_requests > 1 else None


def _apart(
    load: Load,
    prefill: EnginePool,
    decode: EnginePool,
    transfer: CacheTransfer,
    *,
    max_concurrency: int | None = None,
) -> ApartServer:
    sides = zip((prefill, decode), transfer.networks, strict=True)
    networks = [networks_of_engines(pool.n_engines, of_rank) for pool, of_rank in sides]
    return ApartServer(
        load=load,
        prefill_pool=prefill,
        decode_pool=decode,
        transfer_s=transfer.seconds,
        prefill_networks=networks[0],
        decode_networks=networks[1],
        max_concurrency=max_concurrency,
    )


def _transfer_figures(
    load: Load, transfer: CacheTransfer, server: ApartServer, *, end_s: float
) -> TransferFigures | None:
    transfers = server.transfers
    wait = percentiles(np.array([one.start_s - one.ready_s for one in transfers]))
    if wait is None:
        return None
    moved = load.n_prompt[load.n_output > 1]
    return TransferFigures(
        mean_bytes=float(np.mean([transfer.n_bytes(int(n)) for n in moved])),
        mean_s=float(np.mean([one.end_s - one.start_s for one in transfers])),
        wait=wait,
        busy_frac=server.busiest_network_s / end_s,
    )


def served_alone(
    load: Load, pool: EnginePool, *, max_concurrency: int | None = None
) -> tuple[ServedRequests, EngineTrace]:
    """All requests on one engine of the pool, with at most so many of its own in flight."""
    check_longest(int((load.n_prompt + load.n_output).max()), pool.blocks)
    log = TokenLog(load=load)
    (inbox,) = inboxes(log, 1, max_concurrency)
    trace = pool.engine(log, inbox).run()
    return log.requests(), trace


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
    log = TokenLog(load=many)
    inbox = list(arriving(many, range(many.n_requests)))
    for _, _, sequence in inbox:
        sequence.n_left -= 1
        sequence.last_token_s, sequence.prefill_engine = 0.0, 0

    def fetch(sequence: ServedSequence, now_s: float) -> float:
        log.first_token_s[sequence.number] = now_s
        return now_s

    replace(pool, policy=limits).engine(log, inbox, fetch=fetch).run()
    share = decoded.n_requests / load.n_requests
    return pool.n_engines * _rate(log.requests()) / share


def _saturated_apart(
    load: Load, prefill: EnginePool, decode: EnginePool, transfer: CacheTransfer
) -> float:
    many = _many(load, decode)
    server = _apart(many, prefill, decode, transfer)
    server.run()
    return _rate(server.log.requests())


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
