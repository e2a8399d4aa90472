"""Alpha-beta lines of a collective, one per strategy: latency, and seconds per byte of payload."""

from dataclasses import dataclass
from functools import lru_cache

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.interconnect.constants import LinkConstants, RateConstants
from meshscope.interconnect.geometry import NETWORK, GroupGeometry, LegDemand, StrategyDemand
from meshscope.interconnect.gpu import Protocol, bandwidth_frac
from meshscope.interconnect.strategy_choice import default_strategies, named_strategy

CACHED_LINES = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """Time of one strategy: `latency_s` (alpha) + payload x `s_per_byte` (beta)."""

    strategy: str
    latency_s: float
    s_per_byte: float
    axes: tuple[str, ...]

    def seconds(self, payload_bytes: float) -> float:
        """Seconds for a payload."""
        return self.latency_s + payload_bytes * self.s_per_byte

    def is_latency_bound(self, payload_bytes: float) -> bool:
        """Whether the latency exceeds the transfer time."""
        return payload_bytes * self.s_per_byte < self.latency_s


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
    demands = _eligible(kind, geometry, algorithm)
    rates = constants.rates_of(kind, geometry.group_size)
    return tuple(line for demand in demands for line in _lines(kind, demand, constants, rates))


def _eligible(
    kind: Kind, geometry: GroupGeometry, algorithm: str | None
) -> tuple[StrategyDemand, ...]:
    demands = geometry.demands(kind)
    chosen = None if algorithm is None else named_strategy(algorithm)
    matches = tuple(demand for demand in demands if demand.name == chosen)
    if matches:
        return matches
    available = frozenset(demand.name for demand in demands)
    defaults = default_strategies(kind, geometry.topology, available)
    return tuple(d for d in demands if defaults is None or d.name in defaults) or demands


def _lines(
    kind: Kind, demand: StrategyDemand, constants: LinkConstants, rates: RateConstants
) -> list[CollectiveLine]:
    if constants.protocols and NETWORK in demand.axes:
        rates = constants.rates  # SHARP reduces inside a node only
    s_per_byte = sum(_s_per_byte(leg, constants) for leg in demand.legs) / rates.efficiency
    if not constants.protocols:
        line = CollectiveLine(
            strategy=demand.name,
            latency_s=max(rates.latency_s, demand.n_hops * constants.hop_s),
            s_per_byte=s_per_byte,
            axes=demand.axes,
        )
        return [line]
    return [
        CollectiveLine(
            strategy=f"{demand.name}, {protocol.name}",
            latency_s=_nccl_latency_s(demand, protocol),
            s_per_byte=s_per_byte / bandwidth_frac(protocol, kind),
            axes=demand.axes,
        )
        for protocol in constants.protocols
    ]


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
