"""Seconds of a collective: a floor or the hops, whichever is longer, then the bytes over the narrowest wire."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshscope.errors import SpecError
from meshscope.hardware.topology import Topology
from meshscope.interconnect.constants import LinkConstants, constants_of
from meshscope.interconnect.fabric import FloatArray
from meshscope.interconnect.geometry import GroupGeometry, LegDemand, StrategyDemand, geometry_of
from meshscope.plan.mesh import Groups
from meshscope.table.kinds import Kind

NOTHING = "nothing travels"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """The time of one collective; it lies between `low_s` and `high_s` as often as the fit says.

    `is_extrapolated`: its chip, kind, size or groups lie outside of what the constants were fitted on.
    """

    seconds: float
    low_s: float
    high_s: float
    is_extrapolated: bool
    strategy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """Seconds of one strategy as a line: `base_s` + payload x `s_per_byte`."""

    strategy: str
    base_s: float
    s_per_byte: float


def collective_time(  # noqa: PLR0913  what a collective is
    kind: Kind,
    *,
    groups: Groups,
    payload_bytes: int,
    topology: Topology,
    algorithm: str | None = None,
    constants: LinkConstants | None = None,
) -> CollectiveTime:
    """Seconds of one collective over all its groups at once, with interval and strategy.

    `payload_bytes` by the nccl-tests rule (all-gather: output; reduce-scatter: input; all-to-all and
    permute: what one device holds). The fastest strategy is taken, or the one that `algorithm`, the
    compiler's words, names. SpecError for a chip without published figures and without constants.
    """
    constants = constants or constants_of(topology.chip)
    geometry = geometry_of(topology, groups)
    lines = _told(collective_lines(kind, geometry, constants), algorithm)
    if not lines:
        return CollectiveTime(
            seconds=0.0, low_s=0.0, high_s=0.0, is_extrapolated=False, strategy=NOTHING
        )
    best = min(lines, key=lambda line: line.base_s + payload_bytes * line.s_per_byte)
    seconds = best.base_s + payload_bytes * best.s_per_byte
    is_extrapolated = True
    spread = constants.spread_extrapolated if is_extrapolated else constants.spread
    return CollectiveTime(
        seconds=seconds,
        low_s=seconds / spread,
        high_s=seconds * spread,
        is_extrapolated=is_extrapolated,
        strategy=best.strategy,
    )


def collective_seconds(
    kind: Kind,
    *,
    shape_of_group: GroupGeometry,
    payload_bytes: FloatArray,
    constants: LinkConstants,
) -> FloatArray:
    """[n] seconds of collectives of one kind over the same groups, for [n] payloads in bytes."""
    lines = collective_lines(kind, shape_of_group, constants)
    if not lines:
        return np.zeros(np.shape(payload_bytes))
    seconds = [line.base_s + np.asarray(payload_bytes) * line.s_per_byte for line in lines]
    return np.minimum.reduce(seconds)


@lru_cache(maxsize=1 << 15)
def collective_lines(
    kind: Kind, geometry: GroupGeometry, constants: LinkConstants
) -> tuple[CollectiveLine, ...]:
    """The line of each strategy; none where nothing has to travel."""
    return tuple(_line(kind, demand, constants) for demand in geometry.demands(kind))


def _line(kind: Kind, demand: StrategyDemand, constants: LinkConstants) -> CollectiveLine:
    rates = constants.rates_of(kind)
    wire_s = sum(_s_per_byte(leg, constants) for leg in demand.legs)
    return CollectiveLine(
        strategy=demand.name,
        base_s=max(rates.floor_s, demand.n_hops * constants.hop_s),
        s_per_byte=wire_s / rates.efficiency,
    )


def _s_per_byte(leg: LegDemand, constants: LinkConstants) -> float:
    """Seconds per byte of payload of one leg: its slowest wire."""
    link = constants.link_bytes_per_s
    at_once = constants.links_at_once
    injection = None if link is None or at_once is None else link * at_once
    wires = (
        (leg.link, link, "link"),
        (leg.injected, injection, None),
        (leg.die, constants.die_bytes_per_s, "wire between the cores"),
        (leg.host, constants.host_bytes_per_s, "network between hosts"),
        (leg.memory, constants.memory_bytes_per_s, None),
    )
    slowest = 0.0
    for load, bytes_per_s, name in wires:
        if load and bytes_per_s is None and name is not None:
            raise SpecError(
                f"the {name} of '{constants.chip}' has no published figure. "
                "Measure it with 'meshscope calibrate' and give the file with --profile."
            )
        if load and bytes_per_s is not None:
            slowest = max(slowest, load / bytes_per_s)
    return slowest


# The compiler's words for a strategy -> ours, the first that matches.
_WORDS: tuple[tuple[str, str], ...] = ()


def _told(lines: tuple[CollectiveLine, ...], algorithm: str | None) -> tuple[CollectiveLine, ...]:
    """Those of the lines that the compiler's words name; all where they name none."""
    if algorithm is None:
        return lines
    names = {ours for words, ours in _WORDS if words in algorithm}
    return tuple(line for line in lines if line.strategy in names) or lines
