"""The logical device mesh: named axes over device ids, in row-major order or in a given one."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, groupby
from math import prod
from operator import mul

from meshscope.errors import PlanError

Groups = tuple[tuple[int, ...], ...]
NO_AXIS = "unknown"

_AXIS = re.compile(r"([^\W\d]\w*) ?= ?([1-9][0-9]*)")  # a name of Python, and a size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, outermost first; device ids are positions in row-major order (`mesh.devices.flat`), as in replica groups."""

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None = None  # the device of the slice at each position

    def __post_init__(self) -> None:
        """Check that no axis has the name that outputs give to what is over no axis."""
        if NO_AXIS in self.names:
            raise PlanError(
                f"a mesh axis cannot be named '{NO_AXIS}': tables write this where the axis is not "
                "known. Give it another name."
            )

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

    @property
    def axis_subsets(self) -> tuple[tuple[str, ...], ...]:
        """The combinations of axes larger than 1, the fewest and outermost first."""
        names = [name for name, size in self.axes if size > 1]
        sizes = range(1, len(names) + 1)
        return tuple(subset for n in sizes for subset in combinations(names, n))

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Position of a device id along each axis."""
        if self.order is not None:
            device = self.order.index(device)
        strides = accumulate(reversed(self.sizes), mul, initial=1)
        pairs = zip(strides, reversed(self.sizes), strict=False)
        return tuple(device // stride % size for stride, size in pairs)[::-1]

    def groups(self, *names: str) -> Groups:
        """Device groups of a collective over these axes, e.g. ((0, 1), (2, 3)), in mesh order."""
        return self.devices_at(_groups(self.axes, names))

    def devices_at(self, positions: Groups) -> Groups:
        """The devices at groups of positions."""
        if self.order is None:
            return positions
        order = self.order
        return tuple(tuple(order[position] for position in group) for group in positions)

    def _positions_of(self, groups: Groups) -> Groups:
        if self.order is None:
            return groups
        position = {device: at for at, device in enumerate(self.order)}
        return tuple(tuple(position.get(device, -1) for device in group) for group in groups)

    def groups_of_stage(self, groups: Groups, stage: int) -> Groups:
        """The groups whose first device (the sender of a pair) belongs to this pipeline stage."""
        n_each = self.n_devices // self.size("pp")  # pp is outermost
        senders = self._positions_of(groups)
        return tuple(g for g, at in zip(groups, senders, strict=True) if at[0] // n_each == stage)

    def axis_of_groups(self, groups: Groups) -> str | None:
        """The axes, joined by `+`, whose groups are exactly these; None if no axes match."""
        as_set = frozenset(map(frozenset, self._positions_of(groups)))
        return _axis_by_groups(self.axes).get(as_set)

    def axis_around_groups(self, groups: Groups) -> str | None:
        """The fewest axes, joined by `+`, whose groups contain each of these groups, not all unless there is one; else None."""
        positions = self._positions_of(groups)
        if any(len(group) < 2 or min(group) < 0 for group in positions):
            return None
        subsets = self.axis_subsets
        for subset in subsets[:-1] or subsets:
            numbered = enumerate(_groups(self.axes, subset))
            owner = {device: number for number, group in numbered for device in group}
            if all(len({owner.get(device) for device in group}) == 1 for group in positions):
                return "+".join(subset)
        return None

    def axis_of_pairs(self, pairs: Groups) -> str | None:
        """The axes, joined by `+`, that the (source, target) pairs cross; None if they cross none."""
        crossed: set[str] = set()
        for source, target in pairs:
            if max(source, target) >= self.n_devices:
                return None
            ends = zip(self.coordinates(source), self.coordinates(target), strict=True)
            crossed |= {name for name, (a, b) in zip(self.names, ends, strict=True) if a != b}
        return "+".join(name for name in self.names if name in crossed) or None


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
    mesh = Mesh(axes=axes)
    # The fewest and outermost axes of several with the same groups.
    every = ((frozenset(map(frozenset, mesh.groups(*s))), s) for s in reversed(mesh.axis_subsets))
    return {groups: "+".join(subset) for groups, subset in every}


def parse_mesh(text: str, *, order: str | None = None) -> Mesh:
    """Parses `data=8,model=8`, and the order of the devices such as `0,2,4,6,7,5,3,1`."""
    axes: list[tuple[str, int]] = []
    for piece in text.split(","):
        match = _AXIS.fullmatch(piece.strip())
        if match is None:
            raise PlanError(
                f"mesh '{text}': '{piece.strip()}' is not NAME=SIZE. "
                "Give the axes outermost first, such as 'data=8,model=8'."
            )
        axes.append((match[1], int(match[2])))
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"mesh '{text}': {name} appears twice. Give it once.")
    mesh = Mesh(axes=tuple(axes))
    return mesh if order is None else Mesh(axes=mesh.axes, order=parse_order(order, mesh.n_devices))


def parse_order(text: str, n_devices: int) -> tuple[int, ...]:
    """The device at each position of a mesh, from ids separated by commas; PlanError unless each is there once."""
    devices = tuple(int(piece) for piece in re.findall(r"[0-9]+", text))
    is_list = re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", text) is not None
    if not is_list or sorted(devices) != list(range(n_devices)):
        raise PlanError(
            f"device order '{text}': expected each device from 0 to {n_devices - 1} once, separated by "
            "commas, in the order of the mesh."
        )
    return devices
