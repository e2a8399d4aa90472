"""Prefill and decode on instances of their own, and the transfer of caches between them.

Requests take turns among the prefill engines. An engine keeps the blocks of a prompt after its first
token, until a decode engine, in turn again, has room for it and has fetched its keys and values. An engine
sends and receives one cache at a time, and so do engines that share the network of a host or the links of
an instance: caches follow each other at the full rate, which takes as long in all as an equal share of the
rate. The engine with the earliest clock acts first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush
from math import inf

from meshscope.serving.cache_blocks import CacheBlocks
from meshscope.serving.engine import BatchingEngine, EnginePolicy
from meshscope.serving.load import Load
from meshscope.serving.sequences import ServedSequence, TokenLog, inboxes
from meshscope.serving.step_costs import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """Equal engines: their number, and the costs, cache and policy of each."""

    n_engines: int
    costs: StepCosts
    blocks: CacheBlocks
    policy: EnginePolicy

    def engine(
        self,
        log: TokenLog,
        inbox: list[tuple[float, int, ServedSequence]],
        *,
        hand_off: Callable[[ServedSequence, float], None] | None = None,
        fetch: Callable[[ServedSequence, float], float] | None = None,
    ) -> BatchingEngine:
        """One of the engines."""
        return BatchingEngine(
            log=log,
            costs=self.costs,
            blocks=self.blocks,
            policy=self.policy,
            inbox=inbox,
            hand_off=hand_off,
            fetch=fetch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedCache:
    """A transfer: when its prompt was ready, and its start and end."""

    ready_s: float
    start_s: float
    end_s: float


Networks = tuple[tuple[int, ...], ...]  # by engine


def own_networks(n_engines: int) -> Networks:
    """A network for each engine."""
    return tuple((i,) for i in range(n_engines))


class NetworkClocks:
    """When each network of a pool of engines is free, and for how long it has moved caches."""

    def __init__(self, networks: Networks) -> None:
        self._networks = networks
        every = {network for of_engine in networks for network in of_engine}
        self._free_s = dict.fromkeys(every, 0.0)
        self.busy_s = dict.fromkeys(every, 0.0)

    def free_s(self, engine: int) -> float:
        """When all networks of the engine are free."""
        return max(self._free_s[network] for network in self._networks[engine])

    def book(self, engine: int, start_s: float, end_s: float) -> None:
        """Uses all networks of the engine for this time."""
        for network in self._networks[engine]:
            self._free_s[network] = end_s
            self.busy_s[network] += end_s - start_s


@dataclass(slots=True, kw_only=True)
class ApartServer:
    """Prefill and decode engines that share a load; `transfer_s` are the seconds of a prompt's cache.

    The networks of each engine are numbers; engines that share one have a number in common. None gives
    each engine a network of its own. A client has at most `max_concurrency` requests in flight.
    """

    load: Load
    prefill_pool: EnginePool
    decode_pool: EnginePool
    transfer_s: Callable[[int], float]
    prefill_networks: Networks | None = None
    decode_networks: Networks | None = None
    max_concurrency: int | None = None
    log: TokenLog = field(init=False)
    prefill: tuple[BatchingEngine, ...] = field(init=False)
    decode: tuple[BatchingEngine, ...] = field(init=False)
    transfers: list[FetchedCache] = field(default_factory=list[FetchedCache])
    _n_handed: int = 0
    _n_held: dict[int, int] = field(default_factory=dict[int, int])  # blocks, by request
    _sends: NetworkClocks = field(init=False)
    _receives: NetworkClocks = field(init=False)

    def __post_init__(self) -> None:
        """All engines are idle."""
        n_prefill, n_decode = self.prefill_pool.n_engines, self.decode_pool.n_engines
        self.log = TokenLog(load=self.load)
        self._sends = NetworkClocks(self.prefill_networks or own_networks(n_prefill))
        self._receives = NetworkClocks(self.decode_networks or own_networks(n_decode))
        self.prefill = tuple(
            self.prefill_pool.engine(
                self.log,
                inbox,
                hand_off=lambda sequence, now_s, i=i: self._hand_off(i, sequence, now_s),
            )
            for i, inbox in enumerate(inboxes(self.log, n_prefill, self.max_concurrency))
        )
        self.decode = tuple(
            self.decode_pool.engine(
                self.log, [], fetch=lambda sequence, now_s, i=i: self._fetch(i, sequence, now_s)
            )
            for i in range(n_decode)
        )

    def run(self, until_s: float = inf) -> None:
        """Simulates until all requests are done, or until the first event at or after `until_s`."""
        engines = (*self.prefill, *self.decode)
        while True:
            engine = min(engines, key=lambda one: one.next_s)
            if engine.next_s >= until_s:
                return
            engine.act(lambda engine=engine: self._horizon_s(engine))

    @property
    def n_held_blocks(self) -> tuple[int, ...]:
        """Blocks of each prefill engine that keep caches until they have been fetched."""
        held = [sum(n for _, n in engine.releases) for engine in self.prefill]
        for engine in self.decode:
            queued = (*engine.waiting, *(sequence for _, _, sequence in engine.inbox))
            for sequence in queued:
                if sequence.prefill_engine is not None:
                    held[sequence.prefill_engine] += self._n_held[sequence.number]
        return tuple(held)

    @property
    def busiest_network_s(self) -> float:
        """Seconds in which the network that moves most caches moves them."""
        return max(*self._sends.busy_s.values(), *self._receives.busy_s.values())

    def _horizon_s(self, acting: BatchingEngine) -> float:
        """No sequence is handed off before this time, unless the acting engine lets a client send it.

        Without a limit, only prefill engines hand off. With one, a request that another engine ends lets
        the client send the next.
        """
        others = self.prefill if self.max_concurrency is None else (*self.prefill, *self.decode)
        return min((one.next_s for one in others if one is not acting), default=inf)

    def _hand_off(self, source: int, sequence: ServedSequence, now_s: float) -> None:
        """Queues a prefilled sequence at the next decode engine."""
        target = self.decode[self._n_handed % len(self.decode)]
        self._n_handed += 1
        self._n_held[sequence.number] = sequence.n_blocks
        sequence.prefill_engine, sequence.n_blocks = source, 0
        heappush(target.inbox, (now_s, sequence.number, sequence))

    def _fetch(self, target: int, sequence: ServedSequence, now_s: float) -> float:
        """Books the networks of both engines; returns when the cache is there and its blocks are free."""
        source, ready_s = sequence.prefill_engine, sequence.last_token_s
        assert source is not None
        assert ready_s is not None
        start_s = max(now_s, self._sends.free_s(source), self._receives.free_s(target))
        end_s = start_s + self.transfer_s(sequence.n_target)
        self._sends.book(source, start_s, end_s)
        self._receives.book(target, start_s, end_s)
        self.prefill[source].release_at(end_s, self._n_held.pop(sequence.number))
        self.transfers.append(FetchedCache(ready_s=ready_s, start_s=start_s, end_s=end_s))
        return end_s
