"""A disaggregated server: prefill and decode on separate instances, and the transfer of caches between them.

Requests take turns among the prefill engines. An engine keeps the blocks of a prompt after its first
token, until a decode engine, in turn again, has room for it and has fetched its keys and values. An engine
sends and receives one cache at a time, and so do engines that share the network of a host or the links of
an instance: caches follow each other at the full rate, which takes as long in all as an equal share of the
rate.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from heapq import heappush
from math import inf
from typing import NamedTuple

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.constants import LinkConstants, constants_of
from meshscope.hardware.interconnect.fabric import fabric_of
from meshscope.hardware.interconnect.lines import CollectiveLine, collective_lines, fastest
from meshscope.hardware.interconnect.strategies import geometry_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.experiment import Experiment
from meshscope.serving import engine
from meshscope.serving.load import Load
from meshscope.serving.running import ServedSequence
from meshscope.serving.served_requests import ServedRequests, inboxes
from meshscope.serving.step_costs import sequence_bytes

Networks = tuple[tuple[int, ...], ...]  # by engine, or by rank of an instance
SHARED_BYTES = float(1 << 30)  # that each device sends, to see whether ranks slow each other
NEAR = 1 + 1e-9


class TransferPath(StrEnum):
    """What connects the instances: links of one slice, or the data center network."""

    ICI = "ici"
    DCN = "dcn"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransfer:
    """Bytes of a prompt's cache over all receiving devices, and the lines of senders and receivers.

    Each device of a side moves an equal part; `sides` pairs the number of devices with the lines of their
    links. `networks` lists, for each rank of a prefill and of a decode instance, the hosts whose network it
    uses, or one number for all ranks that share links. Batches of a pipeline are ranks with the same networks.
    """

    path: TransferPath
    fixed_bytes: float
    token_bytes: float
    sides: tuple[tuple[int, tuple[CollectiveLine, ...]], ...]
    networks: tuple[Networks, ...]
    host_bytes_per_s: float | None = None  # what a host moves instead of the rate of its network

    def n_bytes(self, n_tokens: int) -> float:
        """Bytes of a prompt of this length."""
        return self.fixed_bytes + self.token_bytes * n_tokens

    def seconds(self, n_tokens: int) -> float:
        """Seconds of a prompt that has the links to itself, on the slower side."""
        n_bytes = self.n_bytes(n_tokens)
        if self.host_bytes_per_s is not None:
            n_hosts = min(len(of_rank[0]) for of_rank in self.networks)
            return n_bytes / n_hosts / self.host_bytes_per_s
        return max(fastest(lines, n_bytes / n).seconds(n_bytes / n) for n, lines in self.sides)


def cache_transfer(
    prefill: Experiment,
    decode: Experiment,
    path: TransferPath,
    constants: LinkConstants | None = None,
) -> CacheTransfer:
    """The transfer between one rank of each instance, in the cache layout of the decoding one.

    Over ICI, the instances are neighbors in a slice. SpecError for different chips, or instances that
    cannot be connected so.
    """
    if prefill.topology.chip != decode.topology.chip:
        raise SpecError(
            f"prefill on {prefill.topology.name} and decode on {decode.topology.name}: the time of the "
            "transfer is modeled between equal chips. Use slices of one chip."
        )
    constants = constants or constants_of(decode.topology.chip)
    fixed_bytes, token_bytes = sequence_bytes(decode)
    # The devices that hold the cache of a sequence of the first rank.
    sides = [(one, one.mesh.groups("pp", "cp", "tp")[0]) for one in (prefill, decode)]
    n_receivers = len(sides[1][1])
    return CacheTransfer(
        path=path,
        fixed_bytes=fixed_bytes * n_receivers,
        token_bytes=token_bytes * n_receivers,
        sides=tuple((len(d), _lines(one.topology, d, path, constants)) for one, d in sides),
        networks=tuple(_networks(one, path, constants) for one, _ in sides),
    )


def networks_of_engines(n_engines: int, of_instance: Networks) -> Networks:
    """The networks of all engines of a pool, which take one rank of each instance after the other."""
    n_instances = n_engines // len(of_instance)
    stride = 1 + max(network for of_rank in of_instance for network in of_rank)
    return tuple(
        tuple(instance * stride + network for network in of_rank)
        for of_rank in of_instance
        for instance in range(n_instances)
    )


def _lines(
    topology: Topology, devices: tuple[int, ...], path: TransferPath, constants: LinkConstants
) -> tuple[CollectiveLine, ...]:
    """The lines of these devices, which send all at once to the same devices of an equal instance."""
    match path:
        case TransferPath.DCN:
            pair = replace(topology, n_slices=2 * topology.n_slices)
            groups = tuple((device, device + topology.n_devices) for device in devices)
        case TransferPath.ICI:
            pair = _joined_slice(topology)
            groups = _neighbors(topology, pair, devices)
    return collective_lines(Kind.SEND, geometry_of(pair, groups), constants)


def _networks(experiment: Experiment, path: TransferPath, constants: LinkConstants) -> Networks:
    """The networks of each rank and of each batch of a pipeline: hosts, or links that ranks may share."""
    plan, topology = experiment.plan, experiment.topology
    ranks = plan.mesh.groups("pp", "cp", "tp")
    match path:
        case TransferPath.DCN if topology.chip.kind is ChipKind.TPU:
            host = fabric_of(topology).host
            networks = [tuple(sorted({int(host[device]) for device in rank})) for rank in ranks]
        case TransferPath.DCN:  # each GPU has a network interface
            networks = [tuple(rank) for rank in ranks]
        case TransferPath.ICI:
            every = tuple(device for rank in ranks for device in rank)
            one_s, all_s = (
                fastest(lines, SHARED_BYTES).seconds(SHARED_BYTES)
                for lines in (_lines(topology, d, path, constants) for d in (ranks[0], every))
            )
            is_shared = all_s > one_s * NEAR
            networks = [(0 if is_shared else number,) for number in range(len(ranks))]
    return tuple(networks * plan.pp)


def _joined_slice(topology: Topology) -> Topology:
    if topology.chip.kind is not ChipKind.TPU or topology.n_slices > 1:
        raise SpecError(
            f"instances of {topology.name} are not parts of a slice. Use --transfer dcn."
        )
    grid = list(topology.grid)
    grid[grid.index(min(grid))] *= 2
    joined = replace(topology, grid=tuple(grid))
    try:
        return parse_topology(joined.name)
    except SpecError as error:
        raise SpecError(
            f"two instances of {topology.name} do not fit in one slice ({error}) Use --transfer dcn."
        ) from error


def _neighbors(topology: Topology, joined: Topology, devices: tuple[int, ...]) -> Groups:
    """Each device with the one at its place in the second half of the joined slice."""
    places, joined_places = (
        [(*at, core) for at, core in zip(one.coordinates.tolist(), one.core.tolist(), strict=True)]
        for one in (fabric_of(topology), fabric_of(joined))
    )
    ids: dict[tuple[int, ...], int] = {place: number for number, place in enumerate(joined_places)}
    offset = [a if a != b else 0 for a, b in zip(topology.grid, joined.grid, strict=True)]
    offset += [0] * (4 - len(offset))  # places have x, y, z and the core
    moved = {d: tuple(map(sum, zip(places[d], offset, strict=True))) for d in devices}
    return tuple((ids[places[d]], ids[moved[d]]) for d in devices)


class FetchedCache(NamedTuple):
    """A transfer: when its prompt was ready, and its start and end."""

    ready_s: float
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class ApartServer:
    """Prefill and decode engines that share a load; a client has at most `max_concurrency` requests in flight.

    The `networks` of each engine of both pools are numbers; engines that share one have a number in common.
    """

    load: Load
    prefill_pool: engine.EnginePool
    decode_pool: engine.EnginePool
    transfer: CacheTransfer
    max_concurrency: int | None = None
    networks: tuple[Networks, ...] = field(init=False)
    requests: ServedRequests = field(init=False)
    prefill: tuple[engine.BatchingEngine, ...] = field(init=False)
    decode: tuple[engine.BatchingEngine, ...] = field(init=False)
    transfers: list[FetchedCache] = field(default_factory=list[FetchedCache])
    n_held: dict[int, int] = field(default_factory=dict[int, int])  # blocks, by request
    _n_handed: int = 0
    _free_s: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    _busy_s: defaultdict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        """All engines are idle."""
        n_prefill, n_decode = numbers = self.prefill_pool.n_engines, self.decode_pool.n_engines
        self.networks = tuple(map(networks_of_engines, numbers, self.transfer.networks))
        self.requests = requests = ServedRequests(load=self.load)
        limit, delay_s = self.max_concurrency, self.prefill_pool.policy.host_request_s
        self.prefill = tuple(
            engine.BatchingEngine(
                pool=self.prefill_pool,
                requests=requests,
                inbox=inbox,
                hand_off=partial(self._hand_off, i),
            )
            for i, inbox in enumerate(inboxes(requests, n_prefill, limit, delay_s=delay_s))
        )
        self.decode = tuple(
            engine.BatchingEngine(
                pool=self.decode_pool, requests=requests, inbox=[], fetch=partial(self._fetch, i)
            )
            for i in range(n_decode)
        )

    def run(self, until_s: float = inf) -> "ApartServer":
        """The server after a simulation until all requests are done, or until the first event at or after `until_s`.

        With a limit of requests in flight, one that a decode engine ends lets the client send the next.
        """
        engines = (*self.prefill, *self.decode)
        senders = self.prefill if self.max_concurrency is None else engines
        engine.run_engines(engines, until_s, senders)
        return self

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
        used = [("send", network) for network in self.networks[0][source]]
        used += [("receive", network) for network in self.networks[1][target]]
        start_s = max(now_s, *(self._free_s[network] for network in used))
        end_s = start_s + self.transfer.seconds(sequence.n_target)
        for network in used:
            self._free_s[network] = end_s
            self._busy_s[network] += end_s - start_s
        heappush(self.prefill[source].releases, (end_s, self.n_held.pop(sequence.number)))
        self.transfers.append(FetchedCache(ready_s, start_s, end_s))
        return end_s
