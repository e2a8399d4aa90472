"""What each strategy asks of the wires for given groups: found once for a topology and its groups, then kept."""

from dataclasses import dataclass, field
from functools import lru_cache

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.interconnect.fabric import Fabric, Loads, fabric_of, loads_of
from meshscope.interconnect.strategies import strategies_of
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.plan.mesh import Groups

NETWORK = "network"
KEPT_GEOMETRIES = 4096  # a sweep meets few hundred different groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LegDemand:
    """The largest load that a leg puts on one wire of each sort, as a fraction of the payload."""

    link: float
    injected: float
    die: float
    host: float
    memory: float
    n_hops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDemand:
    """A strategy by its name, leg by leg."""

    name: str
    legs: tuple[LegDemand, ...]
    axes: tuple[str, ...]  # of x, y, z, cores, network: the wires that it uses

    @property
    def n_hops(self) -> int:
        """Hops that follow one upon the other."""
        return sum(leg.n_hops for leg in self.legs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupGeometry:
    """Groups on a topology, and what each kind of collective over them asks of the wires.

    Make it with `geometry_of`, which returns the same object for the same groups.
    """

    topology: Topology
    groups: Groups
    fabric: Fabric
    _demands: dict[Kind, tuple[StrategyDemand, ...]] = field(default_factory=dict, repr=False)

    @property
    def group_size(self) -> int:
        """Devices of a group; 2 where the groups are pairs."""
        return len(self.groups[0])

    def demands(self, kind: Kind) -> tuple[StrategyDemand, ...]:
        """The strategies for this kind; none where nothing has to travel."""
        if kind not in self._demands:
            self._demands[kind] = _demands(kind, self.fabric, self.groups)
        return self._demands[kind]


@lru_cache(maxsize=KEPT_GEOMETRIES)
def geometry_of(topology: Topology, groups: Groups) -> GroupGeometry:
    """The geometry of the groups of a collective: device ids by group, or (source, target) pairs.

    SpecError where an id is not in the topology, or groups differ in size.
    """
    ids = [device for group in groups for device in group]
    if not ids:
        raise SpecError(
            "a collective without groups has no geometry. Give the groups of device ids."
        )
    if not 0 <= min(ids) <= max(ids) < topology.n_devices:
        raise SpecError(
            f"device {max(ids) if max(ids) >= topology.n_devices else min(ids)} is not in "
            f"'{topology.name}', which has {topology.n_devices} devices. Give the topology of the groups."
        )
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise SpecError(
            f"the groups have {min(sizes)} to {max(sizes)} devices; the model takes groups of one size."
        )
    return GroupGeometry(topology=topology, groups=groups, fabric=fabric_of(topology))


def _demands(kind: Kind, fabric: Fabric, groups: Groups) -> tuple[StrategyDemand, ...]:
    found: list[StrategyDemand] = []
    for name, legs in strategies_of(kind, fabric, groups).items():
        loads = [loads_of(fabric, leg.flow) for leg in legs]
        demands = [_leg_demand(own, leg.n_hops) for own, leg in zip(loads, legs, strict=True)]
        if legs:
            found.append(StrategyDemand(name=name, legs=tuple(demands), axes=_axes(fabric, loads)))
    return tuple(found)


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
    used = [name for dim, name in enumerate(dims) if any(own.link[:, dim].any() for own in loads)]
    used += ["cores"] * any(own.die.any() for own in loads)
    used += [NETWORK] * any(own.host.any() for own in loads)
    return tuple(used)
