"""Physical coordinates of each device id, the links of a topology, and the load of transfers on each.

Device ids count the devices in the TPU compiler's order; programs lay the mesh over them in this order
unless an experiment has another (`programs/jax/build.device_mesh`). libtpu 0.0.42 lists the topologies of
`tests/golden/placements.json` as follows: slices; hosts of a slice, x fastest, then y, then z; chips of
a host, x fastest, then y; cores of a chip. GPUs are listed node by node.

Four resources can be the bottleneck: one ICI link in one direction, the injection rate of a chip, the
path between the two cores of a chip, and the NIC of a host (DCN). The GPUs of a node share a switch:
NVLink counts as one link per GPU. Virtual CPU devices share one memory.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshscope.events.collective import Groups
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

N_DIMS = 3
_N_DIRECTIONS = 2
_N_AXES = N_DIMS + 2  # slice (or node), z, y, x, core


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Slice, chip coordinates in the slice, core and host of each device id; hosts count over all slices."""

    slice_index: IntArray  # [n_devices]
    coordinates: IntArray  # [n_devices, 3] x, y, z
    core: IntArray  # [n_devices]
    host: IntArray  # [n_devices]


@cache
def placement_of(topology: Topology) -> Placement:
    """The coordinates of the devices of a topology, in the order of their ids."""
    if topology.chip.kind is not ChipKind.TPU:
        return _node_placement(topology)
    x, y, z = (*topology.grid, 1, 1)[:N_DIMS]
    host_x, host_y, _ = topology.host_bounds
    # Axes from the slowest to the fastest.
    shape = (topology.n_slices, z, y // host_y, x // host_x, host_y, host_x)
    shape = (*shape, topology.chip.devices_per_chip)
    at = np.indices(shape).reshape(len(shape), -1)
    slice_index, at_z, host_row, host_column, row, column, core = at
    at_x, at_y = host_column * host_x + column, host_row * host_y + row
    host = ((slice_index * z + at_z) * (y // host_y) + host_row) * (x // host_x) + host_column
    return Placement(
        slice_index=slice_index,
        coordinates=np.stack([at_x, at_y, at_z], axis=1),
        core=core,
        host=host,
    )


def _node_placement(topology: Topology) -> Placement:
    """GPUs and virtual CPU devices: nodes of equal size in sequence, without a torus."""
    n = topology.devices_per_slice
    slice_index, in_slice = np.divmod(np.arange(topology.n_devices), n)
    is_cpu = topology.chip.kind is ChipKind.CPU  # all on this machine
    per_host = n if is_cpu else topology.chip.chips_per_host
    zero = np.zeros_like(in_slice)
    return Placement(
        slice_index=slice_index,
        coordinates=np.stack([in_slice, zero, zero], axis=1),
        core=zero,
        host=slice_index * -(-n // per_host) + in_slice // per_host,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """Simultaneous transfers: `share` of the payload from each source to its target."""

    source: IntArray  # [n] device ids
    target: IntArray  # [n]
    share: FloatArray  # [n]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """Load of a flow on every link, as a fraction of the payload."""

    link: FloatArray  # [n_chips, 3 dims, 2 directions: up, down] leaving the chip
    injected: FloatArray  # [n_chips] sent off the chip by its own cores
    die: FloatArray  # [n_devices] sent to the other core of the chip
    host: FloatArray  # [n_hosts; GPUs: n_devices] the larger of sent and received over DCN
    memory: float  # all transfers together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """The chips of a topology with their coordinates and wrap-around links."""

    topology: Topology
    placement: Placement
    sizes: tuple[int, int, int]
    wraps: tuple[bool, bool, bool]
    chip: IntArray  # [n_devices]

    @property
    def is_torus(self) -> bool:
        """Whether links join neighboring chips, without a switch or shared memory."""
        return self.topology.chip.kind is ChipKind.TPU

    def chip_index(self, slices: IntArray, at: IntArray) -> IntArray:
        """[n] the chips at these coordinates [n, 3]."""
        x, y, z = self.sizes
        return ((slices * z + at[:, 2]) * y + at[:, 1]) * x + at[:, 0]


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
    """The links of a topology."""
    place = placement_of(topology)
    x, y, z = (*topology.grid, 1, 1)[:N_DIMS]
    at = place.coordinates
    return Fabric(
        topology=topology,
        placement=place,
        sizes=(x, y, z),
        wraps=wraps_around(topology),
        chip=((place.slice_index * z + at[:, 2]) * y + at[:, 1]) * x + at[:, 0],
    )


def loads_of(fabric: Fabric, flow: Flow) -> Loads:
    """The load that simultaneous transfers put on every link."""
    memory = float(flow.share.sum())
    if fabric.topology.chip.kind is ChipKind.CPU:
        zero = np.zeros(1)
        return Loads(link=zero.reshape(1, 1, 1), injected=zero, die=zero, host=zero, memory=memory)
    source_chip, target_chip = fabric.chip[flow.source], fabric.chip[flow.target]
    place = fabric.placement
    domain = place.slice_index if fabric.is_torus else place.host
    is_networked = domain[flow.source] != domain[flow.target]  # over the DCN
    is_linked = ~is_networked & (source_chip != target_chip)
    is_on_chip = (source_chip == target_chip) & (flow.source != flow.target)
    n_chips, n_devices = fabric.topology.n_chips, fabric.topology.n_devices
    # A TPU host has one NIC, a GPU its own.
    nic = place.host if fabric.is_torus else np.arange(n_devices)
    sent, received = (
        _summed(nic[ids[is_networked]], flow.share[is_networked], int(nic.max()) + 1)
        for ids in (flow.source, flow.target)
    )
    return Loads(
        link=_link_load(fabric, flow, is_linked).reshape(n_chips, N_DIMS, _N_DIRECTIONS),
        injected=_summed(source_chip[is_linked], flow.share[is_linked], n_chips),
        die=_summed(flow.source[is_on_chip], flow.share[is_on_chip], n_devices),
        host=np.maximum(sent, received),
        memory=memory,
    )


def _summed(ids: IntArray, share: FloatArray, n: int) -> FloatArray:
    """[n] the shares added up by id."""
    return np.asarray(np.bincount(ids, weights=share, minlength=n), dtype=np.float64)


def _link_id(chip: IntArray, dim: int, direction: int) -> IntArray:
    return (chip * N_DIMS + dim) * _N_DIRECTIONS + direction


def _link_load(fabric: Fabric, flow: Flow, is_linked: NDArray[np.bool_]) -> FloatArray:
    """[n_chips x dims x directions] the share on every link.

    ICI routes in dimension order (scaling book, part 2, "nearest neighbors"): x, then y, then z, the
    shorter way. If both ways around a ring are equally long, each takes half.
    """
    link = np.zeros(fabric.topology.n_chips * N_DIMS * _N_DIRECTIONS)
    source, target, share = flow.source[is_linked], flow.target[is_linked], flow.share[is_linked]
    if not fabric.is_torus:
        for direction, device in enumerate((source, target)):  # the one link of a GPU, up and down
            link += _summed(_link_id(fabric.chip[device], 0, direction), share, len(link))
        return link
    here = fabric.placement.coordinates[source].copy()
    there = fabric.placement.coordinates[target]
    slices = fabric.placement.slice_index[source]
    for dim in range(N_DIMS):
        distance = there[:, dim] - here[:, dim]
        for direction, (hops, weight) in enumerate(_hops(fabric, dim, distance, share)):
            sign = 1 - 2 * direction
            for step in range(int(hops.max(initial=0))):
                passes = hops > step
                at = here[passes].copy()
                at[:, dim] = (at[:, dim] + sign * step) % fabric.sizes[dim]
                chip = fabric.chip_index(slices[passes], at)
                link += _summed(_link_id(chip, dim, direction), weight[passes], len(link))
        here[:, dim] = there[:, dim]
    return link


def _hops(
    fabric: Fabric, dim: int, distance: IntArray, share: FloatArray
) -> tuple[tuple[IntArray, FloatArray], tuple[IntArray, FloatArray]]:
    """Hops and share of each transfer up and down one dimension."""
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
    place = fabric.placement
    distance = np.abs(place.coordinates[source] - place.coordinates[target])
    for dim in range(N_DIMS):
        if fabric.wraps[dim]:
            distance[:, dim] = np.minimum(distance[:, dim], fabric.sizes[dim] - distance[:, dim])
    hops = np.maximum(distance.sum(axis=1), source != target)
    return np.where(place.slice_index[source] != place.slice_index[target], 1, hops)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """The devices of all groups in coordinate order: [n_groups, slice, z, y, x, core].

    `is_ring` says for z, y and x whether a group's members close a ring at equal distances.
    """

    devices: IntArray
    is_ring: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Members along slice, z, y, x and core; their product is the group size."""
        return self.devices.shape[1:]


def lattice_of(fabric: Fabric, groups: Groups) -> Lattice | None:
    """The lattice of the groups; None if a group is not a box, or the groups differ in shape."""
    devices = np.array(groups, dtype=np.int64)
    place = fabric.placement
    domain, at_x = place.slice_index, place.coordinates[:, 0]
    if not fabric.is_torus:
        domain, at_x = place.host, at_x % fabric.topology.chip.chips_per_host
    columns = (domain, place.coordinates[:, 2], place.coordinates[:, 1], at_x, place.core)
    keys = np.stack(columns, axis=1)  # [n_devices, 5], slowest axis first
    shapes = {
        tuple(len(set(group[:, axis].tolist())) for axis in range(_N_AXES))
        for group in keys[devices]
    }
    (shape, *others) = shapes
    if others or np.prod(shape) != devices.shape[1]:
        return None
    rank: IntArray = np.asarray(np.ravel_multi_index(tuple(keys.T), tuple(keys.max(axis=0) + 1)))
    order = np.argsort(rank[devices], axis=1)
    ordered = np.take_along_axis(devices, order, axis=1).reshape(len(devices), *shape)
    rings = (_is_ring(fabric, ordered, axis) for axis in (2, 3, 4))
    return Lattice(devices=ordered, is_ring=tuple(rings))


def _is_ring(fabric: Fabric, devices: IntArray, axis: int) -> bool:
    """Whether members along z, y or x of [group, slice, z, y, x, core] close a ring at equal distances."""
    dim = 4 - axis
    n_members, size = devices.shape[axis], fabric.sizes[dim]
    if not fabric.wraps[dim] or n_members < 3 or size % n_members:
        return False
    steps = np.diff(fabric.placement.coordinates[devices, dim], axis=axis)
    return bool((steps == size // n_members).all())
