"""Parsing of topology names."""

from typing import NamedTuple

import pytest

from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology


class Slice(NamedTuple):
    text: str
    name: str
    n_chips: int
    n_devices: int


# Cloud names and grids: cloud.google.com/tpu/docs, the pages of v4, v5p, v5e, v6e, tpu7x.
SLICES = [
    Slice("v6e-1", "v6e:1x1", 1, 1),
    Slice("v6e-4", "v6e:2x2", 4, 4),
    Slice("v6e-8", "v6e:2x4", 8, 8),
    Slice("v6e-16", "v6e:4x4", 16, 16),
    Slice("v6e-256", "v6e:16x16", 256, 256),
    Slice("v5litepod-32", "v5e:4x8", 32, 32),
    Slice("v4-8", "v4:2x2x1", 4, 4),
    Slice("v4-64", "v4:2x4x4", 32, 32),
    Slice("v5p-8", "v5p:2x2x1", 4, 4),
    Slice("v5p-16", "v5p:2x2x2", 8, 8),
    Slice("v5p-128", "v5p:4x4x4", 64, 64),
    Slice("tpu7x-8", "tpu7x:2x2x1", 4, 8),
    Slice("Ironwood-16", "tpu7x:2x2x2", 8, 16),
    Slice("v6e:1x2", "v6e:1x2", 2, 2),
    Slice(" v6e:4x2 ", "v6e:4x2", 8, 8),
    Slice("v5p:4x4x12", "v5p:4x4x12", 192, 192),
    Slice("2xv6e:4x4", "2xv6e:4x4", 32, 32),
    Slice("4xv6e-256", "4xv6e:16x16", 1024, 1024),
    Slice("cpu:8", "cpu:8", 8, 8),
    Slice("2xh100:4", "2xh100:4", 8, 8),
]


@pytest.mark.parametrize("case", SLICES, ids=lambda case: case.text)
def test_names_are_parsed_into_grid_and_counts(case: Slice) -> None:
    topology = parse_topology(case.text)
    parsed = (topology.name, topology.n_chips, topology.n_devices)
    assert parsed == (case.name, case.n_chips, case.n_devices)


@pytest.mark.parametrize("case", SLICES, ids=lambda case: case.text)
def test_the_canonical_name_parses_to_the_same_slice(case: Slice) -> None:
    topology = parse_topology(case.text)
    assert parse_topology(topology.name) == topology


def test_devices_per_slice() -> None:
    assert parse_topology("4xtpu7x-8").devices_per_slice == 8


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("v6e:1x2", (1, 2, 1)),
        ("v6e-256", (2, 2, 1)),
        ("v5p:2x4x4", (2, 2, 1)),
        ("v5p:1x1x1", (1, 1, 1)),
    ],
)
def test_a_host_has_two_by_two_chips_unless_the_slice_is_smaller(text, bounds) -> None:
    assert parse_topology(text).host_bounds == bounds


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("v6e", r"Use a cloud name \(v6e-8\), a chip grid"),
        ("v6e-8x", r"Use a cloud name"),
        ("", r"Use a cloud name"),
        ("v7e-8", r"unknown chip 'v7e'. Did you mean"),
        ("v6e:0x4", r"Use sizes of at least 1"),
        ("0xv6e:2x4", r"Use sizes of at least 1"),
        ("v6e:2x2x2", r"has 3 dimensions; a v6e grid has 2. Write it like 'v6e:2x4'"),
        ("v4:2x2", r"Write it like 'v4:2x2x1'"),
        ("h100:2x4", r"Write it like 'h100:8'"),
        ("v6e:3x4", r"hosts of 2x2 chips do not divide the grid 3x4. Use even sizes or 1"),
        ("v6e-6", r"6 chips have no default grid. Write the grid, like 'v6e:4x4'"),
        ("v4-7", r"Use an even number"),
        ("v6e-512", r"a v6e pod has 256 chips, 16x16. Use several slices, like '2xv6e:16x16'"),
        ("v5e:32x8", r"a v5e pod has 256 chips, 16x16. Use a smaller slice"),
        ("v5p:16x24x24", r"a v5p pod has 8960 chips. Use a smaller slice"),
        ("1024xv6e:16x16", r"has 262144 devices. Use at most 65536"),
    ],
)
def test_an_invalid_topology_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse_topology(text)
