"""Strategies of each collective: sequential legs of transfers, for a payload of 1.

A strategy states only what bounds its time: the transfers of each leg and the number of sequential
hops. A reduce-scatter is a reversed all-gather, and an all-reduce is a reduce-scatter followed by an
all-gather, so only gathers are written out. Sources: scaling book, part 3 (rings over one, two and three
axes); XLA's names for its choice (`collective_algorithm_config` in compiled HLO: strategies
`UniDirection1DRing`, `UniDirectionNDRing` with one color per direction and one phase per axis, emitters
`RotatedPincer`).

libtpu 0.0.42.1 emits `RotatedPincerShortEmitter` with one phase per torus dimension, or one phase over
a ring of all chips. In a phase in one shot, each chip sends its whole array around the ring and adds up
what it receives. In a phase in steps, the phase is a reduce-scatter, and an all-gather ends the
collective. Read from the bundles of compiled all-reduces: receive waits, sizes of the DMAs, and the
field `is_multistep` of the compiler's text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import assert_never

import numpy as np

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.interconnect.fabric import Fabric, Flow, Lattice, hops_between, lattice_of
from meshscope.interconnect.placement import IntArray

BIDIRECTIONAL_RING = "bidirectional ring"
UNIDIRECTIONAL_RING = "unidirectional ring"
MULTI_COLOR = "multi-color rings"  # dimension-ordered, each color starting with another axis
DIMENSION_ORDERED = "dimension-ordered rings"
ID_ORDERED = "ring in id order"
DIRECT = "direct"

CHIP_AXES = (2, 3, 4)  # z, y, x of [group, slice, z, y, x, core]
_SLICE_AXIS, _CORE_AXIS = 1, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Simultaneous transfers, and their sequential hops. The next leg starts when they finish."""

    flow: Flow
    n_hops: int


Legs = tuple[Leg, ...]


def strategies_of(kind: Kind, fabric: Fabric, groups: Groups) -> dict[str, Legs]:  # noqa: C901, PLR0911  one per kind
    """The strategies for a collective over these groups, all groups at once."""
    match kind:
        case Kind.ALL_GATHER:
            return _gathers(fabric, groups)
        case Kind.REDUCE_SCATTER:
            return {name: reversed_legs(legs) for name, legs in _gathers(fabric, groups).items()}
        case Kind.ALL_REDUCE:
            gathers = _gathers(fabric, groups).items()
            return {name: (*reversed_legs(legs), *legs) for name, legs in gathers}
        case Kind.ALL_TO_ALL:
            return {DIRECT: _exchange(fabric, groups)}
        case Kind.PERMUTE | Kind.SEND:
            return {DIRECT: _pairs(fabric, groups)}
        case Kind.RECV:  # counted with its send
            return {}
        case Kind.GATHER:
            return {DIRECT: _to_first(fabric, groups)}
        case Kind.BROADCAST:
            return {DIRECT: _from_first(fabric, groups)}
        case Kind.REDUCE:
            return {DIRECT: reversed_legs(_from_first(fabric, groups))}
        case Kind.SCATTER:
            return {DIRECT: reversed_legs(_to_first(fabric, groups))}
        case _:
            assert_never(kind)


def reversed_legs(legs: Sequence[Leg]) -> Legs:
    """The legs backwards: an all-gather becomes a reduce-scatter."""
    return tuple(
        Leg(
            flow=Flow(source=leg.flow.target, target=leg.flow.source, share=leg.flow.share),
            n_hops=leg.n_hops,
        )
        for leg in reversed(legs)
    )


def _gathers(fabric: Fabric, groups: Groups) -> dict[str, Legs]:
    """All-gathers of a payload of 1, of which each device starts with 1/n."""
    lattice = lattice_of(fabric, groups)
    if lattice is None:
        return {
            ID_ORDERED: (
                _ring(fabric, np.array(groups), 1 / len(groups[0]), is_bidirectional=True),
            )
        }
    by_name: dict[str, Callable[[float], Iterator[Leg]]] = {
        BIDIRECTIONAL_RING: lambda unit: snake(fabric, lattice, unit, is_bidirectional=True),
        UNIDIRECTIONAL_RING: lambda unit: snake(fabric, lattice, unit, is_bidirectional=False),
        DIMENSION_ORDERED: lambda unit: _phases(fabric, lattice, unit, n_colors=1),
    }
    n_chip_axes = sum(lattice.devices.shape[axis] > 1 for axis in CHIP_AXES)
    if n_chip_axes > 1:
        by_name[MULTI_COLOR] = lambda unit: _phases(fabric, lattice, unit, n_colors=n_chip_axes)
    if n_chip_axes == 0:
        by_name = {UNIDIRECTIONAL_RING: lambda _unit: iter(())}
    elif not fabric.is_torus:  # a switch: no axes and one direction
        by_name = {UNIDIRECTIONAL_RING: by_name[UNIDIRECTIONAL_RING]}
    return {name: _levels(fabric, lattice, chips) for name, chips in by_name.items()}


def _levels(fabric: Fabric, lattice: Lattice, chips: Callable[[float], Iterator[Leg]]) -> Legs:
    """Gathers over slices first (least data over DCN), then over chips, then over the two cores."""
    n_slices, *_, n_cores = lattice.shape
    n = prod(lattice.shape)
    legs: list[Leg] = []
    if n_slices > 1:
        order = np.moveaxis(lattice.devices, _SLICE_AXIS, -1)
        legs.append(_ring(fabric, order, 1 / n, is_bidirectional=False))
    legs += chips(n_slices / n)
    if n_cores > 1:
        legs.append(core_leg(fabric, lattice))
    return tuple(legs)


def core_leg(fabric: Fabric, lattice: Lattice) -> Leg:
    """The gather between the cores of each chip."""
    n_cores = lattice.shape[-1]
    return _line(fabric, np.moveaxis(lattice.devices, _CORE_AXIS, -1), 1 / n_cores)


def _ring(fabric: Fabric, order: IntArray, unit: float, *, is_bidirectional: bool) -> Leg:
    """Ring over the last axis of `order` with shards of `unit`; bidirectional rings split each shard."""
    n = order.shape[-1]
    after = np.roll(order, -1, axis=-1)
    share = unit * (n - 1) / (2 if is_bidirectional else 1)
    source, target = order.ravel(), after.ravel()
    if is_bidirectional:
        source, target = np.concatenate([source, target]), np.concatenate([target, source])
    n_steps = n // 2 if is_bidirectional else n - 1
    return _leg(fabric, source, target, np.full(len(source), share), n_steps)


def _line(fabric: Fabric, order: IntArray, unit: float) -> Leg:
    """Line over the last axis of `order` with shards of `unit`, without a wrap-around link.

    The link after the i-th member carries the shards of all members before it.
    """
    n = order.shape[-1]
    here, after = order[..., :-1], order[..., 1:]
    up = np.broadcast_to(unit * np.arange(1, n), here.shape)
    down = up[..., ::-1]
    source = np.concatenate([here.ravel(), after.ravel()])
    target = np.concatenate([after.ravel(), here.ravel()])
    return _leg(fabric, source, target, np.concatenate([up.ravel(), down.ravel()]), n - 1)


def _leg(
    fabric: Fabric, source: IntArray, target: IntArray, share: np.ndarray, n_steps: int
) -> Leg:
    distance = int(hops_between(fabric, source, target).max(initial=0))
    return Leg(
        flow=Flow(source=source, target=target, share=share),
        n_hops=n_steps * distance,
    )


def snake(
    fabric: Fabric, lattice: Lattice, unit: float, *, is_bidirectional: bool
) -> Iterator[Leg]:
    """Gather over one ring through all chips of the group, over neighbors if the box allows it."""
    members = np.moveaxis(lattice.devices, _CORE_AXIS, 2)  # [group, slice, core, z, y, x]
    shape = members.shape[3:]
    order = members.reshape(*members.shape[:3], -1)[..., hamiltonian_order(shape)]
    is_line = max(shape) == order.shape[-1] and not any(lattice.is_ring)
    if is_line and is_bidirectional:
        yield _line(fabric, order, unit)
    elif order.shape[-1] > 1:
        yield _ring(fabric, order, unit, is_bidirectional=is_bidirectional)


def hamiltonian_order(shape: tuple[int, ...]) -> IntArray:
    """Flat indices of a box in the order of a ring over neighbors; the ring closes if a size is even.

    The box becomes a plane of its longest even axis against a snake through the others. The ring runs
    down the first column of the plane and returns in a snake through the other columns.
    """
    sizes = sorted(range(len(shape)), key=lambda axis: (shape[axis] % 2, -shape[axis]))
    rows_axis, others = sizes[0], sorted(sizes[1:])
    indices = np.arange(prod(shape)).reshape(shape)
    plane = np.moveaxis(indices, rows_axis, 0)
    n_rows, (n_outer, n_inner) = shape[rows_axis], (shape[axis] for axis in others)
    snaked = plane.reshape(n_rows, n_outer, n_inner).copy()
    snaked[:, 1::2] = snaked[:, 1::2, ::-1]
    columns = snaked.reshape(n_rows, n_outer * n_inner)
    if columns.shape[1] == 1 or n_rows == 1:
        return columns.ravel()
    out = columns[:, 1:].copy()
    out[1::2] = out[1::2, ::-1]
    return np.concatenate([out.ravel(), columns[::-1, 0]])


def _phases(fabric: Fabric, lattice: Lattice, unit: float, *, n_colors: int) -> Iterator[Leg]:
    """Rings over one axis after the other; with several colors, each part of the data starts elsewhere."""
    orders = color_orders(lattice, n_colors)
    units = [unit / n_colors] * n_colors
    for phase in range(len(orders[0])):
        axes = [order[phase] for order in orders]
        yield phase_leg(fabric, lattice, axes, units)
        units = [
            shard * lattice.devices.shape[axis] for shard, axis in zip(units, axes, strict=True)
        ]


def color_orders(lattice: Lattice, n_colors: int) -> list[list[int]]:
    """The axes of each color in the order of its phases."""
    axes = [axis for axis in CHIP_AXES if lattice.devices.shape[axis] > 1]
    return [
        [axes[(first + phase) % len(axes)] for phase in range(len(axes))]
        for first in range(n_colors)
    ]


def phase_leg(
    fabric: Fabric, lattice: Lattice, axes: Sequence[int], shards: Sequence[float]
) -> Leg:
    """Gathers over one axis for each color at once, each with its shard."""
    return _together(
        [
            _ring(fabric, members, shard, is_bidirectional=True)
            if lattice.is_ring[CHIP_AXES.index(axis)]
            else _line(fabric, members, shard)
            for axis, shard in zip(axes, shards, strict=True)
            for members in (np.moveaxis(lattice.devices, axis, -1),)
        ]
    )


def _together(parts: list[Leg]) -> Leg:
    return Leg(
        flow=Flow(
            source=np.concatenate([part.flow.source for part in parts]),
            target=np.concatenate([part.flow.target for part in parts]),
            share=np.concatenate([part.flow.share for part in parts]),
        ),
        n_hops=max(part.n_hops for part in parts),
    )


def _exchange(fabric: Fabric, groups: Groups) -> Legs:
    """All-to-all with every part sent directly at once.

    On a box, the traffic along one axis is independent of the others: a device sends or forwards an
    equal part to every member of its row in any order of axes. The load is therefore counted by row.
    """
    lattice = lattice_of(fabric, groups)
    members = np.array(groups) if lattice is None else lattice.devices
    axes = [axis for axis in range(1, members.ndim) if members.shape[axis] > 1]
    parts = [_row_exchange(fabric, np.moveaxis(members, axis, -1)) for axis in axes]
    if not parts:
        return ()
    joined = _together(parts)
    return (Leg(flow=joined.flow, n_hops=sum(part.n_hops for part in parts)),)


def _row_exchange(fabric: Fabric, rows: IntArray) -> Leg:
    n = rows.shape[-1]
    flat = rows.reshape(-1, n)
    source = np.repeat(flat, n, axis=1).ravel()
    target = np.tile(flat, (1, n)).ravel()
    differs = source != target
    source, target = source[differs], target[differs]
    return _leg(fabric, source, target, np.full(len(source), 1 / n), 1)


def _pairs(fabric: Fabric, groups: Groups) -> Legs:
    """Point-to-point transfers: each group is a (source, target) pair."""
    pairs = np.array([group for group in groups if len(group) == 2 and group[0] != group[1]])
    if not len(pairs):
        return ()
    return (_leg(fabric, pairs[:, 0], pairs[:, 1], np.ones(len(pairs)), 1),)


def _to_first(fabric: Fabric, groups: Groups) -> Legs:
    """Gather: every member sends its part to the first."""
    members = np.array(groups)
    if members.shape[1] == 1:
        return ()
    others = members[:, 1:]
    first = np.broadcast_to(members[:, :1], others.shape)
    share = np.full(others.size, 1 / members.shape[1])
    return (_leg(fabric, others.ravel(), first.ravel(), share, 1),)


def _from_first(fabric: Fabric, groups: Groups) -> Legs:
    """Broadcast as a pipeline through the members; each forwards the payload once."""
    members = np.array(groups)
    if members.shape[1] == 1:
        return ()
    source, target = members[:, :-1].ravel(), members[:, 1:].ravel()
    return (_leg(fabric, source, target, np.ones(len(source)), members.shape[1] - 1),)


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
    if lattice is None or lattice.shape[0] > 1 or not _short_phases(fabric, lattice):
        return {}
    n_phases = len(_short_phases(fabric, lattice))
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
    sizes, n_steps = _short_phases(fabric, lattice), name.count("1")
    end, array = largest_short_payload(name), ONE_SHOT_BYTES * lattice.shape[-1] * len(sizes)
    limits = [min(end, array * prod(sizes[:n])) for n in range(len(sizes))]
    bounds = [-1, *limits, end]
    return bounds[n_steps] + 1, bounds[n_steps + 1]


def largest_short_payload(name: str) -> float:
    """The largest payload of any short all-reduce with as many phases."""
    return MAX_PHASES_BYTES if "," in name else MAX_RING_BYTES


def _short_phases(fabric: Fabric, lattice: Lattice) -> tuple[int, ...]:
    """Chips in the ring of each phase; one ring through all chips on planes with a side of two."""
    shape = (lattice.devices.shape[axis] for axis in CHIP_AXES)
    sizes = tuple(size for size in shape if size > 1)
    if fabric.topology.chip.n_grid_dims > 2 or min(sizes, default=0) > 2:
        return sizes
    return (prod(sizes),) if sizes else ()


def _legs(fabric: Fabric, lattice: Lattice, n_steps: int) -> Iterator[Leg]:
    """The cores of a chip split the array; then `n_steps` phases in steps, the others in one shot."""
    sizes, n_cores = _short_phases(fabric, lattice), lattice.shape[-1]
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
    sizes = _short_phases(fabric, lattice)
    if len(sizes) == 1:
        leg = next(snake(fabric, lattice, shard, is_bidirectional=True))
    else:
        axes = [order[phase] for order in color_orders(lattice, len(sizes))]
        leg = phase_leg(fabric, lattice, axes, [shard] * len(sizes))
    return replace(leg, n_hops=sizes[phase] // 2)
