"""The logical device mesh: named axes over device ids 0..n-1 in row-major order."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import combinations, groupby
from math import prod

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, outermost first; device ids are positions in row-major order.

    The ids in XLA's replica groups are these positions (`mesh.devices.flat`), not hardware ids.
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def n_devices(self) -> int:
        """Devices in the mesh."""
        return prod(self.sizes)

    def size(self, name: str) -> int:
        """Size of the axis; 1 if the mesh does not have it."""
        return dict(self.axes).get(name, 1)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Position of a device id along each axis."""
        coordinates: list[int] = []
        for size in reversed(self.sizes):
            device, coordinate = divmod(device, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def groups(self, *names: str) -> Groups:
        """Device groups of a collective over these axes, e.g. ((0, 1), (2, 3)), in mesh order."""
        return _groups(self.axes, names)

    def groups_of_stage(self, groups: Groups, stage: int) -> Groups:
        """The groups whose first device (the sender of a pair) belongs to this pipeline stage."""
        n_each = self.n_devices // self.size("pp")  # pp is outermost
        return tuple(group for group in groups if group[0] // n_each == stage)

    def axis_of_groups(self, groups: Groups) -> str | None:
        """The axes, joined by `+`, whose groups are exactly these; None if no axes match."""
        return _axis_by_groups(self.axes).get(_as_set(groups))

    def axis_of_pairs(self, pairs: Groups) -> str | None:
        """The axes, joined by `+`, that the (source, target) pairs cross; None if they cross none."""
        crossed: set[str] = set()
        for source, target in pairs:
            if max(source, target) >= self.n_devices:
                return None
            ends = zip(self.coordinates(source), self.coordinates(target), strict=True)
            crossed |= {name for name, (a, b) in zip(self.names, ends, strict=True) if a != b}
        return "+".join(name for name in self.names if name in crossed) or None


def _as_set(groups: Groups) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(g) for g in groups)


def _groups(axes: tuple[tuple[str, int], ...], names: Collection[str]) -> Groups:
    """The groups over some of the axes; meshes that split the devices alike share one object."""
    runs = groupby(axes, key=lambda axis: axis[0] in names)
    return _run_groups(tuple((prod(size for _, size in run), inside) for inside, run in runs))


@cache
def _run_groups(runs: tuple[tuple[int, bool], ...]) -> Groups:
    """The groups over the runs of adjacent axes that are marked, outermost run first."""
    bases, members, stride = [0], [0], 1
    for size, is_inside in reversed(runs):
        steps = [i * stride for i in range(size)]
        if is_inside:
            members = [step + member for step in steps for member in members]
        else:
            bases = [step + base for step in steps for base in bases]
        stride *= size
    return tuple(tuple(base + member for member in members) for base in bases)


@cache
def _axis_by_groups(axes: tuple[tuple[str, int], ...]) -> dict[frozenset[frozenset[int]], str]:
    """All combinations of axes larger than one, keyed by their groups."""
    names = [name for name, size in axes if size > 1]
    axis_by_groups: dict[frozenset[frozenset[int]], str] = {}
    for n_axes in range(1, len(names) + 1):
        for subset in combinations(names, n_axes):
            groups = _as_set(_groups(axes, subset))
            axis_by_groups.setdefault(groups, "+".join(subset))
    return axis_by_groups
