"""Alpha-beta lines of a collective, one per strategy, the time of the fastest, and the bytes on every ICI link.

The strategy is the one named in the compiled HLO, else those that libtpu is known to choose. The routes of gathers
and scatters per chip are in `compiler_facts.json`. All-reduces take the faster of one bidirectional ring (libtpu
0.0.42 over 2x4) and multi-color rings (over 4x4, 8x8, 16x16, 2x2x2 and 4x4x4); small ones take short rings on chips
for which libtpu has them, and SparseCores take multi-color rings.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import GatherRoute, compiler_facts, read_facts
from meshscope.hardware.interconnect.constants import (
    LinkConstants,
    RateConstants,
    constants_of,
    spec_constants,
)
from meshscope.hardware.interconnect.fabric import LegDemand, fabric_of, link_load
from meshscope.hardware.interconnect.strategies import (
    BIDIRECTIONAL_RING,
    DIMENSION_ORDERED,
    MULTI_COLOR,
    SHORT,
    UNIDIRECTIONAL_RING,
    GroupGeometry,
    StrategyDemand,
    geometry_of,
    strategies_of,
)
from meshscope.hardware.topology import Topology

NO_TRANSFER = "no transfer"
_CACHED_LINES = 1 << 15
_SHORT_RINGS = re.compile(r"RotatedPincerShort.*multistep ([01](?:,[01])*)")

# Names in compiled HLO and in earlier versions, and their strategy; the first match wins.
_COMPILER_NAMES: tuple[tuple[str, str], ...] = tuple(
    (name, strategy) for name, strategy in read_facts("collective_names.json")["names"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """Time of one strategy: launch, then the longer of its hops and its bytes."""

    strategy: str
    latency_s: float  # alpha: the launch with its barriers
    s_per_byte: float  # beta
    hops_s: float = 0.0  # sequential hops
    payloads: tuple[float, float] = (0, inf)  # for which the compiler takes it, both included

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


@lru_cache(maxsize=_CACHED_LINES)
def collective_lines(
    kind: Kind, geometry: GroupGeometry, constants: LinkConstants, algorithm: str | None = None
) -> tuple[CollectiveLine, ...]:
    """The lines of the strategies open to the compiler, or of the named one; empty if nothing is transferred."""
    demands = geometry.demands(kind)
    chosen = None if algorithm is None else _named_strategy(algorithm)
    named = [replace(demand, payloads=(0, inf)) for demand in demands if demand.name == chosen]
    # Latencies measured by size include the short strategies.
    open_ = named or _choices(kind, geometry.topology, demands, constants)
    return tuple(
        line
        for demand in open_
        if demand.legs
        for line in _lines(kind, geometry, demand, constants)
    )


def _named_strategy(algorithm: str) -> str | None:
    if algorithm in {BIDIRECTIONAL_RING, UNIDIRECTIONAL_RING, MULTI_COLOR, DIMENSION_ORDERED}:
        return algorithm
    if short := _SHORT_RINGS.search(algorithm):
        return f"{SHORT} {short[1]}"
    return next((strategy for name, strategy in _COMPILER_NAMES if name in algorithm), None)


def _choices(
    kind: Kind,
    topology: Topology,
    demands: tuple[StrategyDemand, ...],
    constants: LinkConstants,
) -> list[StrategyDemand]:
    """The strategies from which libtpu takes the fastest: plain ones start where short ones end, or SparseCores take over."""
    plain = [demand for demand in demands if not demand.is_short]
    names = {demand.name for demand in (demands if constants.hop_s > 0 else plain)}
    chip, defaults, offloads_from = topology.chip, None, offloaded_from(kind, constants)
    if chip.kind is ChipKind.TPU and kind is Kind.ALL_REDUCE:
        defaults = {BIDIRECTIONAL_RING, MULTI_COLOR}
        if offloads_from < inf and MULTI_COLOR in names:
            defaults = {MULTI_COLOR}
        if compiler_facts(chip.name).has_short_all_reduces:
            defaults |= {name for name in names if name.startswith(SHORT)}
    elif chip.kind is ChipKind.TPU and kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}:
        facts = compiler_facts(chip.name)
        is_small = topology.grid in facts.grids_gathered_by_dimension
        is_by_dimension = facts.gather_route is GatherRoute.BY_DIMENSION
        is_by_dimension = is_by_dimension or (is_small and DIMENSION_ORDERED in names)
        defaults = {DIMENSION_ORDERED if is_by_dimension else BIDIRECTIONAL_RING}
    taken = [one for one in demands if defaults is None or one.name in defaults] or plain
    short = [
        replace(one, payloads=(one.payloads[0], min(one.payloads[1], offloads_from - 1)))
        for one in taken
        if one.is_short and one.payloads[0] < offloads_from
    ]
    start = max((one.payloads[1] + 1 for one in short), default=0)
    return [*short, *(replace(one, payloads=(start, inf)) for one in taken if not one.is_short)]


def offloaded_from(kind: Kind, constants: LinkConstants) -> float:
    """The least payload of this kind that SparseCores transfer; infinite if the core always does."""
    start = compiler_facts(constants.chip).offloads_all_reduces_from
    if start is None or kind not in {Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER}:
        return inf
    by_default = start if kind is Kind.ALL_REDUCE else inf
    return constants.offloads_from or by_default


def _lines(
    kind: Kind, geometry: GroupGeometry, demand: StrategyDemand, constants: LinkConstants
) -> Iterator[CollectiveLine]:
    rates = constants.rates_of(kind, geometry.group_size)
    if constants.protocols:
        crossing_s = 0.0
        if any(leg.host for leg in demand.legs):
            rates = constants.rates  # SHARP reduces inside a node only
            if kind in {Kind.SEND, Kind.RECV}:
                crossing_s = constants.crossing_s * len(geometry.groups)
        s_per_byte = _s_per_byte(demand, constants, rates)
        for protocol in constants.protocols:
            share = protocol.all_reduce_share if kind is Kind.ALL_REDUCE else protocol.share
            hops_s = sum(
                leg.n_hops * (protocol.network_step_s if leg.host else protocol.link_step_s)
                for leg in demand.legs
            )
            yield CollectiveLine(
                strategy=f"{demand.name}, {protocol.name}",
                latency_s=protocol.base_s + hops_s + crossing_s,
                s_per_byte=s_per_byte / share,
            )
        return
    first, last = demand.payloads
    start = offloaded_from(kind, constants) if constants.hop_s else inf
    on_core = constants.rates if start < inf else rates
    for taken, payloads in (
        (on_core, (first, min(last, start - 1))),
        (rates, (max(first, start), last)),
    ):
        if payloads[0] <= payloads[1]:
            yield CollectiveLine(
                strategy=demand.name,
                latency_s=taken.latency_s,
                hops_s=_hops_s(demand, constants.hop_s, taken.hop_s),
                s_per_byte=_s_per_byte(demand, constants, taken),
                payloads=payloads,
            )


def _hops_s(demand: StrategyDemand, hop_s: float, step_s: float | None) -> float:
    """Seconds of all hops; hops of legs with several steps take `step_s`, if given."""
    steps = [leg.n_hops for leg in demand.legs if leg.n_hops > 1 and step_s is not None]
    return sum(leg.n_hops for leg in demand.legs) * hop_s + sum(steps) * ((step_s or 0.0) - hop_s)


def _s_per_byte(demand: StrategyDemand, constants: LinkConstants, rates: RateConstants) -> float:
    efficiency = rates.efficiency
    if demand.is_short:
        # From VMEM to VMEM. Links reach 98 to 100 % of their rate on v5p and v6e; what v5e and tpu7x lose,
        # and the limit of links at once, were measured between HBMs.
        constants, efficiency = replace(constants, links_at_once=None), 1.0
    return sum(_leg_s_per_byte(leg, constants) for leg in demand.legs) / efficiency


def _leg_s_per_byte(leg: LegDemand, constants: LinkConstants) -> float:
    """Seconds per byte of payload over the bottleneck link of a leg."""
    if constants.memory_bytes_per_s is not None:
        return leg.memory / constants.memory_bytes_per_s
    link, at_once = constants.link_bytes_per_s, constants.links_at_once
    slowest = 0.0 if link is None or at_once is None else leg.injected / (link * at_once)
    for name, load, bytes_per_s in (
        ("link rate", leg.link, link),
        ("rate between the two cores", leg.die, constants.die_bytes_per_s),
        ("DCN rate", leg.host, constants.host_bytes_per_s),
    ):
        if load and bytes_per_s is None:
            raise SpecError(
                f"'{constants.chip}' has no published {name}. "
                "Measure it with 'meshscope calibrate' and pass the file with --profile."
            )
        if load and bytes_per_s is not None:
            slowest = max(slowest, load / bytes_per_s)
    return slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeledTime:
    """Time of one collective with the interval that covers 90 % of cases; None if unknown."""

    seconds: float
    low_s: float | None
    high_s: float | None
    # Outside the measurements; the interval then comes from chips left out of the fit.
    is_extrapolated: bool
    strategy: str


def collective_time(  # noqa: PLR0913  the properties of a collective
    kind: Kind,
    *,
    groups: Groups,
    payload_bytes: int,
    topology: Topology,
    algorithm: str | None = None,
    constants: LinkConstants | None = None,
) -> ModeledTime:
    """Seconds of one collective over all its groups at once, with interval and strategy.

    `payload_bytes` follows the nccl-tests rule (all-gather: output; reduce-scatter: input; all-to-all
    and permute: the array of one device). `algorithm` is the strategy name in compiled HLO. SpecError
    for a chip with neither published figures nor `constants`, and for groups outside the topology.
    """
    constants = constants or constants_of(topology.chip)
    geometry = geometry_of(topology, groups)
    lines = collective_lines(kind, geometry, constants, algorithm)
    if not lines:
        return ModeledTime(
            seconds=0.0, low_s=0.0, high_s=0.0, is_extrapolated=False, strategy=NO_TRANSFER
        )
    best = fastest(lines, payload_bytes)
    seconds = best.seconds(payload_bytes)
    is_measured = constants.is_measured(kind, payload_bytes, geometry.group_size)
    spread = None
    if (spreads := constants.spreads) is not None:
        spread = spreads.short if best.is_latency_bound(payload_bytes) else spreads.long
        spread = spread if is_measured else spreads.out_of_sample
    return ModeledTime(
        seconds=seconds,
        low_s=None if spread is None else seconds / spread,
        high_s=None if spread is None else seconds * spread,
        is_extrapolated=not is_measured,
        strategy=best.strategy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Bytes over one link in one direction. Chips are (x, y, z) in a slice; `dim` is x, y or z."""

    slice_index: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]
    dim: str
    is_wrap: bool
    load_bytes: float


def link_loads(
    kind: Kind,
    *,
    groups: Groups,
    payload_bytes: int,
    topology: Topology,
    strategy: str | None = None,
) -> list[LinkLoad]:
    """Bytes on every ICI link of a collective over all its groups, by a named or the fastest strategy."""
    fabric = fabric_of(topology)
    if strategy is None:
        peaks, size = spec_constants(topology.chip), payload_bytes
        strategy = collective_time(
            kind, groups=groups, payload_bytes=size, topology=topology, constants=peaks
        ).strategy
    if strategy == NO_TRANSFER or not fabric.is_torus:
        return []
    legs = strategies_of(kind, fabric, groups)[strategy]()
    total = np.sum([link_load(fabric, leg) for leg in legs], axis=0)
    x, y, z = fabric.sizes
    loads: list[LinkLoad] = []
    for chip, dim, direction in np.argwhere(total).tolist():
        slice_index, at_z, at_y, at_x = np.unravel_index(chip, (topology.n_slices, z, y, x))
        source = int(at_x), int(at_y), int(at_z)
        neighbor = source[dim] + (1, -1)[direction]
        target = [*source]
        target[dim] = neighbor % fabric.sizes[dim]
        loads.append(
            LinkLoad(
                slice_index=int(slice_index),
                source=source,
                target=(target[0], target[1], target[2]),
                dim="xyz"[dim],
                is_wrap=target[dim] != neighbor,
                load_bytes=float(total[chip, dim, direction]) * payload_bytes,
            )
        )
    return loads
