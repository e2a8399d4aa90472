"""All-reduces of small payloads on ICI: libtpu's short rings, which exchange whole arrays.

libtpu 0.0.42.1 emits `RotatedPincerShortEmitter` with one phase per torus dimension, or one phase over
a ring of all chips. In a phase in one shot, each chip sends its whole array around the ring and adds up
what it receives. In a phase in steps, the phase is a reduce-scatter, and an all-gather ends the
collective. Read from the bundles of compiled all-reduces: receive waits, sizes of the DMAs, and the
field `is_multistep` of the compiler's text.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.interconnect.fabric import Fabric, Lattice, lattice_of
from meshscope.interconnect.strategies import (
    CHIP_AXES,
    Leg,
    Legs,
    color_orders,
    core_leg,
    phase_leg,
    reversed_legs,
    snake,
    strategies_of,
)

SHORT = "short rings"  # followed by 0 (one shot) or 1 (in steps) for each phase

# Compiled all-reduces of bf16 and f32 over 2x4, 4x4, 8x8, 16x16, 2x2x1 and 4x4x4 chips, 2 kB to 16 MB,
# libtpu 0.0.42.1: a phase is in one shot for up to 64 KiB of a color's array; a ring of all chips is
# short below 1 MiB, phases per dimension up to 2 MiB.
ONE_SHOT_BYTES = 1 << 16
MAX_RING_BYTES = (1 << 20) - 1
MAX_PHASES_BYTES = 1 << 21


def strategies_with_short(kind: Kind, fabric: Fabric, groups: Groups) -> dict[str, Legs]:
    """The strategies of a collective, with the short all-reduces of these groups."""
    known = strategies_of(kind, fabric, groups)
    return known | _short_reduces(fabric, groups) if kind is Kind.ALL_REDUCE else known


def _short_reduces(fabric: Fabric, groups: Groups) -> dict[str, Legs]:
    """The short all-reduces by name; empty without ICI between the chips of a group."""
    lattice = lattice_of(fabric, groups) if fabric.is_torus else None
    if lattice is None or lattice.shape[0] > 1 or not _phases(fabric, lattice):
        return {}
    n_phases = len(_phases(fabric, lattice))
    return {
        f"{SHORT} {','.join('1' * n_steps + '0' * (n_phases - n_steps))}": tuple(
            _legs(fabric, lattice, n_steps)
        )
        for n_steps in range(n_phases + 1)
    }


def short_payloads(name: str, fabric: Fabric, groups: Groups) -> tuple[float, float]:
    """The least and the largest payload for which libtpu takes this short all-reduce."""
    lattice = lattice_of(fabric, groups)
    assert lattice is not None
    sizes, n_steps = _phases(fabric, lattice), name.count("1")
    end, array = largest_short_payload(name), ONE_SHOT_BYTES * lattice.shape[-1] * len(sizes)
    limits = [min(end, array * prod(sizes[:n])) for n in range(len(sizes))]
    bounds = [-1, *limits, end]
    return bounds[n_steps] + 1, bounds[n_steps + 1]


def largest_short_payload(name: str) -> float:
    """The largest payload of any short all-reduce with as many phases."""
    return MAX_PHASES_BYTES if "," in name else MAX_RING_BYTES


def _phases(fabric: Fabric, lattice: Lattice) -> tuple[int, ...]:
    """Chips in the ring of each phase; one ring through all chips on planes with a side of two."""
    shape = (lattice.devices.shape[axis] for axis in CHIP_AXES)
    sizes = tuple(size for size in shape if size > 1)
    if fabric.topology.chip.n_grid_dims > 2 or min(sizes, default=0) > 2:
        return sizes
    return (prod(sizes),) if sizes else ()


def _legs(fabric: Fabric, lattice: Lattice, n_steps: int) -> Iterator[Leg]:
    """The cores of a chip split the array; then `n_steps` phases in steps, the others in one shot."""
    sizes, n_cores = _phases(fabric, lattice), lattice.shape[-1]
    cores = (core_leg(fabric, lattice),) if n_cores > 1 else ()
    yield from reversed_legs(cores)
    gathers: list[Leg] = []
    array = 1 / n_cores / len(sizes)
    for phase, size in enumerate(sizes):
        if phase < n_steps:
            array /= size
            gathers += [_gather(fabric, lattice, phase, array)]
            yield from reversed_legs(gathers[-1:])
        else:
            yield _gather(fabric, lattice, phase, array)
    yield from reversed(gathers)
    yield from cores


def _gather(fabric: Fabric, lattice: Lattice, phase: int, shard: float) -> Leg:
    """Each chip sends its shard to all others of the phase, both ways around, over all colors at once.

    Without a wrap-around link the compiler still forms a ring, whose last edge passes several chips: the
    loads of a line, in as many steps as a ring.
    """
    sizes = _phases(fabric, lattice)
    if len(sizes) == 1:
        leg = next(snake(fabric, lattice, shard, is_bidirectional=True))
    else:
        axes = [order[phase] for order in color_orders(lattice, len(sizes))]
        leg = phase_leg(fabric, lattice, axes, [shard] * len(sizes))
    return replace(leg, n_hops=sizes[phase] // 2)
