"""A disaggregated server: prefill and decode on separate instances, and the transfer of caches between them.

Requests take turns among the prefill engines. An engine keeps the blocks of a prompt after its first
token, until a decode engine, in turn again, has room for it and has fetched its keys and values. An engine
sends and receives one cache at a time, and so do engines that share the network of a host or the links of
an instance: caches follow each other at the full rate, which takes as long in all as an equal share of the
rate.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappush
from math import inf

from meshscope.serving.engine import BatchingEngine, EnginePool, run_engines
from meshscope.serving.load import Load
from meshscope.serving.sequences import ServedRequests, ServedSequence, inboxes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedCache:
    """A transfer: when its prompt was ready, and its start and end."""

    ready_s: float
    start_s: float
    end_s: float


Networks = tuple[tuple[int, ...], ...]  # by engine


@dataclass(slots=True, kw_only=True)
class ApartServer:
    """Prefill and decode engines that share a load; `transfer_s` are the seconds of a prompt's cache.

    The networks of each engine are numbers; engines that share one have a number in common. None gives
    each engine a separate network. A client has at most `max_concurrency` requests in flight.
    """

    load: Load
    prefill_pool: EnginePool
    decode_pool: EnginePool
    transfer_s: Callable[[int], float]
    prefill_networks: Networks | None = None
    decode_networks: Networks | None = None
    max_concurrency: int | None = None
    requests: ServedRequests = field(init=False)
    prefill: tuple[BatchingEngine, ...] = field(init=False)
    decode: tuple[BatchingEngine, ...] = field(init=False)
    transfers: list[FetchedCache] = field(default_factory=list[FetchedCache])
    n_held: dict[int, int] = field(default_factory=dict[int, int])  # blocks, by request
    _n_handed: int = 0
    _free_s: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    _busy_s: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        """All engines are idle."""
        n_prefill, n_decode = self.prefill_pool.n_engines, self.decode_pool.n_engines
        self.requests = ServedRequests(load=self.load)
        self.prefill_networks = self.prefill_networks or tuple((i,) for i in range(n_prefill))
        self.decode_networks = self.decode_networks or tuple((i,) for i in range(n_decode))
        self.prefill = tuple(
            BatchingEngine(
                pool=self.prefill_pool,
                requests=self.requests,
                inbox=inbox,
                hand_off=partial(self._hand_off, i),
            )
            for i, inbox in enumerate(inboxes(self.requests, n_prefill, self.max_concurrency))
        )
        self.decode = tuple(
            BatchingEngine(
                pool=self.decode_pool,
                requests=self.requests,
                inbox=[],
                fetch=partial(self._fetch, i),
            )
            for i in range(n_decode)
        )

    def run(self, until_s: float = inf) -> None:
        """Simulates until all requests are done, or until the first event at or after `until_s`.

        With a limit of requests in flight, one that a decode engine ends lets the client send the next.
        """
        engines = (*self.prefill, *self.decode)
        run_engines(engines, until_s, self.prefill if self.max_concurrency is None else engines)

    @property
    def busiest_network_s(self) -> float:
        """Seconds in which the network that moves most caches moves them."""
        return max(self._busy_s.values(), default=0.0)

    def _hand_off(self, source: int, sequence: ServedSequence, now_s: float) -> None:
        target = self.decode[self._n_handed % len(self.decode)]
        self._n_handed += 1
        self.n_held[sequence.number] = sequence.n_blocks
        sequence.prefill_engine, sequence.n_blocks = source, 0
        heappush(target.inbox, (now_s, sequence.number, sequence))

    def _fetch(self, target: int, sequence: ServedSequence, now_s: float) -> float:
        """Books the networks of both engines; returns when the cache is there and its blocks are free."""
        source, ready_s = sequence.prefill_engine, sequence.last_token_s
        assert source is not None
        assert ready_s is not None
        assert self.prefill_networks is not None
        assert self.decode_networks is not None
        used = [("send", network) for network in self.prefill_networks[source]]
        used += [("receive", network) for network in self.decode_networks[target]]
        start_s = max(now_s, *(self._free_s[network] for network in used))
        end_s = start_s + self.transfer_s(sequence.n_target)
        for network in used:
            self._free_s[network] = end_s
            self._busy_s[network] += end_s - start_s
        heappush(self.prefill[source].releases, (end_s, self.n_held.pop(sequence.number)))
        self.transfers.append(FetchedCache(ready_s=ready_s, start_s=start_s, end_s=end_s))
        return end_s
