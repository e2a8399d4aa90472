"""Other placements of a plan on its slice: which axis of the mesh has which dimension of the torus.

Programs lay the mesh over the device ids in row-major order. A placement gives each dimension of the slice
factors of the axes, and an order of them within the dimension. No plan names one, and no program here is
compiled with one; JAX takes the order of devices of a `jax.sharding.Mesh`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.closed_form import plan_form
from meshscope.cost.predicted import evaluated
from meshscope.events.enums import REQUEST_PHASES
from meshscope.interconnect.placement import placement_of
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.plan.chunks import divisors

IntArray = NDArray[np.int64]
DIMENSIONS = ("slices", "z", "y", "x", "cores")  # slowest first
MAX_DEVICES = 1024  # of a slice; the geometry of a placement takes milliseconds
MAX_PLACEMENTS = 256
NEAR = 1 - 1e-9  # smaller gains are rounding

# The factors of the axes on one dimension, slowest first: (("tp", 2), ("dp", 4)).
Factors = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The factors of the axes on each dimension of the slice that has more than one device."""

    factors: tuple[tuple[str, Factors], ...]  # by dimension

    def __str__(self) -> str:
        """`y: dp=2, x: tp=4`; the last factor of a dimension varies fastest."""
        named = (
            (dim, ",".join(f"{axis}={size}" for axis, size in of_dim))
            for dim, of_dim in self.factors
        )
        return "; ".join(f"{dim}: {text}" for dim, text in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """An experiment with its axes placed, and its predicted seconds; `placement` is None in mesh order."""

    placement: AxisPlacement | None
    devices: tuple[int, ...]  # the device id at each position of the mesh
    ttft_s: float
    tpot_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSearch:
    """The placements of an experiment, the shortest request first; `n_left` more were not tried."""

    in_order: PlacedPlan
    placed: tuple[PlacedPlan, ...]
    n_left: int

    @property
    def best(self) -> PlacedPlan | None:
        """The placement with the shortest request, if it is shorter than that in mesh order."""
        first = self.placed[0] if self.placed else None
        return first if first is not None and first.e2e_s < self.in_order.e2e_s * NEAR else None


def search_placements(
    experiment: Experiment, profile: ChipProfile | None = None
) -> PlacementSearch | None:
    """The experiment with every placement of its axes; None if they have one, or the slice has no torus."""
    topology = experiment.topology
    is_large = topology.n_devices > MAX_DEVICES
    if topology.chip.kind is not ChipKind.TPU or is_large or len(experiment.plan.mesh.axes) == 1:
        return None
    every = axis_placements(experiment)
    placed = [_placed(experiment, one, profile) for one in islice(every, MAX_PLACEMENTS)]
    return PlacementSearch(
        in_order=_placed(experiment, None, profile),
        placed=tuple(sorted(placed, key=lambda one: one.e2e_s)),
        n_left=sum(1 for _ in every),
    )


def axis_placements(experiment: Experiment) -> Iterator[AxisPlacement]:
    """Every placement, each once."""
    axes = [(name, size) for name, size in experiment.plan.mesh.axes if size > 1]
    dims = [(name, size) for name, size in _dimensions(experiment) if size > 1]
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


def _dimensions(experiment: Experiment) -> tuple[tuple[str, int], ...]:
    topology = experiment.topology
    x, y, z = (*topology.grid, 1, 1)[:3]
    cores = topology.chip.devices_per_chip
    return tuple(zip(DIMENSIONS, (topology.n_slices, z, y, x, cores), strict=True))


def device_order(experiment: Experiment, placement: AxisPlacement) -> IntArray:
    """[position of the mesh] the device id there."""
    at = placement_of(experiment.topology)
    x, y, z = at.coordinates.T
    by_place = np.lexsort((at.core, x, y, z, at.slice_index))  # the last key is the slowest
    factors = [factor for _, of_dim in placement.factors for factor in of_dim]
    grid = by_place.reshape([size for _, size in factors])
    names = experiment.plan.mesh.names
    order = sorted(range(len(factors)), key=lambda i: names.index(factors[i][0]))
    return grid.transpose(order).reshape(-1)


def _placed(
    experiment: Experiment, placement: AxisPlacement | None, profile: ChipProfile | None
) -> PlacedPlan:
    devices = range(experiment.topology.n_devices)
    if placement is not None:
        devices = device_order(experiment, placement).tolist()
    forms = (
        plan_form(experiment, phase, profile=profile, devices=tuple(devices))
        for phase in REQUEST_PHASES
    )
    ttft_s, tpot_s = (evaluated(form, experiment.workload)[1].value_s for form in forms)
    return PlacedPlan(
        placement=placement,
        devices=tuple(devices),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + experiment.workload.n_decode_steps * tpot_s,
    )
