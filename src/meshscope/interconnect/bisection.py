"""What a slice can carry across its middle: no all-to-all over all of it is faster than that."""

from meshscope.errors import SpecError
from meshscope.interconnect.fabric import fabric_of
from meshscope.spec.hardware.topology import Topology


def n_bisection_links(topology: Topology) -> int:
    """Links, each in one direction, that join the two halves of one slice, cut across its longest dimension.

    SpecError for a slice that has no links between chips, or whose longest dimension is odd.
    """
    fabric = fabric_of(topology)
    longest = max(range(3), key=lambda dim: fabric.sizes[dim])
    size = fabric.sizes[longest]
    if not fabric.is_torus or size % 2:
        raise SpecError(
            f"'{topology.name}' has no middle to cut across: its longest dimension is {size}. "
            "A bisection is known for TPU slices of even length."
        )
    n_rows = topology.n_chips // topology.n_slices // size
    return n_rows * (2 if fabric.wraps[longest] else 1)


def least_all_to_all_s(topology: Topology, payload_bytes: float) -> float:
    """Seconds that an all-to-all over one whole slice takes at least, at the published peak.

    Each device holds `payload_bytes`, half of which belongs to the other half of the slice. Source:
    the bisection argument of scaling book, part 3, without its factor for one ring.
    """
    link_bytes_per_s = topology.chip.link_bytes_per_s
    if link_bytes_per_s is None:
        raise SpecError(f"nobody has published the links of '{topology.chip.name}'.")
    crossing_bytes = topology.devices_per_slice / 2 * payload_bytes / 2
    return crossing_bytes / (n_bisection_links(topology) * link_bytes_per_s)
