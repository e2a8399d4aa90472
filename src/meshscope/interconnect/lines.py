"""Each strategy of a collective as a line: seconds to begin, and seconds a byte of payload."""

from dataclasses import dataclass
from functools import lru_cache

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.interconnect.constants import LinkConstants, RateConstants
from meshscope.interconnect.geometry import NETWORK, GroupGeometry, LegDemand, StrategyDemand
from meshscope.interconnect.gpu import Protocol, share_of
from meshscope.interconnect.strategy_choice import told_strategy, usual_strategies

KEPT_LINES = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """Seconds of one strategy as a line: `base_s` + payload x `s_per_byte`."""

    strategy: str
    base_s: float
    s_per_byte: float
    axes: tuple[str, ...]

    def seconds(self, payload_bytes: float) -> float:
        """Seconds for a payload."""
        return self.base_s + payload_bytes * self.s_per_byte

    def is_short(self, payload_bytes: float) -> bool:
        """Whether beginning takes longer than the bytes."""
        return payload_bytes * self.s_per_byte < self.base_s


def fastest(lines: tuple[CollectiveLine, ...], payload_bytes: float) -> CollectiveLine:
    """The line that takes least for a payload."""
    return min(lines, key=lambda line: line.seconds(payload_bytes))


@lru_cache(maxsize=KEPT_LINES)
def collective_lines(
    kind: Kind, geometry: GroupGeometry, constants: LinkConstants, algorithm: str | None = None
) -> tuple[CollectiveLine, ...]:
    """The lines of the strategies that the compiler may take; none where nothing has to travel.

    Only the one that `algorithm` names, the compiler's words, where it names one that these groups
    allow. The fastest of the lines is what the collective takes.
    """
    demands = _eligible(kind, geometry, algorithm)
    rates = constants.rates_of(kind, geometry.group_size)
    return tuple(line for demand in demands for line in _lines(kind, demand, constants, rates))


def _eligible(
    kind: Kind, geometry: GroupGeometry, algorithm: str | None
) -> tuple[StrategyDemand, ...]:
    demands = geometry.demands(kind)
    told = None if algorithm is None else told_strategy(algorithm)
    named = tuple(demand for demand in demands if demand.name == told)
    if named:
        return named
    available = frozenset(demand.name for demand in demands)
    usual = usual_strategies(kind, geometry.topology, available)
    return tuple(d for d in demands if usual is None or d.name in usual) or demands


def _lines(
    kind: Kind, demand: StrategyDemand, constants: LinkConstants, rates: RateConstants
) -> list[CollectiveLine]:
    if constants.protocols and NETWORK in demand.axes:
        rates = constants.rates  # the switch of a node adds nothing up between nodes
    wire_s = sum(_s_per_byte(leg, constants) for leg in demand.legs) / rates.efficiency
    if not constants.protocols:
        base_s = max(rates.floor_s, demand.n_hops * constants.hop_s)
        return [
            CollectiveLine(strategy=demand.name, base_s=base_s, s_per_byte=wire_s, axes=demand.axes)
        ]
    return [
        CollectiveLine(
            strategy=f"{demand.name}, {protocol.name}",
            base_s=_begin_s(demand, protocol),
            s_per_byte=wire_s / share_of(protocol, kind),
            axes=demand.axes,
        )
        for protocol in constants.protocols
    ]


def _begin_s(demand: StrategyDemand, protocol: Protocol) -> float:
    steps_s = sum(
        leg.n_hops * (protocol.network_step_s if leg.host else protocol.link_step_s)
        for leg in demand.legs
    )
    return protocol.base_s + steps_s


def _s_per_byte(leg: LegDemand, constants: LinkConstants) -> float:
    """Seconds per byte of payload of one leg: its slowest wire."""
    if constants.memory_bytes_per_s is not None:
        return leg.memory / constants.memory_bytes_per_s
    link, at_once = constants.link_bytes_per_s, constants.links_at_once
    injection = None if link is None or at_once is None else link * at_once
    wires = (
        ("link", leg.link, link),
        ("wire between the cores", leg.die, constants.die_bytes_per_s),
        ("network between hosts", leg.host, constants.host_bytes_per_s),
    )
    slowest = 0.0 if injection is None else leg.injected / injection
    for name, load, bytes_per_s in wires:
        if load and bytes_per_s is None:
            raise SpecError(
                f"the {name} of '{constants.chip}' has no published figure. "
                "Measure it with 'meshscope calibrate' and give the file with --profile."
            )
        if load and bytes_per_s is not None:
            slowest = max(slowest, load / bytes_per_s)
    return slowest
