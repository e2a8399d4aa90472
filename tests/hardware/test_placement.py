"""Device ids and coordinates against those of libtpu, and orders of devices by the dimensions of the torus."""

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from tables import table

from meshscope.errors import PlanError
from meshscope.hardware.interconnect.fabric import fabric_of, wraps_around
from meshscope.hardware.topology import parse_topology
from meshscope.plans.mesh import Mesh
from meshscope.plans.placement import axis_placements, device_order, order_text, parse_device_order
from meshscope.plans.plan import parse_plan

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


def _mesh(plan: str) -> Mesh:
    return parse_plan(plan).mesh


@table
def test_a_placement_puts_each_device_at_one_position(slice_: str, plan: str) -> None:
    mesh, topology = _mesh(plan), parse_topology(slice_)
    placements = list(axis_placements(mesh, topology))
    assert len({str(one) for one in placements}) == len(placements) > 1
    for one in placements:
        order = device_order(mesh, topology, one).tolist()
        assert sorted(order) == list(range(topology.n_devices))
        sizes = [size for _, of_dim in one.factors for _, size in of_dim]
        assert prod(sizes) == topology.n_devices
        assert parse_device_order(str(one), mesh, topology) == tuple(order)


def test_an_axis_lies_on_the_dimension_that_is_asked() -> None:
    mesh, topology = _mesh("dp=2,tp=4"), parse_topology("v6e:2x4")
    order = np.array(parse_device_order("y:tp=4,x:dp=2", mesh, topology))
    x, y, _ = fabric_of(topology).coordinates[order].T
    groups = np.array(mesh.groups("tp"))
    assert [set(x[group].tolist()) for group in groups] == [{0}, {1}]
    assert all(y[group].tolist() == [0, 1, 2, 3] for group in groups)


def test_an_axis_between_slices_crosses_them() -> None:
    mesh, topology = _mesh("dp=2,tp=4"), parse_topology("2xv6e:2x2")
    order = parse_device_order("slices:tp=2,y:dp=2,x:tp=2", mesh, topology)
    placed = Mesh(axes=mesh.axes, order=order)
    assert topology.crosses_slices(placed.groups("tp"))
    assert not topology.crosses_slices(placed.groups("dp"))


def test_an_order_is_named_by_its_placement_or_its_ids() -> None:
    topology = parse_topology("v6e:2x4")
    axes = (("dp", 2), ("tp", 4))
    assert order_text(Mesh(axes=axes), topology) is None
    along_y = parse_device_order("y:tp=4,x:dp=2", Mesh(axes=axes), topology)
    assert order_text(Mesh(axes=axes, order=along_y), topology) == "y:tp=4,x:dp=2"
    ring = (0, 2, 4, 6, 7, 5, 3, 1)
    assert order_text(Mesh(axes=axes, order=ring), topology) == "0,2,4,6,7,5,3,1"


@table
def test_an_impossible_order_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match="device order") as refusal:
        parse_device_order(text, _mesh("dp=2,tp=4"), parse_topology("v6e:2x4"))
    assert message in str(refusal.value)


def test_a_slice_without_torus_takes_ids_alone() -> None:
    mesh, topology = _mesh("dp=2,tp=2"), parse_topology("cpu:4")
    assert parse_device_order("3,2,1,0", mesh, topology) == (3, 2, 1, 0)
    with pytest.raises(PlanError, match="no torus"):
        parse_device_order("y:tp=2,x:dp=2", mesh, topology)
