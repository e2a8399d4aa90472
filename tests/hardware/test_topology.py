"""Parsing of topology names."""

from pathlib import Path

import pytest
from tables import read_rows

from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology


@pytest.mark.parametrize(
    ("text", "name", "n_chips", "n_devices"),
    read_rows(Path(__file__).parent / "slices.csv", str, str, int, int),
)
def test_names_are_parsed_into_grid_and_counts(text, name, n_chips, n_devices) -> None:
    topology = parse_topology(text)
    assert (topology.name, topology.n_chips, topology.n_devices) == (name, n_chips, n_devices)
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
