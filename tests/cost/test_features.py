"""The costs of a device, which replicas of the plan do not change."""

import numpy as np
from made import experiment_with
from tables import table

from meshscope.cost.features import plan_costs
from meshscope.cost.rates import rates_of
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.chips import chip_of
from meshscope.plans.plan import parse_plan


@table
def test_replicas_and_blocks_of_the_prompt_leave_the_costs_of_a_device(plan, replicated) -> None:
    costs = [
        plan_costs(
            experiment_with(
                "Qwen/Qwen3-30B-A3B",
                text,
                f"v6e:{parse_plan(text).n_devices // 4 * 2}x2",
                batch=16,
                prompt=1024,
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
