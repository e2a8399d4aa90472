"""Device groups of a mesh against an enumeration of all devices by their coordinates."""

import random
from itertools import combinations, product

import pytest
from tables import table

from meshscope.errors import PlanError
from meshscope.events.collective import Groups
from meshscope.plans.mesh import Mesh, parse_mesh

MESHES = [
    Mesh(axes=(("tp", 1),)),
    Mesh(axes=(("tp", 8),)),
    Mesh(axes=(("dp", 2), ("tp", 4))),
    Mesh(axes=(("fsdp", 4), ("tp", 4))),
    Mesh(axes=(("pp", 2), ("dp", 3), ("cp", 2), ("tp", 2))),
]
LABELS = [" ".join(f"{name}={size}" for name, size in mesh.axes) for mesh in MESHES]
EVERY_MESH = pytest.mark.parametrize("mesh", MESHES, ids=LABELS)


def _coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    """The coordinates of devices 0, 1, 2, ...; the last axis varies fastest."""
    return list(product(*(range(size) for size in mesh.sizes)))


def _groups_by_brute_force(mesh: Mesh, names: tuple[str, ...]) -> Groups:
    """Groups of devices that agree on all other axes, in device order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, coordinates in enumerate(_coordinates(mesh)):
        others = (c for name, c in zip(mesh.names, coordinates, strict=True) if name not in names)
        groups.setdefault(tuple(others), []).append(device)
    return tuple(map(tuple, groups.values()))


def _choices(mesh: Mesh) -> list[tuple[str, ...]]:
    return [c for n in range(1, len(mesh.names) + 1) for c in combinations(mesh.names, n)]


@EVERY_MESH
def test_groups_are_the_devices_that_agree_on_every_other_axis(mesh: Mesh) -> None:
    for names in _choices(mesh):
        assert mesh.groups(*names) == _groups_by_brute_force(mesh, names)


@EVERY_MESH
def test_groups_of_a_missing_axis_have_one_device(mesh: Mesh) -> None:
    assert mesh.size("ep") == 1
    assert mesh.groups("ep") == tuple((device,) for device in range(mesh.n_devices))


@EVERY_MESH
def test_the_axis_is_found_from_its_groups_in_any_order(mesh: Mesh) -> None:
    order = random.Random(0)
    for names in _choices(mesh):
        groups = [order.sample(group, len(group)) for group in mesh.groups(*names)]
        order.shuffle(groups)
        expected = "+".join(n for n in names if mesh.size(n) > 1) or None
        assert mesh.axis_of_groups(tuple(map(tuple, groups))) == expected


def test_two_axes_of_equal_size_are_distinguished() -> None:
    mesh = Mesh(axes=(("fsdp", 2), ("tp", 2)))
    assert mesh.axis_of_groups(((0, 1), (2, 3))) == "tp"
    assert mesh.axis_of_groups(((0, 2), (1, 3))) == "fsdp"


@pytest.mark.parametrize(
    "groups",
    [((0, 3), (1, 2)), ((0, 1),), ((0, 1), (2, 3), (4, 5)), ((0,), (1,), (2,), (3,)), ()],
    ids=["diagonal", "one of two", "more devices", "lone devices", "none"],
)
def test_groups_of_no_axis(groups: Groups) -> None:
    assert Mesh(axes=(("dp", 2), ("tp", 2))).axis_of_groups(groups) is None


@table
def test_the_axis_of_pairs_is_the_one_they_cross(pairs: Groups, axis: str | None) -> None:
    assert Mesh(axes=(("pp", 2), ("tp", 4))).axis_of_pairs(pairs) == axis


def test_groups_of_a_stage_are_those_of_its_devices() -> None:
    mesh = Mesh(axes=(("pp", 2), ("dp", 2), ("tp", 2)))
    assert mesh.groups_of_stage(mesh.groups("tp"), 1) == ((4, 5), (6, 7))
    assert mesh.groups_of_stage(mesh.groups("dp", "tp"), 0) == ((0, 1, 2, 3),)


def test_a_pair_belongs_to_the_stage_of_its_sender() -> None:
    mesh = Mesh(axes=(("pp", 3), ("tp", 2)))
    pairs = ((0, 2), (1, 3), (2, 4), (3, 5))
    assert [mesh.groups_of_stage(pairs, stage) for stage in range(3)] == [pairs[:2], pairs[2:], ()]


def test_parts_of_the_groups_of_an_axis_have_the_axis_around_them() -> None:
    one = Mesh(axes=(("x", 8),))
    two = Mesh(axes=(("a", 2), ("b", 4)))
    placed = Mesh(axes=(("a", 2), ("b", 4)), order=(0, 2, 4, 6, 1, 3, 5, 7))
    assert one.axis_around_groups(((0, 2, 4, 6), (1, 3, 5, 7))) == "x"
    assert two.axis_around_groups(((0, 1), (2, 3), (4, 5), (6, 7))) == "b"
    assert placed.axis_around_groups(((0, 2), (4, 6), (1, 3), (5, 7))) == "b"
    assert two.axis_around_groups(((0, 5), (1, 4), (2, 7), (3, 6))) is None  # of both axes
    assert two.axis_around_groups(((0,), (1,))) is None


def test_no_axis_has_the_name_that_tables_give_to_an_unknown_one() -> None:
    with pytest.raises(PlanError, match=r"cannot be named 'unknown'.* Give it another name"):
        parse_mesh("unknown=2,model=4")
