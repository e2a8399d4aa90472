"""The floor of a step and the causes beyond it, from figures that are easy to divide."""

from dataclasses import replace

import pytest

from meshscope.analysis.floor import OTHER, SLOW_HBM, step_floor
from meshscope.analysis.roofline import BindingResource
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import (
    Activity,
    ActivityTime,
    PartCost,
    StepTime,
    TimeEstimate,
)
from meshscope.spec.experiment import experiment_of
from meshscope.spec.hardware.chips import chip_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload

V5E = chip_of("v5e")  # 819 GB/s, 197 TFLOP/s, four links of 45 GB/s
ATTN = PartCost(
    part="attn",
    compute_s=3e-3,
    collective_s=1e-3,
    exposed_s=1e-3,
    flops=1.97e11,  # 1 ms
    hbm_bytes=8.19e8,  # 1 ms
    wire_bytes=1.8e8,  # 1 ms over all links
)
MLP = PartCost(
    part="mlp",
    compute_s=2e-3,
    collective_s=0.0,
    exposed_s=0.0,
    flops=1.97e11,
    hbm_bytes=4 * 8.19e8,
    wire_bytes=0.0,
)
STEP = StepTime(
    source=Source.COMPILED,
    phase=Phase.DECODE,
    step=TimeEstimate(value_s=6.5e-3, low_s=None, high_s=None),
    compute_s=5e-3,
    exposed_s=1e-3,
    idle_s=0.5e-3,
    bubble_s=0.0,
    collective_s=1e-3,
    exposed_by_axis_s={"tp": 1e-3},
    by_basis_s={},
    parts=(ATTN, MLP),
    activities=(
        ActivityTime(
            activity=Activity.MATMUL,
            seconds=4e-3,
            hbm_busy_s=3.5e-3,
            flops=3.94e11,
            padding_flops=1.97e11,
        ),
        ActivityTime(activity=Activity.SMALL, seconds=1e-3, hbm_busy_s=0.8e-3),
        ActivityTime(
            activity=Activity.EXPOSED,
            axis="tp",
            seconds=1e-3,
            hbm_busy_s=0.6e-3,
            wire_bytes=1.8e8,
        ),
        ActivityTime(activity=Activity.COPY, seconds=0.5e-3, hbm_busy_s=0.5e-3),
    ),
)


def test_bounds_are_work_over_peak_rates() -> None:
    floor = step_floor(STEP, V5E)
    assert floor is not None
    assert (floor.hbm_s, floor.compute_s, floor.link_s) == pytest.approx((5e-3, 2e-3, 1e-3))
    assert (floor.binding, floor.floor_s) == (BindingResource.HBM, pytest.approx(5e-3))


def test_causes_of_a_step_bound_by_hbm_are_the_seconds_in_which_it_rests() -> None:
    floor = step_floor(STEP, V5E)
    assert floor is not None
    causes = {cause.cause: cause.seconds for cause in floor.causes if cause.cause != OTHER}
    # The HBM is busy for 5.4 ms with bytes of 5 ms at its peak rate.
    expected = {
        "matmuls below peak": 0.5e-3,
        "exposed over tp": 0.4e-3,
        SLOW_HBM: 0.4e-3,
        "small operations": 0.2e-3,
    }
    assert causes == pytest.approx(expected)
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(6.5e-3 - 5e-3)


def test_causes_of_a_step_bound_by_compute_are_the_seconds_without_flops() -> None:
    parts = tuple(replace(part, hbm_bytes=1.0) for part in STEP.parts)
    floor = step_floor(replace(STEP, parts=parts), V5E)
    assert floor is not None
    assert (floor.binding, floor.floor_s) == (BindingResource.COMPUTE, pytest.approx(2e-3))
    causes = {cause.cause: cause.seconds for cause in floor.causes if cause.cause != OTHER}
    expected = {
        "matmuls below peak": 1e-3,  # 4 ms less 2 ms of FLOPs and 1 ms of padding
        "padding": 1e-3,
        "small operations": 1e-3,
        "exposed over tp": 1e-3,
        "waiting for copies": 0.5e-3,
    }
    assert causes == pytest.approx(expected)
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(6.5e-3 - 2e-3)


def test_a_step_without_activities_has_one_unknown_cause() -> None:
    floor = step_floor(replace(STEP, activities=()), V5E)
    assert floor is not None
    assert [cause.cause for cause in floor.causes] == [OTHER]
    assert floor.causes[0].seconds == pytest.approx(1.5e-3)


@pytest.mark.parametrize(
    ("model", "topology", "plan"),
    [
        ("Qwen/Qwen3-8B", "v6e:2x2", "tp=4"),
        ("Qwen/Qwen3-30B-A3B", "v6e:2x2", "tp=4,ep=4"),
        ("meta-llama/Llama-3.1-8B", "v5e:2x4", "pp=2,tp=4"),
        ("meta-llama/Llama-3.1-8B", "h100:8", "tp=8"),
    ],
)
def test_causes_of_predicted_steps_are_known_and_add_up(
    model: str, topology: str, plan: str
) -> None:
    experiment = experiment_of(
        model=read_model(model),
        plan=parse_plan(plan),
        topology=parse_topology(topology),
        workload=Workload(batch=8, prompt=1024, output=128),
    )
    for time in predicted_times(experiment):
        total_s = sum(spent.seconds for spent in time.activities)
        assert total_s == pytest.approx(time.step.value_s)
        assert all(0 <= s.hbm_busy_s <= s.seconds + 1e-12 for s in time.activities)
        flops = sum(spent.flops for spent in time.activities)
        assert flops == pytest.approx(time.flops)
        floor = step_floor(time, experiment.topology.chip)
        assert floor is not None
        caused_s = sum(cause.seconds for cause in floor.causes)
        assert caused_s == pytest.approx(time.step.value_s - floor.floor_s)
        named_s = sum(cause.seconds for cause in floor.causes if cause.cause != OTHER)
        assert named_s == pytest.approx(caused_s, abs=0.03 * time.step.value_s)


def test_a_chip_without_published_peaks_has_no_floor() -> None:
    assert step_floor(STEP, chip_of("cpu")) is None
