"""The wires of a topology, and what a set of transfers puts on each of them.

Four things can be the narrowest: one ICI link in one direction, what one chip can inject into its
links at once, the wire between the two cores of a chip, and the network card of a host. GPUs of a
node hang on a switch: their one link is NVLink as a whole. Virtual CPU devices share one memory.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshscope.interconnect.placement import IntArray, Placement, placement_of
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology

FloatArray = NDArray[np.float64]

N_DIMS = 3
N_DIRECTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """Transfers that run at the same time: `share` of the payload from each source to its target."""

    source: IntArray  # [n] device ids
    target: IntArray  # [n]
    share: FloatArray  # [n]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """What transfers put on each wire, in units of the payload."""

    link: FloatArray  # [n_chips, 3 dims, 2 directions: up, down] leaving the chip
    injected: FloatArray  # [n_chips] sent off the chip by its own cores
    die: FloatArray  # [n_devices] sent to the other core of the chip
    host: FloatArray  # [n_hosts; GPUs: n_devices] the larger of what leaves and what enters
    memory: float  # all together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """Chips of a topology, their places and which dimensions wrap around."""

    topology: Topology
    placement: Placement
    sizes: tuple[int, int, int]
    wraps: tuple[bool, bool, bool]
    chip: IntArray  # [n_devices]

    @property
    def is_torus(self) -> bool:
        """Whether chips are joined by links to their neighbours, not by a switch or a memory."""
        return self.topology.chip.kind is ChipKind.TPU


def wraps_around(topology: Topology) -> tuple[bool, bool, bool]:
    """Which dimensions close into a ring.

    Source: scaling book, part 2: v5e and v6e have "wraparounds along any axis of size 16"; for v4
    and v5p "any multiple of a full cube (e.g. 4x4x4 or 4x4x8) will have wraparounds", smaller ones
    "no wraparounds". tpu7x is built of the same cubes (cloud.google.com/tpu/docs/tpu7x).
    """
    chip, every = topology.chip, topology.chip.wraps_from
    sizes = (*topology.grid, 1, 1)[:N_DIMS]
    if chip.kind is not ChipKind.TPU or every is None:
        return (False, False, False)
    closes = [size > 1 and size % every == 0 for size in sizes]
    if chip.n_grid_dims == N_DIMS and not all(closes):
        return (False, False, False)
    x, y, z = closes
    return (x, y, z)


@cache
def fabric_of(topology: Topology) -> Fabric:
    """The wires of a topology."""
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
    """What the transfers of a flow put on every wire, all of them at the same time."""
    place = fabric.placement
    source_chip, target_chip = fabric.chip[flow.source], fabric.chip[flow.target]
    is_networked = place.slice_index[flow.source] != place.slice_index[flow.target]
    if fabric.topology.chip.kind is ChipKind.GPU:
        is_networked = place.host[flow.source] != place.host[flow.target]
    if fabric.topology.chip.kind is ChipKind.CPU:
        return _only_memory(flow)
    is_on_chip = (source_chip == target_chip) & (flow.source != flow.target)
    is_linked = ~is_networked & (source_chip != target_chip)
    n_chips = fabric.topology.n_chips
    linked = flow.share[is_linked]
    link = np.zeros(n_chips * N_DIMS * N_DIRECTIONS)
    if fabric.is_torus:
        _route(fabric, link, flow.source[is_linked], flow.target[is_linked], linked)
    else:  # the one link of a GPU, up and down
        for direction, chip in enumerate((source_chip, target_chip)):
            ids = _link_id(chip[is_linked], 0, direction)
            link += _summed(ids, linked, len(link))
    networked = flow.share[is_networked]
    # A TPU host has one network card, a GPU its own.
    card = place.host if fabric.is_torus else np.arange(fabric.topology.n_devices)
    leaving, entering = (
        _summed(card[ids[is_networked]], networked, int(card.max()) + 1)
        for ids in (flow.source, flow.target)
    )
    n_devices = fabric.topology.n_devices
    return Loads(
        link=link.reshape(n_chips, N_DIMS, N_DIRECTIONS),
        injected=_summed(source_chip[is_linked], linked, n_chips),
        die=_summed(flow.source[is_on_chip], flow.share[is_on_chip], n_devices),
        host=np.maximum(leaving, entering),
        memory=float(flow.share.sum()),
    )


def _only_memory(flow: Flow) -> Loads:
    nothing = np.zeros(1)
    return Loads(
        link=nothing.reshape(1, 1, 1),
        injected=nothing,
        die=nothing,
        host=nothing,
        memory=float(flow.share.sum()),
    )


def _summed(ids: IntArray, share: FloatArray, n: int) -> FloatArray:
    """[n] the shares added up by id."""
    return np.asarray(np.bincount(ids, weights=share, minlength=n), dtype=np.float64)


def _link_id(chip: IntArray, dim: int, direction: int) -> IntArray:
    return (chip * N_DIMS + dim) * N_DIRECTIONS + direction


def _route(
    fabric: Fabric, link: FloatArray, source: IntArray, target: IntArray, share: FloatArray
) -> None:
    """Adds each transfer to the links on its way: first along x, then y, then z, the shorter way round.

    Dimension order is how ICI routes a transfer (scaling book, part 2, "nearest neighbours"); where
    both ways round are equally long, half goes each way.
    """
    at = fabric.placement.coordinates[source].copy()
    to = fabric.placement.coordinates[target]
    in_slice = fabric.placement.slice_index[source]
    for dim in range(N_DIMS):
        size = fabric.sizes[dim]
        ahead = to[:, dim] - at[:, dim]
        up, down = np.maximum(ahead, 0), np.maximum(-ahead, 0)
        up_share = down_share = share
        if fabric.wraps[dim]:
            round_up = ahead % size
            is_tie = round_up * 2 == size
            is_up = round_up * 2 <= size
            is_down = (round_up * 2 >= size) & (round_up > 0)
            up, down = np.where(is_up, round_up, 0), np.where(is_down, size - round_up, 0)
            up_share = down_share = np.where(is_tie, share / 2, share)
        for direction, hops, weight in ((0, up, up_share), (1, down, down_share)):
            sign = 1 - 2 * direction
            for step in range(int(hops.max(initial=0))):
                passes = hops > step
                here = at[passes].copy()
                here[:, dim] = (here[:, dim] + sign * step) % size
                chip = _chip(fabric, in_slice[passes], here)
                link += _summed(_link_id(chip, dim, direction), weight[passes], len(link))
        at[:, dim] = to[:, dim]


def _chip(fabric: Fabric, in_slice: IntArray, at: IntArray) -> IntArray:
    x, y, z = fabric.sizes
    return ((in_slice * z + at[:, 2]) * y + at[:, 1]) * x + at[:, 0]


def hops_between(fabric: Fabric, source: IntArray, target: IntArray) -> IntArray:
    """Links on the way of each transfer; between cores, GPUs of a node, slices: 1."""
    if not fabric.is_torus:
        return np.ones_like(source)
    ahead = np.abs(fabric.placement.coordinates[source] - fabric.placement.coordinates[target])
    for dim in range(N_DIMS):
        if fabric.wraps[dim]:
            ahead[:, dim] = np.minimum(ahead[:, dim], fabric.sizes[dim] - ahead[:, dim])
    hops = ahead.sum(axis=1)
    place = fabric.placement
    is_networked = place.slice_index[source] != place.slice_index[target]
    return np.where(is_networked, 1, np.maximum(hops, source != target))
