"""How a collective can be carried out: legs of transfers, one after the other, for a payload of 1.

Only what bounds a strategy is written down: between which devices how much travels in each leg, and
how many hops follow one upon the other. A reduce-scatter is an all-gather backwards, an all-reduce
both; so gathers are written, and turned round. Sources: scaling book, part 3 (rings over one, two
and three axes); XLA's names for what it chose (`collective_algorithm_config` in compiled HLO:
strategies `UniDirection1DRing`, `UniDirectionNDRing` with as many colours as directions and as many
phases as axes, emitters `RotatedPincer`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import assert_never

import numpy as np

from meshscope.events.enums import Kind
from meshscope.interconnect.fabric import Fabric, Flow, hops_between
from meshscope.interconnect.lattice import Lattice, lattice_of
from meshscope.interconnect.placement import IntArray
from meshscope.spec.plan.mesh import Groups

BOTH_WAYS = "ring, both ways"
ONE_WAY = "ring, one way"
COLOURS = "phases per axis, a colour each"
PHASES = "phases per axis"
IN_ORDER = "ring in the order of ids"
DIRECT = "direct routes"

_CHIP_AXES = (2, 3, 4)  # z, y, x of [group, slice, z, y, x, core]
_SLICE_AXIS, _CORE_AXIS = 1, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Transfers that run together; the next leg needs what they bring. `n_hops` is its latency."""

    flow: Flow
    n_hops: int


Legs = tuple[Leg, ...]


def strategies_of(kind: Kind, fabric: Fabric, groups: Groups) -> dict[str, Legs]:  # noqa: PLR0911  one a kind
    """Every strategy that carries out this collective over these groups, all groups at once."""
    match kind:
        case Kind.ALL_GATHER:
            return _gathers(fabric, groups)
        case Kind.REDUCE_SCATTER:
            return {name: _reversed(legs) for name, legs in _gathers(fabric, groups).items()}
        case Kind.ALL_REDUCE:
            gathers = _gathers(fabric, groups).items()
            return {name: (*_reversed(legs), *legs) for name, legs in gathers}
        case Kind.ALL_TO_ALL:
            return {DIRECT: _exchange(fabric, groups)}
        case Kind.PERMUTE | Kind.SEND:
            return {DIRECT: _pairs(fabric, groups)}
        case Kind.RECV:  # the transfer is its sender's
            return {}
        case Kind.GATHER:
            return {DIRECT: _to_first(fabric, groups)}
        case Kind.BROADCAST:
            return {DIRECT: _from_first(fabric, groups)}
        case _:
            assert_never(kind)


def _reversed(legs: Legs) -> Legs:
    return tuple(
        Leg(
            flow=Flow(source=leg.flow.target, target=leg.flow.source, share=leg.flow.share),
            n_hops=leg.n_hops,
        )
        for leg in reversed(legs)
    )


def _gathers(fabric: Fabric, groups: Groups) -> dict[str, Legs]:
    """All-gathers of a payload of 1: each device starts with 1/n of it."""
    lattice = lattice_of(fabric, groups)
    if lattice is None:
        return {IN_ORDER: (_ring(fabric, np.array(groups), 1 / len(groups[0]), is_both_ways=True),)}
    by_name: dict[str, Callable[[float], Iterator[Leg]]] = {
        BOTH_WAYS: lambda unit: _snake(fabric, lattice, unit, is_both_ways=True),
        ONE_WAY: lambda unit: _snake(fabric, lattice, unit, is_both_ways=False),
        PHASES: lambda unit: _phases(fabric, lattice, unit, n_colours=1),
    }
    n_chip_axes = sum(lattice.devices.shape[axis] > 1 for axis in _CHIP_AXES)
    if n_chip_axes > 1:
        by_name[COLOURS] = lambda unit: _phases(fabric, lattice, unit, n_colours=n_chip_axes)
    if n_chip_axes == 0:
        by_name = {ONE_WAY: lambda _unit: iter(())}
    elif not fabric.is_torus:  # everyone reaches everyone: no axes, no second way round
        by_name = {ONE_WAY: by_name[ONE_WAY]}
    return {name: _levels(fabric, lattice, chips) for name, chips in by_name.items()}


def _levels(fabric: Fabric, lattice: Lattice, chips: Callable[[float], Iterator[Leg]]) -> Legs:
    """First the slices (the least data over the slowest wires), then the chips, then the two cores."""
    n_slices, *_, n_cores = lattice.shape
    n = prod(lattice.shape)
    legs: list[Leg] = []
    if n_slices > 1:
        order = np.moveaxis(lattice.devices, _SLICE_AXIS, -1)
        legs.append(_ring(fabric, order, 1 / n, is_both_ways=False))
    legs += chips(n_slices / n)
    if n_cores > 1:
        legs.append(_line(fabric, np.moveaxis(lattice.devices, _CORE_AXIS, -1), 1 / n_cores))
    return tuple(legs)


def _ring(fabric: Fabric, order: IntArray, unit: float, *, is_both_ways: bool) -> Leg:
    """Shards of `unit` go round the last axis of `order`, half each way where both are used."""
    n = order.shape[-1]
    after = np.roll(order, -1, axis=-1)
    share = unit * (n - 1) / (2 if is_both_ways else 1)
    source, target = order.ravel(), after.ravel()
    if is_both_ways:
        source, target = np.concatenate([source, target]), np.concatenate([target, source])
    n_steps = n // 2 if is_both_ways else n - 1
    return _leg(fabric, source, target, np.full(len(source), share), n_steps)


def _line(fabric: Fabric, order: IntArray, unit: float) -> Leg:
    """Shards of `unit` go along the last axis of `order` to both ends: there is no way round.

    The wire after the i-th member carries the shards of all before it.
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


def _snake(fabric: Fabric, lattice: Lattice, unit: float, *, is_both_ways: bool) -> Iterator[Leg]:
    """One ring through all chips of the group, over neighbours where the box allows it."""
    members = np.moveaxis(lattice.devices, _CORE_AXIS, 2)  # [group, slice, core, z, y, x]
    shape = members.shape[3:]
    order = members.reshape(*members.shape[:3], -1)[..., hamiltonian_order(shape)]
    is_line = max(shape) == order.shape[-1] and not any(lattice.is_ring)
    if is_line and is_both_ways:
        yield _line(fabric, order, unit)
    elif order.shape[-1] > 1:
        yield _ring(fabric, order, unit, is_both_ways=is_both_ways)


def hamiltonian_order(shape: tuple[int, ...]) -> IntArray:
    """Flat indices of a box in the order of a ring over neighbours; it closes if a size is even.

    The box is taken as a plane: its longest even axis, against a snake through the others. The ring
    goes along the first column of the plane and comes back in a snake through the other columns.
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


def _phases(fabric: Fabric, lattice: Lattice, unit: float, *, n_colours: int) -> Iterator[Leg]:
    """One axis after the other; several colours of the data start with different axes."""
    axes = [axis for axis in _CHIP_AXES if lattice.devices.shape[axis] > 1]
    colours = [
        [axes[(first + turn) % len(axes)] for turn in range(len(axes))]
        for first in range(n_colours)
    ]
    units = [unit / n_colours] * n_colours
    for turn in range(len(axes)):
        parts: list[Leg] = []
        for colour, order in enumerate(colours):
            axis = order[turn]
            members = np.moveaxis(lattice.devices, axis, -1)
            is_ring = lattice.is_ring[_CHIP_AXES.index(axis)]
            parts.append(
                _ring(fabric, members, units[colour], is_both_ways=True)
                if is_ring
                else _line(fabric, members, units[colour])
            )
            units[colour] *= members.shape[-1]
        yield _together(parts)


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
    """All-to-all by the direct way of each part, all at once.

    On a box the traffic along one axis does not depend on the others: a device sends, or passes on,
    an equal part to every member of its row, whatever the order of axes. So it is counted row by row.
    """
    lattice = lattice_of(fabric, groups)
    members = np.array(groups) if lattice is None else lattice.devices
    axes = [axis for axis in range(1, members.ndim) if members.shape[axis] > 1]
    parts = [_each_to_each(fabric, np.moveaxis(members, axis, -1)) for axis in axes]
    if not parts:
        return ()
    joined = _together(parts)
    return (Leg(flow=joined.flow, n_hops=sum(part.n_hops for part in parts)),)


def _each_to_each(fabric: Fabric, rows: IntArray) -> Leg:
    n = rows.shape[-1]
    flat = rows.reshape(-1, n)
    source = np.repeat(flat, n, axis=1).ravel()
    target = np.tile(flat, (1, n)).ravel()
    differs = source != target
    source, target = source[differs], target[differs]
    return _leg(fabric, source, target, np.full(len(source), 1 / n), 1)


def _pairs(fabric: Fabric, groups: Groups) -> Legs:
    """Point to point: each group is a (source, target) pair."""
    pairs = np.array([group for group in groups if len(group) == 2 and group[0] != group[1]])
    if not len(pairs):
        return ()
    return (_leg(fabric, pairs[:, 0], pairs[:, 1], np.ones(len(pairs)), 1),)


def _to_first(fabric: Fabric, groups: Groups) -> Legs:
    members = np.array(groups)
    if members.shape[1] == 1:
        return ()
    others = members[:, 1:]
    first = np.broadcast_to(members[:, :1], others.shape)
    share = np.full(others.size, 1 / members.shape[1])
    return (_leg(fabric, others.ravel(), first.ravel(), share, 1),)


def _from_first(fabric: Fabric, groups: Groups) -> Legs:
    """The payload passes through the members in a pipeline; each sends it on once."""
    members = np.array(groups)
    if members.shape[1] == 1:
        return ()
    source, target = members[:, :-1].ravel(), members[:, 1:].ravel()
    return (_leg(fabric, source, target, np.ones(len(source)), members.shape[1] - 1),)
