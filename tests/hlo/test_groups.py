"""Replica groups in every form, against brute force over coordinates."""

import random
from itertools import permutations, product
from math import prod

import pytest
from tables import table

from meshscope.errors import ParseError
from meshscope.plans.mesh import Groups, Mesh
from meshscope.readers.hlo.groups import connected_groups, parse_groups, parse_pairs


@table
def test_groups_are_expanded_to_device_ids(text: str, want: Groups) -> None:
    n_devices = sum(map(len, want))
    assert parse_groups(text, n_devices=n_devices, where="x.hlo:1") == want


def _by_coordinates(
    sizes: tuple[int, ...], grouped: tuple[int, ...], order: list[int]
) -> set[frozenset[int]]:
    """Groups of the devices whose coordinates differ only in the grouped dims."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for place, coordinates in enumerate(product(*map(range, sizes))):
        kept = tuple(c for dim, c in enumerate(coordinates) if dim not in grouped)
        groups.setdefault(kept, set()).add(order[place])
    return {frozenset(group) for group in groups.values()}


def test_mesh_form_equals_brute_force_over_coordinates() -> None:
    rng = random.Random(7)
    for _ in range(200):
        sizes = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4)))
        grouped = tuple(rng.sample(range(len(sizes)), rng.randint(1, len(sizes))))
        order = list(range(prod(sizes)))
        rng.shuffle(order)
        axes = ",".join(f"'a{dim}'={size}" for dim, size in enumerate(sizes))
        refs = ",".join(f"'a{dim}'" for dim in grouped)
        ids = ",".join(map(str, order))
        text = f"mesh[{axes}], device_ids=({ids}) {{{refs}}}"

        got = parse_groups(text, n_devices=prod(sizes), where="x.hlo:1")

        assert {frozenset(group) for group in got} == _by_coordinates(sizes, grouped, order), text


def test_iota_form_equals_brute_force_over_coordinates() -> None:
    rng = random.Random(8)
    for _ in range(200):
        sizes = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4)))
        order = rng.choice(list(permutations(range(len(sizes)))))
        n_grouped = rng.randint(0, len(sizes))
        grouped = order[len(sizes) - n_grouped :]
        group_size = prod(sizes[dim] for dim in grouped)
        n_devices = prod(sizes)
        dims = ",".join(map(str, sizes))
        text = f"[{n_devices // group_size},{group_size}]<=[{dims}]T({','.join(map(str, order))})"

        got = parse_groups(text, n_devices=n_devices, where="x.hlo:1")

        identity = list(range(n_devices))
        assert {frozenset(g) for g in got} == _by_coordinates(sizes, grouped, identity), text


def test_a_sub_axis_equals_an_axis_of_the_split_mesh() -> None:
    whole = parse_groups("mesh['a'=3,'b'=8] {'b':(2)2}", n_devices=24, where="x.hlo:1")
    split = parse_groups("mesh['a'=3,'b0'=2,'b1'=2,'b2'=2] {'b1'}", n_devices=24, where="x.hlo:1")

    assert whole == split


def test_axes_of_equal_size_are_distinguished() -> None:
    mesh = Mesh(axes=(("fsdp", 4), ("tp", 4)))
    text = "mesh['axis_0'=4,'axis_1'=4] {{'{}'}}"

    outer = parse_groups(text.format("axis_0"), n_devices=16, where="x.hlo:1")
    inner = parse_groups(text.format("axis_1"), n_devices=16, where="x.hlo:1")

    assert (mesh.axis_of_groups(outer), mesh.axis_of_groups(inner)) == ("fsdp", "tp")


@table
def test_an_unknown_form_is_an_error_with_file_and_line(text: str) -> None:
    with pytest.raises(ParseError, match=r"decode\.hlo:412: .*(please report|Set num)"):
        parse_groups(text, n_devices=8, where="decode.hlo:412")


def test_pairs_are_expanded_to_device_ids_and_connected() -> None:
    assert parse_pairs("{{0,1},{1,0}}", n_devices=2, where="x.hlo:1") == ((0, 1), (1, 0))
    pairs = ((0, 1), (1, 2), (2, 0), (5, 3), (3, 5), (4, 4))
    assert connected_groups(pairs) == ((0, 1, 2), (3, 5), (4,))


@pytest.mark.parametrize("text", ["{{0,1,2}}", "{0,1}", "{{0,9}}", "[2,4]<=[8]"])
def test_other_text_than_pairs_is_an_error(text: str) -> None:
    with pytest.raises(ParseError, match=r"x\.hlo:1: source_target_pairs .*please report"):
        parse_pairs(text, n_devices=8, where="x.hlo:1")
