"""Strategies of each collective: sequential legs of transfers for a payload of 1, and each leg's link load.

A strategy states only what bounds its time: the transfers of each leg and the number of sequential
hops. A reduce-scatter is a reversed all-gather, and an all-reduce is a reduce-scatter followed by an
all-gather, so only gathers are written out. Sources: scaling book, part 3 (rings over one, two and three
axes); XLA's names for its choice (`collective_algorithm_config` in compiled HLO: strategies
`UniDirection1DRing`, `UniDirectionNDRing` with one color per direction and one phase per axis, emitters
`RotatedPincer`).

libtpu 0.0.42.1 emits `RotatedPincerShortEmitter` with one phase per torus dimension, or one phase over
a ring of all chips. In a phase in one shot, each chip sends its whole array around the ring and adds up
what it receives. In a phase in steps, the phase is a reduce-scatter, and an all-gather ends the
collective. Read from the bundles of compiled all-reduces: receive waits, sizes of the DMAs, and the
field `is_multistep` of the compiler's text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from math import inf, prod
from typing import Any

import numpy as np

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.interconnect.fabric import (
    Fabric,
    IntArray,
    Lattice,
    Leg,
    LegDemand,
    demand_of,
    fabric_of,
    hops_between,
    lattice_of,
)
from meshscope.hardware.topology import Topology

BIDIRECTIONAL_RING = "bidirectional ring"
UNIDIRECTIONAL_RING = "unidirectional ring"
MULTI_COLOR = "multi-color rings"  # dimension-ordered, each color starting with another axis
DIMENSION_ORDERED = "dimension-ordered rings"
ID_ORDERED = "ring in id order"
DIRECT = "direct"
SHORT = "short rings"  # followed by 0 (one shot) or 1 (in steps) for each phase

_CHIP_AXES = (2, 3, 4)  # z, y, x of [group, slice, z, y, x, core]
_SLICE_AXIS, _CORE_AXIS = 1, 5
_CACHED_GEOMETRIES = 4096  # a sweep has a few hundred different groups

# Compiled all-reduces of bf16 and f32 over 2x4, 4x4, 8x8, 16x16, 2x2x1 and 4x4x4 chips, 2 kB to 16 MB,
# libtpu 0.0.42.1: a phase is in one shot for up to 64 KiB of a color's array; a ring of all chips is
# short below 1 MiB, phases per dimension up to 2 MiB.
_ONE_SHOT_BYTES = 1 << 16
_MAX_RING_BYTES = (1 << 20) - 1
_MAX_PHASES_BYTES = 1 << 21


Legs = tuple[Leg, ...]  # one starts when the one before it finishes
Transfers = Callable[[], Legs]  # the legs, made for strategies that are asked for


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class StrategyDemand:
    """The demands of a strategy, leg by leg; they are computed when they are asked for."""

    name: str
    fabric: Fabric
    transfers: Transfers
    payloads: tuple[float, float] = (0, inf)  # for which the compiler takes it, both included

    @cached_property
    def legs(self) -> tuple[LegDemand, ...]:
        """The demand of each leg; empty if nothing is transferred."""
        return tuple(demand_of(self.fabric, leg) for leg in self.transfers())

    @property
    def is_short(self) -> bool:
        """Whether libtpu takes this strategy for small payloads only."""
        return self.name.startswith(SHORT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupGeometry:
    """The groups of a collective with the demands of each kind of collective; one object per groups, by `geometry_of`."""

    topology: Topology
    groups: Groups
    _demands: dict[Kind, tuple[StrategyDemand, ...]] = field(default_factory=dict, repr=False)

    @property
    def group_size(self) -> int:
        """Devices of a group; 2 for the pairs of a permute."""
        return len(self.groups[0])

    def demands(self, kind: Kind) -> tuple[StrategyDemand, ...]:
        """The strategies for this kind."""
        if kind not in self._demands:
            self._demands[kind] = _demands(kind, fabric_of(self.topology), self.groups)
        return self._demands[kind]


@lru_cache(maxsize=_CACHED_GEOMETRIES)
def _demands(kind: Kind, fabric: Fabric, groups: Groups) -> tuple[StrategyDemand, ...]:
    """The strategies for a kind, which all chips with equal links share."""
    return tuple(
        StrategyDemand(
            name=name,
            fabric=fabric,
            transfers=transfers,
            payloads=_short_payloads(name, fabric, groups) if name.startswith(SHORT) else (0, inf),
        )
        for name, transfers in strategies_of(kind, fabric, groups).items()
    )


@lru_cache(maxsize=_CACHED_GEOMETRIES)
def geometry_of(topology: Topology, groups: Groups) -> GroupGeometry:
    """The geometry of groups of device ids, or (source, target) pairs; SpecError for unknown ids or different sizes."""
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
    return GroupGeometry(topology=topology, groups=groups)


def strategies_of(kind: Kind, fabric: Fabric, groups: Groups) -> dict[str, Transfers]:
    """The strategies for a collective over these groups, all groups at once."""
    match kind:
        case Kind.RECV:  # counted with its send
            return {}
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER | Kind.ALL_REDUCE:
            gathers = _gathers(fabric, groups)
            if kind is Kind.ALL_GATHER:
                return gathers
            if kind is Kind.REDUCE_SCATTER:
                return {name: partial(_scatter, gather) for name, gather in gathers.items()}
            sums = {name: partial(_sum, gather) for name, gather in gathers.items()}
            return sums | _short_reduces(fabric, groups)
        case Kind.ALL_TO_ALL:
            return {DIRECT: partial(_exchange, fabric, groups)}
        case _:
            return {DIRECT: partial(_direct, kind, fabric, np.array(groups))}


def _scatter(gather: Transfers) -> Legs:
    return _reversed(gather())


def _sum(gather: Transfers) -> Legs:
    legs = gather()
    return (*_reversed(legs), *legs)


def _reversed(legs: Sequence[Leg]) -> Legs:
    """The legs backwards: an all-gather becomes a reduce-scatter."""
    return tuple(replace(leg, source=leg.target, target=leg.source) for leg in reversed(legs))


def _gathers(fabric: Fabric, groups: Groups) -> dict[str, Transfers]:
    """All-gathers of a payload of 1; each device starts with 1/n."""
    lattice = lattice_of(fabric, groups)
    if lattice is None:
        order, n = np.array(groups), len(groups[0])
        return {ID_ORDERED: lambda: (_ring(fabric, order, 1 / n, is_bidirectional=True),)}
    by_name: dict[str, Callable[[float], Iterator[Leg]]] = {
        BIDIRECTIONAL_RING: lambda unit: _snake(lattice, unit, is_bidirectional=True),
        UNIDIRECTIONAL_RING: lambda unit: _snake(lattice, unit, is_bidirectional=False),
        DIMENSION_ORDERED: lambda unit: _phases(lattice, unit, n_colors=1),
    }
    n_chip_axes = sum(lattice.devices.shape[axis] > 1 for axis in _CHIP_AXES)
    if n_chip_axes > 1:
        by_name[MULTI_COLOR] = lambda unit: _phases(lattice, unit, n_colors=n_chip_axes)
    if n_chip_axes == 0:
        by_name = {UNIDIRECTIONAL_RING: lambda _unit: iter(())}
    elif not fabric.is_torus:  # a switch: no axes and one direction
        by_name = {UNIDIRECTIONAL_RING: by_name[UNIDIRECTIONAL_RING]}
    return {name: partial(_levels, lattice, chips) for name, chips in by_name.items()}


def _levels(lattice: Lattice, chips: Callable[[float], Iterator[Leg]]) -> Legs:
    """Gathers over slices first (least data over DCN), then over chips, then over the two cores."""
    n_slices, n = lattice.shape[0], prod(lattice.shape)
    legs = (*chips(n_slices / n), *_core_legs(lattice))
    if n_slices == 1:
        return legs
    order = np.moveaxis(lattice.devices, _SLICE_AXIS, -1)
    return (_ring(lattice.fabric, order, 1 / n, is_bidirectional=False), *legs)


def _core_legs(lattice: Lattice) -> Legs:
    """The gather between the cores of each chip; () for one core."""
    n_cores = lattice.shape[-1]
    order = np.moveaxis(lattice.devices, _CORE_AXIS, -1)
    return (_line(lattice.fabric, order, 1 / n_cores),) if n_cores > 1 else ()


def _ring(fabric: Fabric, order: IntArray, unit: float, *, is_bidirectional: bool) -> Leg:
    """Ring over the last axis of `order` with shards of `unit`; bidirectional rings split each shard."""
    n = order.shape[-1]
    source, target = order.ravel(), np.roll(order, -1, axis=-1).ravel()
    share, n_steps = unit * (n - 1), n - 1
    if is_bidirectional:
        source, target = np.concatenate([source, target]), np.concatenate([target, source])
        share, n_steps = share / 2, n // 2
    return _leg(fabric, source, target, share, n_steps)


def _line(fabric: Fabric, order: IntArray, unit: float) -> Leg:
    """Line over the last axis of `order` with shards of `unit`: a link carries the shards of all members before it."""
    n = order.shape[-1]
    here, after = order[..., :-1], order[..., 1:]
    up = np.broadcast_to(unit * np.arange(1, n), here.shape)
    source = np.concatenate([here.ravel(), after.ravel()])
    target = np.concatenate([after.ravel(), here.ravel()])
    share = np.concatenate([up.ravel(), up[..., ::-1].ravel()])
    return _leg(fabric, source, target, share, n - 1)


def _leg(fabric: Fabric, source: IntArray, target: IntArray, share: Any, n_steps: int = 1) -> Leg:
    distance = int(hops_between(fabric, source, target).max(initial=0))
    shares = np.full(len(source), share, dtype=float)
    return Leg(source=source, target=target, share=shares, n_hops=n_steps * distance)


def _snake(lattice: Lattice, unit: float, *, is_bidirectional: bool) -> Iterator[Leg]:
    """Gather over one ring through all chips of the group, over neighbors if the box allows it."""
    members = np.moveaxis(lattice.devices, _CORE_AXIS, 2)  # [group, slice, core, z, y, x]
    shape = members.shape[3:]
    order = members.reshape(*members.shape[:3], -1)[..., hamiltonian_order(shape)]
    is_line = max(shape) == order.shape[-1] and not any(lattice.is_ring)
    if is_line and is_bidirectional:
        yield _line(lattice.fabric, order, unit)
    elif order.shape[-1] > 1:
        yield _ring(lattice.fabric, order, unit, is_bidirectional=is_bidirectional)


def hamiltonian_order(shape: tuple[int, ...]) -> IntArray:
    """Flat indices of a box in the order of a ring over neighbors; the ring closes if a size is even.

    The box becomes a plane of its longest even axis against a snake through the others. The ring runs
    down the first column of the plane and returns in a snake through the other columns.
    """
    sizes = sorted(range(len(shape)), key=lambda axis: (shape[axis] % 2, -shape[axis]))
    rows_axis, others = sizes[0], sorted(sizes[1:])
    plane = np.moveaxis(np.arange(prod(shape)).reshape(shape), rows_axis, 0)
    n_rows, (n_outer, n_inner) = shape[rows_axis], (shape[axis] for axis in others)
    snaked = plane.reshape(n_rows, n_outer, n_inner).copy()
    snaked[:, 1::2] = snaked[:, 1::2, ::-1]
    columns = snaked.reshape(n_rows, n_outer * n_inner)
    if columns.shape[1] == 1 or n_rows == 1:
        return columns.ravel()
    out = columns[:, 1:].copy()
    out[1::2] = out[1::2, ::-1]
    return np.concatenate([out.ravel(), columns[::-1, 0]])


def _phases(lattice: Lattice, unit: float, *, n_colors: int) -> Iterator[Leg]:
    """Rings over one axis after the other; with several colors, each part of the data starts elsewhere."""
    orders = _color_orders(lattice, n_colors)
    units = [unit / n_colors] * n_colors
    for axes in zip(*orders, strict=True):
        yield _phase_leg(lattice, axes, units)
        units = [shard * lattice.devices.shape[a] for shard, a in zip(units, axes, strict=True)]


def _color_orders(lattice: Lattice, n_colors: int) -> list[list[int]]:
    axes = [axis for axis in _CHIP_AXES if lattice.devices.shape[axis] > 1]
    return [axes[first:] + axes[:first] for first in range(n_colors)]


def _phase_leg(lattice: Lattice, axes: Sequence[int], shards: Sequence[float]) -> Leg:
    parts: list[Leg] = []
    for axis, shard in zip(axes, shards, strict=True):
        members = np.moveaxis(lattice.devices, axis, -1)
        if lattice.is_ring[_CHIP_AXES.index(axis)]:
            parts.append(_ring(lattice.fabric, members, shard, is_bidirectional=True))
        else:
            parts.append(_line(lattice.fabric, members, shard))
    return _together(parts, max(part.n_hops for part in parts))


def _together(parts: list[Leg], n_hops: int) -> Leg:
    names = ("source", "target", "share")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Leg(**arrays, n_hops=n_hops)


def _exchange(fabric: Fabric, groups: Groups) -> Legs:
    """All-to-all with every part sent directly at once.

    On a box, a device sends or forwards an equal part to every member of its row in any order of axes: loads count by row.
    """
    lattice = lattice_of(fabric, groups)
    members = np.array(groups) if lattice is None else lattice.devices
    parts: list[Leg] = []
    for axis in range(1, members.ndim):
        if (n := members.shape[axis]) > 1:
            rows = np.moveaxis(members, axis, -1).reshape(-1, n)
            source, target = np.repeat(rows, n, axis=1).ravel(), np.tile(rows, (1, n)).ravel()
            differs = source != target
            parts.append(_leg(fabric, source[differs], target[differs], 1 / n))
    return (_together(parts, sum(part.n_hops for part in parts)),) if parts else ()


def _direct(kind: Kind, fabric: Fabric, members: IntArray) -> Legs:
    """Pairs; a gather, in which every member sends its part to the first; or a broadcast, a pipeline through the members."""
    n, share, n_steps = members.shape[1], 1.0, 1
    source, target = members[:, :-1], members[:, 1:]
    if kind in {Kind.PERMUTE, Kind.SEND}:
        differ = members[:, 0] != members[:, -1] if n == 2 else np.zeros(len(members), bool)
        source, target = source[differ], target[differ]
    elif kind in {Kind.GATHER, Kind.SCATTER}:
        source, share = members[:, 1:], 1 / n
        target = np.broadcast_to(members[:, :1], source.shape)
    else:
        n_steps = n - 1
    if not source.size:
        return ()
    legs = (_leg(fabric, source.ravel(), target.ravel(), share, n_steps),)
    return _reversed(legs) if kind in {Kind.REDUCE, Kind.SCATTER} else legs


def _short_reduces(fabric: Fabric, groups: Groups) -> dict[str, Transfers]:
    lattice = lattice_of(fabric, groups) if fabric.is_torus else None
    if lattice is None or lattice.shape[0] > 1:
        return {}
    n_phases = len(_short_phases(lattice))
    return {
        f"{SHORT} {'1,' * n_steps}{'0,' * (n_phases - n_steps)}".rstrip(","): partial(
            _short_legs, lattice, n_steps
        )
        for n_steps in range(n_phases + 1 if n_phases else 0)
    }


def _short_payloads(name: str, fabric: Fabric, groups: Groups) -> tuple[float, float]:
    lattice = lattice_of(fabric, groups)
    assert lattice is not None
    sizes, n_steps = _short_phases(lattice), name.count("1")
    end = _MAX_PHASES_BYTES if "," in name else _MAX_RING_BYTES
    array = _ONE_SHOT_BYTES * lattice.shape[-1] * len(sizes)
    bounds = [-1, *(min(end, array * prod(sizes[:n])) for n in range(len(sizes))), end]
    return bounds[n_steps] + 1, bounds[n_steps + 1]


def _short_phases(lattice: Lattice) -> tuple[int, ...]:
    """Chips in the ring of each phase; one ring through all chips on planes with a side of two."""
    shape = (lattice.devices.shape[axis] for axis in _CHIP_AXES)
    sizes = tuple(size for size in shape if size > 1)
    if lattice.fabric.topology.chip.n_grid_dims > 2 or min(sizes, default=0) > 2:
        return sizes
    return (prod(sizes),) if sizes else ()


def _short_legs(lattice: Lattice, n_steps: int) -> Legs:
    """The cores of a chip split the array; then `n_steps` phases in steps, the others in one shot."""
    sizes, cores = _short_phases(lattice), _core_legs(lattice)
    legs, gathers = [*_reversed(cores)], list[Leg]()
    array = 1 / lattice.shape[-1] / len(sizes)
    for phase, size in enumerate(sizes):
        if phase < n_steps:
            array /= size
            gathers += [_short_gather(lattice, phase, array)]
            legs += _reversed(gathers[-1:])
        else:
            legs.append(_short_gather(lattice, phase, array))
    return (*legs, *reversed(gathers), *cores)


def _short_gather(lattice: Lattice, phase: int, shard: float) -> Leg:
    """Each chip sends its shard to all others of the phase, both ways around, over all colors at once.

    Without a wrap-around link the last edge of the ring passes several chips: the loads of a line.
    """
    sizes = _short_phases(lattice)
    if len(sizes) == 1:
        leg = next(_snake(lattice, shard, is_bidirectional=True))
    else:
        axes = [order[phase] for order in _color_orders(lattice, len(sizes))]
        leg = _phase_leg(lattice, axes, [shard] * len(sizes))
    return replace(leg, n_hops=sizes[phase] // 2)
