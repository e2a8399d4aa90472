"""Parsing of topology names."""

from pathlib import Path

import pytest
from tables import read_rows, table

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


@table
def test_a_host_has_two_by_two_chips_unless_the_slice_is_smaller(
    text, bounds: tuple[int, int, int]
) -> None:
    assert parse_topology(text).host_bounds == bounds


@table
def test_an_invalid_topology_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse_topology(text)
