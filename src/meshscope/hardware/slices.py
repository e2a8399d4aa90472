"""The TPU slices that a user can choose from, chip by chip."""

from collections.abc import Iterator

from meshscope.hardware.chips import CHIPS, Chip, ChipKind
from meshscope.hardware.topology import NAMES_COUNT_CORES, Topology, parse_topology

# The smallest slice of a 3D torus is a host; v5e and v6e are also rented as single chips
# (cloud.google.com/tpu/docs, pages "v5e" and "v6e": topologies 1x1 to 16x16).
SINGLE_CHIPS = frozenset({"v5e", "v6e"})


def cloud_name(chip: Chip, n_chips: int) -> str:
    """The cloud's name of a slice, e.g. `v6e-8`; v4, v5p and tpu7x names count cores, two per chip."""
    return f"{chip.name}-{n_chips * 2 if chip.name in NAMES_COUNT_CORES else n_chips}"


def standard_slices(chip: Chip) -> tuple[Topology, ...]:
    """The slices of a chip by size: powers of two, from a host to the largest in a pod."""
    return tuple(parse_topology(cloud_name(chip, n)) for n in _sizes(chip))


def every_slice() -> tuple[Topology, ...]:
    """The standard slices of all TPUs, smallest first."""
    tpus = (chip for chip in CHIPS.values() if chip.kind is ChipKind.TPU)
    slices = (topology for chip in tpus for topology in standard_slices(chip))
    return tuple(sorted(slices, key=lambda topology: topology.n_chips))


def _sizes(chip: Chip) -> Iterator[int]:
    """Chips of the standard slices."""
    if chip.name in SINGLE_CHIPS:
        yield 1
    n_chips = chip.chips_per_host
    while chip.pod_chips is not None and n_chips <= chip.pod_chips:
        yield n_chips
        n_chips *= 2
