"""Physical coordinates of each device id.

Device ids count the devices in the TPU compiler's order; programs lay the mesh over them in this order
unless an experiment has another (`programs/jax/build.device_mesh`). libtpu 0.0.42 lists the topologies of
`tests/golden/placements.json` as follows: slices; hosts of a slice, x fastest, then y, then z; chips of
a host, x fastest, then y; cores of a chip. GPUs are listed node by node.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology

IntArray = NDArray[np.int64]


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
    x, y, z = (*topology.grid, 1, 1)[:3]
    host_x, host_y, _ = topology.host_bounds
    cores = topology.chip.devices_per_chip
    # Axes from the slowest to the fastest.
    shape = (topology.n_slices, z, y // host_y, x // host_x, host_y, host_x, cores)
    at = np.indices(shape).reshape(len(shape), -1)
    slice_index, at_z, host_row, host_column, row, column, core = at
    hosts_per_slice = (x // host_x) * (y // host_y) * z
    host_in_slice = (at_z * (y // host_y) + host_row) * (x // host_x) + host_column
    return Placement(
        slice_index=slice_index,
        coordinates=np.stack(
            [host_column * host_x + column, host_row * host_y + row, at_z], axis=1
        ),
        core=core,
        host=slice_index * hosts_per_slice + host_in_slice,
    )


def _node_placement(topology: Topology) -> Placement:
    """GPUs and virtual CPU devices: nodes of equal size in sequence, without a torus."""
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
