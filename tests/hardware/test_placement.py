"""Device ids and coordinates against those of libtpu."""

import json
from pathlib import Path

import numpy as np
import pytest
from tables import table

from meshscope.hardware.interconnect.fabric import fabric_of, wraps_around
from meshscope.hardware.topology import parse_topology

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "placements.json").read_text(encoding="utf-8")
)["slices"]


@pytest.mark.parametrize("name", GOLDEN)
def test_coordinates_equal_those_of_libtpu(name: str) -> None:
    placement = fabric_of(parse_topology(name))
    ours = np.column_stack(
        [placement.slice_index, placement.coordinates, placement.core, placement.host]
    )
    assert ours.tolist() == GOLDEN[name]


@table
def test_only_full_axes_wrap_around(name: str, wraps: tuple[bool, bool, bool]) -> None:
    assert wraps_around(parse_topology(name)) == wraps


def test_gpus_are_counted_node_by_node() -> None:
    assert fabric_of(parse_topology("2xh100:16")).host.tolist() == [
        node for node in range(4) for _ in range(8)
    ]
