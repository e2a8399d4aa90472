"""Where each device of a slice sits: the one place that turns device ids into coordinates.

Device ids are positions in the mesh, and the programs lay the mesh over the devices in the order in
which the TPU compiler lists them (`programs/build.device_mesh`). That order, read from libtpu 0.0.42
for the topologies in `tests/golden/placements.json`: slices; in a slice hosts, x fastest, then y,
then z; in a host chips, x fastest, then y; on a chip cores. GPUs are listed node by node.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Of each device id: slice, chip coordinates in the slice, core on the chip, host over all slices."""

    slice_index: IntArray  # [n_devices]
    coordinates: IntArray  # [n_devices, 3] x, y, z
    core: IntArray  # [n_devices]
    host: IntArray  # [n_devices]


@cache
def placement_of(topology: Topology) -> Placement:
    """Where the devices of a topology sit, in the order of their ids."""
    if topology.chip.kind is not ChipKind.TPU:
        return _counted(topology)
    x, y, z = (*topology.grid, 1, 1)[:3]
    host_x, host_y, _ = topology.host_bounds
    cores = topology.chip.devices_per_chip
    # Axes from the slowest to the fastest.
    shape = (topology.n_slices, z, y // host_y, x // host_x, host_y, host_x, cores)
    at = np.indices(shape).reshape(len(shape), -1)
    slice_index, at_z, block_y, block_x, in_y, in_x, core = at
    hosts_per_slice = (x // host_x) * (y // host_y) * z
    in_slice = (at_z * (y // host_y) + block_y) * (x // host_x) + block_x
    return Placement(
        slice_index=slice_index,
        coordinates=np.stack([block_x * host_x + in_x, block_y * host_y + in_y, at_z], axis=1),
        core=core,
        host=slice_index * hosts_per_slice + in_slice,
    )


def _counted(topology: Topology) -> Placement:
    """GPUs and virtual CPU devices: nodes of so many, one after the other; no torus."""
    device = np.arange(topology.n_devices)
    slice_index, in_slice = np.divmod(device, topology.devices_per_slice)
    per_host = topology.chip.chips_per_host
    if topology.chip.kind is ChipKind.CPU:
        per_host = topology.devices_per_slice  # all on this machine
    hosts_per_slice = -(-topology.devices_per_slice // per_host)
    zero = np.zeros_like(device)
    return Placement(
        slice_index=slice_index,
        coordinates=np.stack([in_slice, zero, zero], axis=1),
        core=zero,
        host=slice_index * hosts_per_slice + in_slice // per_host,
    )
