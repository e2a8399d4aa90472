"""The links of a topology, the load of transfers on each, and the box that the groups of a collective form.

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
from meshscope.interconnect.placement import IntArray, Placement, placement_of

FloatArray = NDArray[np.float64]

N_DIMS = 3
N_DIRECTIONS = 2


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


def wraps_around(topology: Topology) -> tuple[bool, bool, bool]:
    """The dimensions that close into a ring.

    Source: scaling book, part 2: v5e and v6e have "wraparounds along any axis of size 16"; for v4
    and v5p "any multiple of a full cube (e.g. 4x4x4 or 4x4x8) will have wraparounds", smaller ones
    "no wraparounds". tpu7x consists of the same cubes (cloud.google.com/tpu/docs/tpu7x).
    """
    chip, multiple = topology.chip, topology.chip.wraps_from
    sizes = (*topology.grid, 1, 1)[:N_DIMS]
    if chip.kind is not ChipKind.TPU or multiple is None:
        return (False, False, False)
    closes = [size > 1 and size % multiple == 0 for size in sizes]
    if chip.n_grid_dims == N_DIMS and not all(closes):
        return (False, False, False)
    x, y, z = closes
    return (x, y, z)


@cache
def fabric_of(topology: Topology) -> Fabric:
    """The links of a topology."""
    placement = placement_of(topology)
    x, y, z = (*topology.grid, 1, 1)[:N_DIMS]
    at = placement.coordinates
    chip = ((placement.slice_index * z + at[:, 2]) * y + at[:, 1]) * x + at[:, 0]
    return Fabric(
        topology=topology,
        placement=placement,
        sizes=(x, y, z),
        wraps=wraps_around(topology),
        chip=chip,
    )


def loads_of(fabric: Fabric, flow: Flow) -> Loads:
    """The load that simultaneous transfers put on every link."""
    if fabric.topology.chip.kind is ChipKind.CPU:
        return _memory_load(flow)
    source_chip, target_chip = fabric.chip[flow.source], fabric.chip[flow.target]
    is_networked = _is_networked(fabric, flow)
    is_linked = ~is_networked & (source_chip != target_chip)
    is_on_chip = (source_chip == target_chip) & (flow.source != flow.target)
    n_chips, n_devices = fabric.topology.n_chips, fabric.topology.n_devices
    return Loads(
        link=_link_load(fabric, flow, is_linked).reshape(n_chips, N_DIMS, N_DIRECTIONS),
        injected=_summed(source_chip[is_linked], flow.share[is_linked], n_chips),
        die=_summed(flow.source[is_on_chip], flow.share[is_on_chip], n_devices),
        host=_host_load(fabric, flow, is_networked),
        memory=float(flow.share.sum()),
    )


def _is_networked(fabric: Fabric, flow: Flow) -> NDArray[np.bool_]:
    """[n] whether a transfer crosses the DCN: between slices, or between GPU nodes."""
    place = fabric.placement
    domain = place.host if fabric.topology.chip.kind is ChipKind.GPU else place.slice_index
    return domain[flow.source] != domain[flow.target]


def _link_load(fabric: Fabric, flow: Flow, is_linked: NDArray[np.bool_]) -> FloatArray:
    """[n_chips x dims x directions] the share on every link."""
    link = np.zeros(fabric.topology.n_chips * N_DIMS * N_DIRECTIONS)
    source, target, share = flow.source[is_linked], flow.target[is_linked], flow.share[is_linked]
    if fabric.is_torus:
        _route(fabric, link, source, target, share)
        return link
    for direction, device in enumerate((source, target)):  # the one link of a GPU, up and down
        link += _summed(_link_id(fabric.chip[device], 0, direction), share, len(link))
    return link


def _host_load(fabric: Fabric, flow: Flow, is_networked: NDArray[np.bool_]) -> FloatArray:
    """[n_nics] the larger of sent and received; a TPU host has one NIC, a GPU its own."""
    nic = fabric.placement.host if fabric.is_torus else np.arange(fabric.topology.n_devices)
    share = flow.share[is_networked]
    sent, received = (
        _summed(nic[ids[is_networked]], share, int(nic.max()) + 1)
        for ids in (flow.source, flow.target)
    )
    return np.maximum(sent, received)


def _memory_load(flow: Flow) -> Loads:
    zero = np.zeros(1)
    memory = float(flow.share.sum())
    return Loads(link=zero.reshape(1, 1, 1), injected=zero, die=zero, host=zero, memory=memory)


def _summed(ids: IntArray, share: FloatArray, n: int) -> FloatArray:
    """[n] the shares added up by id."""
    return np.asarray(np.bincount(ids, weights=share, minlength=n), dtype=np.float64)


def _link_id(chip: IntArray, dim: int, direction: int) -> IntArray:
    return (chip * N_DIMS + dim) * N_DIRECTIONS + direction


def _route(
    fabric: Fabric, link: FloatArray, source: IntArray, target: IntArray, share: FloatArray
) -> None:
    """Adds each transfer to the links on its dimension-ordered route: x, then y, then z, the shorter way.

    ICI routes in dimension order (scaling book, part 2, "nearest neighbors"). If both ways around a
    ring are equally long, each takes half.
    """
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
                chip = _chip_index(fabric, slices[passes], at)
                link += _summed(_link_id(chip, dim, direction), weight[passes], len(link))
        here[:, dim] = there[:, dim]


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


def _chip_index(fabric: Fabric, slices: IntArray, at: IntArray) -> IntArray:
    x, y, z = fabric.sizes
    return ((slices * z + at[:, 2]) * y + at[:, 1]) * x + at[:, 0]


def hops_between(fabric: Fabric, source: IntArray, target: IntArray) -> IntArray:
    """[n] links on the route of each transfer; 1 between cores, GPUs of a node, and slices."""
    if not fabric.is_torus:
        return np.ones_like(source)
    distance = np.abs(fabric.placement.coordinates[source] - fabric.placement.coordinates[target])
    for dim in range(N_DIMS):
        if fabric.wraps[dim]:
            distance[:, dim] = np.minimum(distance[:, dim], fabric.sizes[dim] - distance[:, dim])
    hops = distance.sum(axis=1)
    place = fabric.placement
    crosses_slices = place.slice_index[source] != place.slice_index[target]
    return np.where(crosses_slices, 1, np.maximum(hops, source != target))


N_AXES = N_DIMS + 2  # slice (or node), z, y, x, core


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """The devices of all groups in coordinate order: [n_groups, slice, z, y, x, core].

    `is_ring` says for z, y and x whether a group's members close a ring at equal distances.
    """

    devices: IntArray
    is_ring: tuple[bool, bool, bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """Members along slice, z, y, x and core; their product is the group size."""
        return self.devices.shape[1:]


def lattice_of(fabric: Fabric, groups: Groups) -> Lattice | None:
    """The lattice of the groups; None if a group is not a box, or the groups differ in shape."""
    devices = np.array(groups, dtype=np.int64)
    keys = _coordinates(fabric)
    of_groups = keys[devices]  # [n_groups, n, 5]
    shapes = {
        tuple(len(set(group[:, axis].tolist())) for axis in range(N_AXES)) for group in of_groups
    }
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    if np.prod(shape) != devices.shape[1]:
        return None
    order = np.argsort(_rank(keys)[devices], axis=1)
    ordered = np.take_along_axis(devices, order, axis=1).reshape(len(devices), *shape)
    return Lattice(devices=ordered, is_ring=_rings(fabric, ordered))


def _coordinates(fabric: Fabric) -> IntArray:
    """[n_devices, 5] slice (GPUs: node), z, y, x and core of each device."""
    place = fabric.placement
    if fabric.is_torus:
        domain, at = place.slice_index, place.coordinates
    else:
        domain, at = place.host, place.coordinates.copy()
        at[:, 0] %= fabric.topology.chip.chips_per_host
    return np.stack([domain, at[:, 2], at[:, 1], at[:, 0], place.core], axis=1)


def _rank(keys: IntArray) -> IntArray:
    """[n_devices] position in coordinate order, slowest axis first."""
    spans = keys.max(axis=0) + 1
    rank = np.zeros(len(keys), dtype=np.int64)
    for axis in range(N_AXES):
        rank = rank * spans[axis] + keys[:, axis]
    return rank


def _rings(fabric: Fabric, devices: IntArray) -> tuple[bool, bool, bool]:
    closes: list[bool] = []
    for axis, dim in ((2, 2), (3, 1), (4, 0)):  # z, y, x of [group, slice, z, y, x, core]
        n_members, size = devices.shape[axis], fabric.sizes[dim]
        if not fabric.wraps[dim] or n_members < 3 or size % n_members:
            closes.append(False)
            continue
        steps = np.diff(fabric.placement.coordinates[devices, dim], axis=axis)
        closes.append(bool((steps == size // n_members).all()))
    z, y, x = closes
    return (z, y, x)
