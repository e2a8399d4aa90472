"""Load that each strategy puts on the links for given groups, computed once per topology and groups."""

from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.fabric import Fabric, Loads, fabric_of, loads_of
from meshscope.interconnect.strategies import SHORT, short_payloads, strategies_with_short

NETWORK = "network"
CACHED_GEOMETRIES = 4096  # a sweep has a few hundred different groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LegDemand:
    """The largest load that a leg puts on one link of each type, as a fraction of the payload."""

    link: float
    injected: float
    die: float
    host: float
    memory: float
    n_hops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDemand:
    """The demands of a strategy, leg by leg."""

    name: str
    legs: tuple[LegDemand, ...]
    axes: tuple[str, ...]  # the links it uses: x, y, z, cores, links, network
    payloads: tuple[float, float] = (0, inf)  # for which the compiler takes it, both included

    @property
    def n_hops(self) -> int:
        """Sequential hops over all legs."""
        return sum(leg.n_hops for leg in self.legs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupGeometry:
    """The groups of a collective on a topology, with the demands of each kind of collective over them.

    Build it with `geometry_of`, which returns one object per topology and groups.
    """

    topology: Topology
    groups: Groups
    fabric: Fabric
    _demands: dict[Kind, tuple[StrategyDemand, ...]] = field(default_factory=dict, repr=False)

    @property
    def group_size(self) -> int:
        """Devices of a group; 2 for the pairs of a permute."""
        return len(self.groups[0])

    def demands(self, kind: Kind) -> tuple[StrategyDemand, ...]:
        """The strategies for this kind; empty if nothing is transferred."""
        if kind not in self._demands:
            self._demands[kind] = _demands(kind, self.fabric, self.groups)
        return self._demands[kind]


@lru_cache(maxsize=CACHED_GEOMETRIES)
def geometry_of(topology: Topology, groups: Groups) -> GroupGeometry:
    """The geometry of a collective's groups: device ids by group, or (source, target) pairs.

    SpecError for an id outside the topology, or groups of different sizes.
    """
    ids = [device for group in groups for device in group]
    if not ids:
        raise SpecError("the collective has no groups. Give the groups of device ids.")
    if not 0 <= min(ids) <= max(ids) < topology.n_devices:
        raise SpecError(
            f"device {max(ids) if max(ids) >= topology.n_devices else min(ids)} is not in "
            f"'{topology.name}', which has {topology.n_devices} devices. Give the topology of the groups."
        )
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise SpecError(
            f"the groups have {min(sizes)} to {max(sizes)} devices, and the interconnect model needs "
            "groups of one size. Split the collective by group size."
        )
    return GroupGeometry(topology=topology, groups=groups, fabric=fabric_of(topology))


def _demands(kind: Kind, fabric: Fabric, groups: Groups) -> tuple[StrategyDemand, ...]:
    demands: list[StrategyDemand] = []
    for name, legs in strategies_with_short(kind, fabric, groups).items():
        if not legs:
            continue
        loads = [loads_of(fabric, leg.flow) for leg in legs]
        of_legs = [_leg_demand(load, leg.n_hops) for load, leg in zip(loads, legs, strict=True)]
        payloads = short_payloads(name, fabric, groups) if name.startswith(SHORT) else (0, inf)
        demands.append(
            StrategyDemand(
                name=name, legs=tuple(of_legs), axes=_axes(fabric, loads), payloads=payloads
            )
        )
    return tuple(demands)


def _leg_demand(loads: Loads, n_hops: int) -> LegDemand:
    return LegDemand(
        link=float(loads.link.max()),
        injected=float(loads.injected.max()),
        die=float(loads.die.max()),
        host=float(loads.host.max()),
        memory=loads.memory,
        n_hops=n_hops,
    )


def _axes(fabric: Fabric, loads: list[Loads]) -> tuple[str, ...]:
    dims = "xyz" if fabric.is_torus else ("links",)
    used = [name for dim, name in enumerate(dims) if any(load.link[:, dim].any() for load in loads)]
    used += ["cores"] * any(load.die.any() for load in loads)
    used += [NETWORK] * any(load.host.any() for load in loads)
    return tuple(used)
