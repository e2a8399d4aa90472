"""Placements of a plan on the torus: which axis has which dimension."""

from math import prod

import numpy as np
import pytest

import meshscope
from meshscope.interconnect.placement import placement_of
from meshscope.planner.placements import (
    axis_placements,
    device_order,
    search_placements,
)
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload


def _experiment(topology: str, plan: str) -> Experiment:
    return experiment_of(
        model=read_model("Qwen/Qwen3-8B"),
        plan=parse_plan(plan),
        topology=parse_topology(topology),
        workload=Workload(batch=8, prompt=1024, output=128),
    )


@pytest.mark.parametrize(
    ("topology", "plan"),
    [("v6e:2x4", "dp=2,tp=4"), ("v5p:2x2x4", "dp=4,tp=4"), ("2xv6e:2x2", "dp=2,cp=2,tp=2")],
)
def test_a_placement_puts_each_device_at_one_position(topology: str, plan: str) -> None:
    experiment = _experiment(topology, plan)
    placements = list(axis_placements(experiment))
    assert len({str(one) for one in placements}) == len(placements) > 1
    for one in placements:
        order = device_order(experiment, one)
        assert sorted(order.tolist()) == list(range(experiment.topology.n_devices))
        sizes = [size for _, of_dim in one.factors for _, size in of_dim]
        assert prod(sizes) == experiment.topology.n_devices


def test_an_axis_lies_on_the_dimensions_of_its_placement() -> None:
    experiment = _experiment("v6e:2x4", "dp=2,tp=4")
    along_y = next(one for one in axis_placements(experiment) if str(one) == "y: tp=4; x: dp=2")
    order = device_order(experiment, along_y)
    x, y, _ = placement_of(experiment.topology).coordinates[order].T
    groups = np.array(experiment.plan.mesh.groups("tp"))
    assert [set(x[group].tolist()) for group in groups] == [{0}, {1}]
    assert all(y[group].tolist() == [0, 1, 2, 3] for group in groups)


def test_mesh_order_is_one_of_the_placements() -> None:
    """On v6e:2x4, device ids count x first: two rows of two chips are the tp groups."""
    experiment = _experiment("v6e:2x4", "dp=2,tp=4")
    orders = {
        str(one): device_order(experiment, one).tolist() for one in axis_placements(experiment)
    }
    assert orders["y: dp=2,tp=2; x: tp=2"] == list(range(8))
    searched = search_placements(experiment)
    assert searched is not None
    same = next(one for one in searched.placed if str(one.placement) == "y: dp=2,tp=2; x: tp=2")
    assert same.e2e_s == searched.in_order.e2e_s


def test_groups_of_distant_chips_take_longer() -> None:
    searched = search_placements(_experiment("v6e:4x4", "dp=4,tp=4"))
    assert searched is not None
    seconds = {str(one.placement): one.ttft_s for one in searched.placed}
    assert seconds["y: tp=2,dp=2; x: tp=2,dp=2"] > 1.05 * seconds["y: dp=2,tp=2; x: dp=2,tp=2"]
    assert searched.best is None or searched.best.e2e_s < searched.in_order.e2e_s


def test_mesh_order_has_the_predicted_times() -> None:
    result = meshscope.plan("Qwen/Qwen3-8B", topology="v6e-8", batch=8)
    assert result.search.placements is not None
    in_order = result.search.placements.in_order
    assert result.winner is not None
    assert in_order.e2e_s == pytest.approx(result.winner.e2e_s, rel=1e-12)
    text = " ".join(repr(result).split())
    assert "placement: " in text
    document = result.as_dict()["placement"]
    assert document["n_tried"] == len(document["placements"])


@pytest.mark.parametrize(("topology", "plan"), [("v6e:2x4", "tp=8"), ("h100:8", "dp=2,tp=4")])
def test_one_axis_or_no_torus_has_no_other_placement(topology: str, plan: str) -> None:
    assert search_placements(_experiment(topology, plan)) is None
