"""Physical coordinates of each device id, the links of a topology, and the load of transfers on each.

Device ids count the devices in the TPU compiler's order. libtpu 0.0.42 lists the topologies of
`tests/golden/placements.json` as follows: slices; hosts of a slice, x fastest, then y, then z; chips of
a host, x fastest, then y; cores of a chip. GPUs are listed node by node.

Four resources can be the bottleneck: one ICI link in one direction, the injection rate of a chip, the
path between the two cores of a chip, and the NIC of a host (DCN). The GPUs of a node share a switch:
NVLink counts as one link per GPU. Virtual CPU devices share one memory.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshscope.events.collective import Groups
from meshscope.hardware.chips import Chip, ChipKind
from meshscope.hardware.topology import Topology
from meshscope.serialize import picked

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

N_DIMS = 3
CACHED_LATTICES = 4096  # a sweep has a few hundred different groups
_N_DIRECTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """The place of each device, in the order of ids, and the wrap-around links; hosts and chips count over all slices."""

    topology: Topology
    sizes: tuple[int, int, int]  # chips of a slice along x, y, z
    wraps: tuple[bool, bool, bool]
    slice_index: IntArray  # [n_devices], as the arrays below
    coordinates: IntArray  # [n_devices, 3] x, y, z of the chip in its slice
    core: IntArray
    host: IntArray
    chip: IntArray

    @property
    def is_torus(self) -> bool:
        """Whether links join neighboring chips, without a switch or shared memory."""
        return self.topology.chip.kind is ChipKind.TPU


def wraps_around(topology: Topology) -> tuple[bool, bool, bool]:
    """The dimensions that close into a ring.

    Source: scaling book, part 2: v5e and v6e have "wraparounds along any axis of size 16"; for v4
    and v5p "any multiple of a full cube (e.g. 4x4x4 or 4x4x8) will have wraparounds", smaller ones
    "no wraparounds". tpu7x consists of the same cubes (cloud.google.com/tpu/docs/tpu7x).
    """
    chip, multiple = topology.chip, topology.chip.wraps_from
    if chip.kind is not ChipKind.TPU or multiple is None:
        return (False, False, False)
    x, y, z = (size > 1 and size % multiple == 0 for size in (*topology.grid, 1, 1)[:N_DIMS])
    is_part_of_cube = chip.n_grid_dims == N_DIMS and not (x and y and z)
    return (False, False, False) if is_part_of_cube else (x, y, z)


@cache
def fabric_of(topology: Topology) -> Fabric:
    """The devices and links of a topology, one object for all chips with the same."""
    places = ("kind", "devices_per_chip", "n_grid_dims", "chips_per_host", "wraps_from")
    chip = Chip(name="", source="", **picked(topology.chip, *places))
    return _fabric_of(replace(topology, chip=chip))


@cache
def _fabric_of(topology: Topology) -> Fabric:
    """Devices and links; GPUs and virtual CPU devices form nodes of equal size in sequence."""
    x, y, z = (*topology.grid, 1, 1)[:N_DIMS]
    if topology.chip.kind is ChipKind.TPU:
        host_x, host_y, _ = topology.host_bounds
        # Axes from the slowest to the fastest.
        shape = (topology.n_slices, z, y // host_y, x // host_x, host_y, host_x)
        shape = (*shape, topology.chip.devices_per_chip)
        at = np.indices(shape).reshape(len(shape), -1)
        slices, at_z, host_row, host_column, row, column, core = at
        at_x, at_y = host_column * host_x + column, host_row * host_y + row
        host = ((slices * z + at_z) * (y // host_y) + host_row) * (x // host_x) + host_column
    else:
        slices, at_x = np.divmod(np.arange(topology.n_devices), topology.devices_per_slice)
        at_y = at_z = core = np.zeros_like(at_x)
        is_cpu = topology.chip.kind is ChipKind.CPU  # all on this machine
        per_host = x if is_cpu else topology.chip.chips_per_host
        host = slices * -(-x // per_host) + at_x // per_host
    return Fabric(
        topology=topology,
        sizes=(x, y, z),
        wraps=wraps_around(topology),
        slice_index=slices,
        coordinates=np.stack([at_x, at_y, at_z], axis=1),
        core=core,
        host=host,
        chip=((slices * z + at_z) * y + at_y) * x + at_x,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leg:
    """Simultaneous transfers: `share` of the payload from each source to its target, in `n_hops` sequential hops."""

    source: IntArray  # [n] device ids
    target: IntArray  # [n]
    share: FloatArray  # [n]
    n_hops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegDemand:
    """The largest load that a leg puts on one link of each type, as a fraction of the payload."""

    link: float = 0.0
    injected: float = 0.0  # sent off a chip by its own cores
    die: float = 0.0  # sent to the other core of a chip
    host: float = 0.0  # sent or received over the DCN, by the NIC of a TPU host or of a GPU
    memory: float  # all transfers together
    n_hops: int


def demand_of(fabric: Fabric, leg: Leg) -> LegDemand:
    """What simultaneous transfers demand of the links."""
    memory = float(leg.share.sum())
    if fabric.topology.chip.kind is ChipKind.CPU:
        return LegDemand(memory=memory, n_hops=leg.n_hops)
    source_chip, target_chip = fabric.chip[leg.source], fabric.chip[leg.target]
    is_networked, is_linked = _paths(fabric, leg)
    is_on_chip = (source_chip == target_chip) & (leg.source != leg.target)
    nic = fabric.host if fabric.is_torus else np.arange(fabric.topology.n_devices)

    def largest(ids: IntArray, chosen: NDArray[np.bool_]) -> float:
        return float(np.bincount(ids[chosen], weights=leg.share[chosen]).max(initial=0.0))

    return LegDemand(
        link=float(link_load(fabric, leg).max()),
        injected=largest(source_chip, is_linked),
        die=largest(leg.source, is_on_chip),
        host=max(largest(nic[ids], is_networked) for ids in (leg.source, leg.target)),
        memory=memory,
        n_hops=leg.n_hops,
    )


def _paths(fabric: Fabric, leg: Leg) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[n] whether a transfer is over the DCN, and whether over links of a slice or a node."""
    domain = fabric.slice_index if fabric.is_torus else fabric.host
    is_networked = domain[leg.source] != domain[leg.target]
    return is_networked, ~is_networked & (fabric.chip[leg.source] != fabric.chip[leg.target])


def _summed(ids: IntArray, share: FloatArray, n: int) -> FloatArray:
    return np.asarray(np.bincount(ids, weights=share, minlength=n), dtype=np.float64)


def _link_id(chip: IntArray, dim: int, direction: int) -> IntArray:
    return (chip * N_DIMS + dim) * _N_DIRECTIONS + direction


def link_load(fabric: Fabric, leg: Leg) -> FloatArray:
    """[n_chips, dims, directions: up, down] the share on every link that leaves a chip.

    ICI routes in dimension order (scaling book, part 2, "nearest neighbors"): x, then y, then z, the
    shorter way. If both ways around a ring are equally long, each takes half.
    """
    shape = (fabric.topology.n_chips, N_DIMS, _N_DIRECTIONS)
    link, (_, is_linked) = np.zeros(prod(shape)), _paths(fabric, leg)
    source, target, share = leg.source[is_linked], leg.target[is_linked], leg.share[is_linked]
    if not fabric.is_torus:
        for direction, device in enumerate((source, target)):  # the one link of a GPU, up and down
            link += _summed(_link_id(fabric.chip[device], 0, direction), share, len(link))
        return link.reshape(shape)
    here, there = fabric.coordinates[source].copy(), fabric.coordinates[target]
    slices, (n_x, n_y, n_z) = fabric.slice_index[source], fabric.sizes
    for dim in range(N_DIMS):
        distance = there[:, dim] - here[:, dim]
        for direction, (hops, weight) in enumerate(_hops(fabric, dim, distance, share)):
            sign = 1 - 2 * direction
            for step in range(int(hops.max(initial=0))):
                passes = hops > step
                at = here[passes].copy()
                at[:, dim] = (at[:, dim] + sign * step) % fabric.sizes[dim]
                chip = ((slices[passes] * n_z + at[:, 2]) * n_y + at[:, 1]) * n_x + at[:, 0]
                link += _summed(_link_id(chip, dim, direction), weight[passes], len(link))
        here[:, dim] = there[:, dim]
    return link.reshape(shape)


def _hops(
    fabric: Fabric, dim: int, distance: IntArray, share: FloatArray
) -> tuple[tuple[IntArray, FloatArray], tuple[IntArray, FloatArray]]:
    if not fabric.wraps[dim]:
        return (np.maximum(distance, 0), share), (np.maximum(-distance, 0), share)
    size = fabric.sizes[dim]
    around = distance % size
    is_up = around * 2 <= size
    is_down = (around * 2 >= size) & (around > 0)
    halved = np.where(around * 2 == size, share / 2, share)
    return (np.where(is_up, around, 0), halved), (np.where(is_down, size - around, 0), halved)


def hops_between(fabric: Fabric, source: IntArray, target: IntArray) -> IntArray:
    """[n] links on the route of each transfer; 1 between cores, GPUs of a node, and slices."""
    if not fabric.is_torus:
        return np.ones_like(source)
    distance = np.abs(fabric.coordinates[source] - fabric.coordinates[target])
    for dim in range(N_DIMS):
        if fabric.wraps[dim]:
            distance[:, dim] = np.minimum(distance[:, dim], fabric.sizes[dim] - distance[:, dim])
    hops = np.maximum(distance.sum(axis=1), source != target)
    return np.where(fabric.slice_index[source] != fabric.slice_index[target], 1, hops)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """The devices of all groups in coordinate order: [n_groups, slice, z, y, x, core]."""

    fabric: Fabric
    devices: IntArray
    is_ring: tuple[bool, ...]  # for z, y, x: a group's members close a ring at equal distances

    @property
    def shape(self) -> tuple[int, ...]:
        """Members along slice, z, y, x and core; their product is the group size."""
        return self.devices.shape[1:]


@lru_cache(maxsize=CACHED_LATTICES)
def lattice_of(fabric: Fabric, groups: Groups) -> Lattice | None:
    """The lattice of the groups; None if a group is not a box, or the groups differ in shape."""
    devices = np.array(groups, dtype=np.int64)
    domain, (at_x, at_y, at_z) = fabric.slice_index, fabric.coordinates.T
    if not fabric.is_torus:
        domain, at_x = fabric.host, at_x % fabric.topology.chip.chips_per_host
    columns = (domain, at_z, at_y, at_x, fabric.core)
    keys = np.stack(columns, axis=1)  # [n_devices, 5], slowest axis first
    distinct = 1 + (np.diff(np.sort(keys[devices], axis=1), axis=1) != 0).sum(axis=1)
    shape = tuple(distinct[0].tolist())  # distinct is [group, axis]
    if (distinct != shape).any() or np.prod(shape) != devices.shape[1]:
        return None
    rank: IntArray = np.asarray(np.ravel_multi_index(tuple(keys.T), tuple(keys.max(axis=0) + 1)))
    order = np.argsort(rank[devices], axis=1)
    ordered = np.take_along_axis(devices, order, axis=1).reshape(len(devices), *shape)
    rings = (_is_ring(fabric, ordered, axis) for axis in (2, 3, 4))
    return Lattice(fabric=fabric, devices=ordered, is_ring=tuple(rings))


def _is_ring(fabric: Fabric, devices: IntArray, axis: int) -> bool:
    """Whether members along z, y or x of [group, slice, z, y, x, core] close a ring at equal distances."""
    dim = 4 - axis
    n_members, size = devices.shape[axis], fabric.sizes[dim]
    if not fabric.wraps[dim] or n_members < 3 or size % n_members:
        return False
    steps = np.diff(fabric.coordinates[devices, dim], axis=axis)
    return bool((steps == size // n_members).all())
