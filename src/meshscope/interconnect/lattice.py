"""The shape that the groups of a collective have on the chips: a box of rows, planes, cores and slices."""

from dataclasses import dataclass

import numpy as np

from meshscope.interconnect.fabric import N_DIMS, Fabric
from meshscope.interconnect.placement import IntArray
from meshscope.spec.plan.mesh import Groups

N_AXES = N_DIMS + 2  # slice (or node), z, y, x, core


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """The devices of all groups, in the order of their places: [n_groups, slice, z, y, x, core].

    `is_ring` says of z, y, x whether the group's members go all the way round, equally spaced.
    """

    devices: IntArray
    is_ring: tuple[bool, bool, bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """Members along slice, z, y, x and core; their product is the size of a group."""
        return self.devices.shape[1:]


def lattice_of(fabric: Fabric, groups: Groups) -> Lattice | None:
    """The lattice that every group forms; None where a group is no box, or the groups differ in shape."""
    devices = np.array(groups, dtype=np.int64)
    place = fabric.placement
    networked = place.slice_index
    at = place.coordinates
    if not fabric.is_torus:
        networked = place.host
        at = at.copy()
        at[:, 0] %= fabric.topology.chip.chips_per_host
    keys = np.stack([networked, at[:, 2], at[:, 1], at[:, 0], place.core], axis=1)
    of_group = keys[devices]  # [n_groups, n, 5]
    sizes = {tuple(len(np.unique(group[:, axis])) for axis in range(N_AXES)) for group in of_group}
    if len(sizes) != 1:
        return None
    (shape,) = sizes
    if np.prod(shape) != devices.shape[1]:
        return None
    # A number that grows with the place, slowest axis first.
    spans = keys.max(axis=0) + 1
    rank = np.zeros(len(keys), dtype=np.int64)
    for axis in range(N_AXES):
        rank = rank * spans[axis] + keys[:, axis]
    order = np.argsort(rank[devices], axis=1)
    laid = np.take_along_axis(devices, order, axis=1).reshape(len(devices), *shape)
    return Lattice(devices=laid, is_ring=_rings(fabric, laid))


def _rings(fabric: Fabric, laid: IntArray) -> tuple[bool, bool, bool]:
    found: list[bool] = []
    for axis, dim in ((2, 2), (3, 1), (4, 0)):  # z, y, x of [group, slice, z, y, x, core]
        n_members, size = laid.shape[axis], fabric.sizes[dim]
        if not fabric.wraps[dim] or n_members < 3 or size % n_members:
            found.append(False)
            continue
        at = fabric.placement.coordinates[laid, dim]
        steps = np.diff(at, axis=axis)
        found.append(bool((steps == size // n_members).all()))
    z, y, x = found
    return (z, y, x)
