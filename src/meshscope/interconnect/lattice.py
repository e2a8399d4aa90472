"""The box that the groups of a collective form on the chips: slices, grid dimensions and cores."""

from dataclasses import dataclass

import numpy as np

from meshscope.events.collective import Groups
from meshscope.interconnect.fabric import N_DIMS, Fabric
from meshscope.interconnect.placement import IntArray

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
