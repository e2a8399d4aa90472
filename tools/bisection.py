"""Bisection bound of a slice: the least time of an all-to-all over all of its devices."""

from meshscope.errors import SpecError
from meshscope.hardware.interconnect.fabric import fabric_of
from meshscope.hardware.topology import Topology


def n_bisection_links(topology: Topology) -> int:
    """Links in one direction between the halves of one slice, cut across its longest dimension.

    SpecError for a slice without ICI, or with an odd longest dimension.
    """
    fabric = fabric_of(topology)
    longest = max(range(3), key=lambda dim: fabric.sizes[dim])
    size = fabric.sizes[longest]
    if not fabric.is_torus or size % 2:
        raise SpecError(
            f"'{topology.name}' cannot be bisected: its longest dimension is {size}. "
            "Give a TPU slice whose longest dimension is even."
        )
    n_rows = topology.n_chips // topology.n_slices // size
    return n_rows * (2 if fabric.wraps[longest] else 1)


def least_all_to_all_s(topology: Topology, payload_bytes: float) -> float:
    """Lower bound in seconds for an all-to-all over one slice, at the published peak.

    Each device holds `payload_bytes` and sends half of it to the other half of the slice. Source: the
    bisection argument of scaling book, part 3, without its factor for one ring.
    """
    link_bytes_per_s = topology.chip.link_bytes_per_s
    if link_bytes_per_s is None:
        raise SpecError(f"'{topology.chip.name}' has no published link rate. Give a TPU slice.")
    crossing_bytes = topology.devices_per_slice / 2 * payload_bytes / 2
    return crossing_bytes / (n_bisection_links(topology) * link_bytes_per_s)
