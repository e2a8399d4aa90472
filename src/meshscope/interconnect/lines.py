"""Alpha-beta lines of a collective, one per strategy: latency, and seconds per byte of payload.

The strategy is the one named in the compiled HLO, else those that libtpu is known to choose. The routes of gathers and scatters per chip are in `compiler_facts.json`. All-reduces
take the faster of one bidirectional ring (libtpu 0.0.42 over 2x4) and multi-color rings (over 4x4, 8x8,
16x16, 2x2x2 and 4x4x4); small ones take short rings on chips for which libtpu has them, and those of
SparseCores multi-color rings.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import inf

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import GatherRoute, compiler_facts
from meshscope.hardware.topology import Topology
from meshscope.interconnect.constants import LinkConstants, Protocol, RateConstants, bandwidth_frac
from meshscope.interconnect.geometry import NETWORK, GroupGeometry, LegDemand, StrategyDemand
from meshscope.interconnect.strategies import (
    BIDIRECTIONAL_RING,
    DIMENSION_ORDERED,
    MULTI_COLOR,
    SHORT,
    UNIDIRECTIONAL_RING,
)

CACHED_LINES = 1 << 15
_GATHERS = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER})

_SHORT_RINGS = re.compile(r"RotatedPincerShort.*multistep ([01](?:,[01])*)")

# Names in compiled HLO and their strategy; the first match wins. "Pincer" rings run both ways. Each
# color of a `UniDirection` ring runs one way, with as many colors as ways. `StrategySubgroupND`
# reduce-scatters were measured at the rate of one link on v5p.
_COMPILER_NAMES: tuple[tuple[str, str], ...] = (
    ("1DAllGather", BIDIRECTIONAL_RING),
    ("2DAllGather", DIMENSION_ORDERED),
    ("3DAllGather", DIMENSION_ORDERED),
    ("StrategySubgroupND", DIMENSION_ORDERED),
    ("UniDirectionNDRing", MULTI_COLOR),
    ("StrategyND", MULTI_COLOR),
    ("UniDirection1DRing", BIDIRECTIONAL_RING),
    ("StrategyRing", BIDIRECTIONAL_RING),
    ("SinglePhaseRingSum", UNIDIRECTIONAL_RING),
    ("SparseCore", MULTI_COLOR),
    # Names of earlier versions of meshscope.
    ("ring, both ways", BIDIRECTIONAL_RING),
    ("ring, one way", UNIDIRECTIONAL_RING),
    ("phases per axis,", MULTI_COLOR),
    ("phases per axis", DIMENSION_ORDERED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """Time of one strategy: launch, then the longer of its hops and its bytes.

    `latency_s` (alpha) is the launch with its barriers, `hops_s` the sequential hops, and `s_per_byte`
    (beta) the bytes. `payloads` are the least and the largest payload for which the compiler takes it.
    """

    strategy: str
    latency_s: float
    s_per_byte: float
    axes: tuple[str, ...]
    hops_s: float = 0.0
    payloads: tuple[float, float] = (0, inf)

    def seconds(self, payload_bytes: float) -> float:
        """Seconds for a payload; infinite for a payload for which the compiler takes another strategy."""
        first, last = self.payloads
        if not first <= payload_bytes <= last:
            return inf
        return self.latency_s + max(self.hops_s, payload_bytes * self.s_per_byte)

    def is_latency_bound(self, payload_bytes: float) -> bool:
        """Whether launch and hops exceed the transfer time."""
        return payload_bytes * self.s_per_byte < self.latency_s + self.hops_s


def fastest(lines: tuple[CollectiveLine, ...], payload_bytes: float) -> CollectiveLine:
    """The line with the least time for a payload."""
    return min(lines, key=lambda line: line.seconds(payload_bytes))


@lru_cache(maxsize=CACHED_LINES)
def collective_lines(
    kind: Kind, geometry: GroupGeometry, constants: LinkConstants, algorithm: str | None = None
) -> tuple[CollectiveLine, ...]:
    """The lines of the strategies open to the compiler; empty if nothing is transferred.

    If `algorithm`, the compiler's own name, matches a strategy of these groups, only that one is
    returned. A collective takes the fastest of its lines.
    """
    demands = _eligible(kind, geometry, algorithm, has_short=constants.hop_s > 0)
    lines = (_lines(kind, geometry.group_size, demand, constants) for demand in demands)
    return tuple(chain.from_iterable(lines))


def _eligible(
    kind: Kind, geometry: GroupGeometry, algorithm: str | None, *, has_short: bool
) -> tuple[StrategyDemand, ...]:
    """The strategies that the compiler may take; latencies measured by size include the short ones."""
    demands = geometry.demands(kind)
    chosen = None if algorithm is None else named_strategy(algorithm)
    matches = tuple(
        replace(demand, payloads=(0, inf)) for demand in demands if demand.name == chosen
    )
    if matches:
        return matches
    plain = tuple(demand for demand in demands if not _is_short(demand))
    available = frozenset(demand.name for demand in (demands if has_short else plain))
    defaults = default_strategies(kind, geometry.topology, available)
    taken = tuple(d for d in demands if defaults is None or d.name in defaults) or plain
    return _beyond_short(taken, offloaded_from(kind, geometry.topology.chip.name))


def _beyond_short(
    demands: tuple[StrategyDemand, ...], offloads_from: float
) -> tuple[StrategyDemand, ...]:
    """Plain strategies start where the short ones end, at the latest where SparseCores take over."""
    short = [
        replace(demand, payloads=(demand.payloads[0], min(demand.payloads[1], offloads_from - 1)))
        for demand in demands
        if _is_short(demand) and demand.payloads[0] < offloads_from
    ]
    start = max((demand.payloads[1] + 1 for demand in short), default=0)
    plain = (demand for demand in demands if not _is_short(demand))
    return (*short, *(replace(demand, payloads=(start, inf)) for demand in plain))


def _is_short(demand: StrategyDemand) -> bool:
    """Whether libtpu takes this strategy for small payloads only."""
    return demand.name.startswith(SHORT)


def _lines(
    kind: Kind, group_size: int, demand: StrategyDemand, constants: LinkConstants
) -> list[CollectiveLine]:
    """The lines of a strategy: one, or one per NCCL protocol, or one on the core and one on SparseCores."""
    rates = constants.rates_of(kind, group_size)
    if constants.protocols:
        # SHARP reduces inside a node only.
        rates = constants.rates if NETWORK in demand.axes else rates
        return [_nccl_line(kind, demand, constants, rates, p) for p in constants.protocols]
    first, last = demand.payloads
    start = offloaded_from(kind, constants.chip) if constants.hop_s else inf
    on_core = constants.rates if start < inf else rates
    return [
        CollectiveLine(
            strategy=demand.name,
            latency_s=taken.latency_s,
            hops_s=demand.n_hops * (constants.hop_s if taken.hop_s is None else taken.hop_s),
            s_per_byte=_demand_s_per_byte(demand, constants, taken),
            axes=demand.axes,
            payloads=payloads,
        )
        for taken, payloads in (
            (on_core, (first, min(last, start - 1))),
            (rates, (max(first, start), last)),
        )
        if payloads[0] <= payloads[1]
    ]


def _demand_s_per_byte(
    demand: StrategyDemand, constants: LinkConstants, rates: RateConstants
) -> float:
    efficiency = rates.efficiency
    if _is_short(demand):
        # From VMEM to VMEM. Links reach 98 to 100 % of their rate on v5p and v6e; what v5e and tpu7x lose,
        # and the limit of links at once, were measured between HBMs.
        constants, efficiency = replace(constants, links_at_once=None), 1.0
    return sum(_s_per_byte(leg, constants) for leg in demand.legs) / efficiency


def _nccl_line(
    kind: Kind,
    demand: StrategyDemand,
    constants: LinkConstants,
    rates: RateConstants,
    protocol: Protocol,
) -> CollectiveLine:
    return CollectiveLine(
        strategy=f"{demand.name}, {protocol.name}",
        latency_s=_nccl_latency_s(demand, protocol),
        s_per_byte=_demand_s_per_byte(demand, constants, rates) / bandwidth_frac(protocol, kind),
        axes=demand.axes,
    )


def _nccl_latency_s(demand: StrategyDemand, protocol: Protocol) -> float:
    steps_s = sum(
        leg.n_hops * (protocol.network_step_s if leg.host else protocol.link_step_s)
        for leg in demand.legs
    )
    return protocol.base_s + steps_s


def _s_per_byte(leg: LegDemand, constants: LinkConstants) -> float:
    """Seconds per byte of payload over the bottleneck link of a leg."""
    if constants.memory_bytes_per_s is not None:
        return leg.memory / constants.memory_bytes_per_s
    link, at_once = constants.link_bytes_per_s, constants.links_at_once
    injection = None if link is None or at_once is None else link * at_once
    paths = (
        ("link rate", leg.link, link),
        ("rate between the two cores", leg.die, constants.die_bytes_per_s),
        ("DCN rate", leg.host, constants.host_bytes_per_s),
    )
    slowest = 0.0 if injection is None else leg.injected / injection
    for name, load, bytes_per_s in paths:
        if load and bytes_per_s is None:
            raise SpecError(
                f"'{constants.chip}' has no published {name}. "
                "Measure it with 'meshscope calibrate' and pass the file with --profile."
            )
        if load and bytes_per_s is not None:
            slowest = max(slowest, load / bytes_per_s)
    return slowest


def named_strategy(algorithm: str) -> str | None:
    """The strategy that a name from compiled HLO, or one of our own names, denotes; None if unknown."""
    if algorithm in {BIDIRECTIONAL_RING, UNIDIRECTIONAL_RING, MULTI_COLOR, DIMENSION_ORDERED}:
        return algorithm
    if short := _SHORT_RINGS.search(algorithm):
        return f"{SHORT} {short[1]}"
    return next((strategy for name, strategy in _COMPILER_NAMES if name in algorithm), None)


def default_strategies(
    kind: Kind, topology: Topology, available: frozenset[str]
) -> frozenset[str] | None:
    """The strategies from which libtpu takes the fastest; None if it may take any available one."""
    chip = topology.chip
    if chip.kind is not ChipKind.TPU:
        return None
    if kind is Kind.ALL_REDUCE:
        short = compiler_facts(chip.name).has_short_all_reduces.value
        plain = frozenset({BIDIRECTIONAL_RING, MULTI_COLOR})
        if offloaded_from(kind, chip.name) < inf and MULTI_COLOR in available:
            plain = frozenset({MULTI_COLOR})
        return plain | frozenset(name for name in available if short and name.startswith(SHORT))
    if kind not in _GATHERS:
        return None
    facts = compiler_facts(chip.name)
    is_small = topology.grid in facts.grids_gathered_by_dimension.value
    is_by_dimension = facts.gather_route.value is GatherRoute.BY_DIMENSION
    if is_by_dimension or (is_small and DIMENSION_ORDERED in available):
        return frozenset({DIMENSION_ORDERED})
    return frozenset({BIDIRECTIONAL_RING})


def offloaded_from(kind: Kind, chip: str) -> float:
    """The least payload of this kind that SparseCores transfer; infinite if the core always does."""
    start = compiler_facts(chip).offloads_all_reduces_from.value
    return inf if kind is not Kind.ALL_REDUCE or start is None else start
