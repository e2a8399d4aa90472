"""Placements of the mesh on the dimensions of a slice.

Programs lay the mesh over the device ids in row-major order, unless an experiment has an order of
devices. A placement is such an order: it gives each dimension of the slice factors of the axes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from math import prod

import numpy as np

from meshscope.errors import PlanError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.fabric import IntArray, fabric_of
from meshscope.hardware.topology import Topology
from meshscope.plans.chunks import divisors
from meshscope.plans.mesh import Mesh, parse_order

MAX_NAMED = 4096  # placements to compare with an order of devices
DIMENSIONS = ("slices", "z", "y", "x", "cores")  # slowest first

# The factors of the axes on one dimension, slowest first: (("tp", 2), ("dp", 4)).
Factors = tuple[tuple[str, int], ...]

_FACTOR = re.compile(r"(?:([a-z]+):)?([A-Za-z_]\w*)=([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The factors of the axes on each dimension of the slice that has more than one device."""

    factors: tuple[tuple[str, Factors], ...]  # by dimension, the slowest first

    def __str__(self) -> str:
        """`y:dp=2,x:tp=4`; the last factor of a dimension varies fastest."""
        return ",".join(
            f"{dim}:" + ",".join(f"{axis}={size}" for axis, size in of_dim)
            for dim, of_dim in self.factors
        )


def parse_device_order(text: str, mesh: Mesh, topology: Topology) -> tuple[int, ...]:
    """The device at each position of the mesh, from a placement such as `y:dp=2,x:tp=4` or a list of ids; PlanError if invalid."""
    if re.fullmatch(r"[0-9\s,]+", text):
        return parse_order(text, mesh.n_devices)
    return tuple(device_order(mesh, topology, _parsed(text, mesh, topology)).tolist())


def _parsed(text: str, mesh: Mesh, topology: Topology) -> AxisPlacement:
    if topology.chip.kind is not ChipKind.TPU:
        raise PlanError(
            f"device order '{text}': {topology.name} has no torus. Give the device ids, separated by commas."
        )
    factors, dim = dict[str, list[tuple[str, int]]](), ""
    for piece in text.split(","):
        match = _FACTOR.fullmatch(piece.strip())
        if match is None or not (match[1] or dim):
            raise PlanError(
                f"device order '{text}': '{piece.strip()}' is not DIMENSION:AXIS=SIZE. Write the axes on "
                "each dimension, such as 'y:dp=2,x:tp=4', or the device ids."
            )
        dim = match[1] or dim
        factors.setdefault(dim, []).append((match[2], int(match[3])))
    sizes, placed = {**_dimensions(topology), **dict(mesh.axes)}, dict[str, int]()
    for name, of_dim in factors.items():
        for axis, n in of_dim:
            placed |= {name: placed.get(name, 1) * n, axis: placed.get(axis, 1) * n}
    for name in dict.fromkeys((*placed, *sizes)):
        if placed.get(name, 1) != sizes.get(name, 1):
            plan = ",".join(f"{axis}={size}" for axis, size in mesh.axes)
            raise PlanError(
                f"device order '{text}': the sizes of {name} multiply to {placed.get(name, 1)}, but {topology.name} with "
                f"the mesh {plan} has {sizes.get(name, 1)}. Give other sizes, on {', '.join(DIMENSIONS)}."
            )
    ordered = ((name, tuple(factors[name])) for name in DIMENSIONS if name in factors)
    return AxisPlacement(factors=tuple(ordered))


def axis_placements(mesh: Mesh, topology: Topology) -> Iterator[AxisPlacement]:
    """Every placement, each once."""
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    dims = [(name, size) for name, size in _dimensions(topology).items() if size > 1]
    for matrix in _factors([size for _, size in axes], [size for _, size in dims]):
        by_dim = [
            tuple((name, row[d]) for (name, _), row in zip(axes, matrix, strict=True) if row[d] > 1)
            for d in range(len(dims))
        ]
        for orders in product(*(permutations(of_dim) for of_dim in by_dim)):
            names = (name for name, _ in dims)
            yield AxisPlacement(factors=tuple(zip(names, orders, strict=True)))


def _factors(axes: Sequence[int], dims: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """[axis, dim] factors whose products over dims are the axes, and over axes the dims."""
    if not axes:
        if all(size == 1 for size in dims):
            yield ()
        return
    for row in product(*(divisors(size) for size in dims)):
        if prod(row) == axes[0]:
            left = [size // factor for size, factor in zip(dims, row, strict=True)]
            yield from ((row, *rest) for rest in _factors(axes[1:], left))


def _dimensions(topology: Topology) -> dict[str, int]:
    x, y, z = (*topology.grid, 1, 1)[:3]
    sizes = (topology.n_slices, z, y, x, topology.chip.devices_per_chip)
    return dict(zip(DIMENSIONS, sizes, strict=True))


def device_order(mesh: Mesh, topology: Topology, placement: AxisPlacement) -> IntArray:
    """[position of the mesh] the device id there."""
    at = fabric_of(topology)
    x, y, z = at.coordinates.T
    by_place = np.lexsort((at.core, x, y, z, at.slice_index))  # the last key is the slowest
    factors = [factor for _, of_dim in placement.factors for factor in of_dim]
    grid = by_place.reshape([size for _, size in factors])
    order = sorted(range(len(factors)), key=lambda i: mesh.names.index(factors[i][0]))
    return grid.transpose(order).reshape(-1)


def order_text(mesh: Mesh, topology: Topology) -> str | None:
    """The order of the devices as `parse_device_order` reads it; None for a mesh in the order of the ids."""
    if mesh.order is None:
        return None
    if topology.chip.kind is ChipKind.TPU:
        for placement in islice(axis_placements(mesh, topology), MAX_NAMED):
            if tuple(device_order(mesh, topology, placement).tolist()) == mesh.order:
                return str(placement)
    return ",".join(map(str, mesh.order))
