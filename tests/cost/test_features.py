"""The costs of a device, which replicas of the plan do not change."""

import numpy as np
import pytest

from meshscope.cost.features import plan_costs
from meshscope.cost.rates import rates_of
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.chips import chip_of
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload


@pytest.mark.parametrize(
    ("plan", "replicated"),
    [
        ("tp=4", "dp=4,tp=4"),
        ("tp=4", "fsdp=4,tp=4"),
        ("tp=4", "cp=4,tp=4"),
        ("tp=4,ep=4", "fsdp=4,tp=4,ep=4"),
        ("dp=2,tp=2,ep=4", "dp=2,cp=4,tp=2,ep=4"),
    ],
)
def test_replicas_and_blocks_of_the_prompt_leave_the_costs_of_a_device(plan, replicated) -> None:
    costs = [
        plan_costs(
            experiment_of(
                model=read_model("Qwen/Qwen3-30B-A3B"),
                plan=parse_plan(text),
                topology=parse_topology(f"v6e:{parse_plan(text).n_devices // 4 * 2}x2"),
                workload=Workload(batch=16, prompt=1024),
            ),
            phase,
            rates_of(chip_of("v6e")),
        ).coefficients
        for text in (plan, replicated)
        for phase in REQUEST_PHASES
    ]
    assert np.array_equal(costs[0], costs[2])
    assert np.array_equal(costs[1], costs[3])
    assert costs[0].any()
