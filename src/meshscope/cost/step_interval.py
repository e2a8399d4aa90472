"""Interval of a simulated step: the errors of published steps, of its kernels, and of its collectives.

The three are taken as independent. The errors of all kernels have a common cause and add up, and so do
those of all collectives.
"""

from collections.abc import Iterable
from math import hypot

from meshscope.cost.machine import CORE_LANE, LINK_LANE
from meshscope.cost.simulator import SimulatedStep
from meshscope.events.step_time import TimeEstimate
from meshscope.spec.hardware.operation_rates import SPREAD

_Timed = tuple[float, TimeEstimate]  # seconds in the step, and the estimate of one execution


def step_estimate(simulated: SimulatedStep) -> TimeEstimate:
    """The simulated step with its interval; without one if a collective has none."""
    step_s, spread = simulated.machine.now_s, SPREAD.value
    groups = (list(_kernels(simulated)), list(_collectives(simulated)))
    if any(time.low_s is None or time.high_s is None for group in groups for _, time in group):
        return TimeEstimate(value_s=step_s, low_s=None, high_s=None)
    rest_s = step_s - sum(seconds for group in groups for seconds, _ in group)
    below = [sum(s * (1 - time.lower_s / time.value_s) for s, time in group) for group in groups]
    above = [sum(s * (time.upper_s / time.value_s - 1) for s, time in group) for group in groups]
    return TimeEstimate(
        value_s=step_s,
        low_s=max(0.0, step_s - hypot(rest_s * (1 - 1 / spread), *below)),
        high_s=step_s + hypot(rest_s * (spread - 1), *above),
    )


def _kernels(simulated: SimulatedStep) -> Iterable[_Timed]:
    """Work on the core without a compiler estimate."""
    for key, seconds in simulated.machine.tally.items():
        if key[0] == "compute" and isinstance(key[1], tuple) and key[1][0] == CORE_LANE:
            cost = simulated.op_costs[str(key[1][1])]
            if not cost.is_estimated and cost.time.seconds.value_s > 0:
                yield seconds, cost.time.seconds


def _collectives(simulated: SimulatedStep) -> Iterable[_Timed]:
    """Exposed seconds of each collective."""
    for key, seconds in simulated.machine.tally.items():
        if key[0] == "exposed" and isinstance(key[1], tuple) and key[1][0] == LINK_LANE:
            estimate = simulated.collectives[str(key[1][1])].estimate
            if estimate is not None and estimate.seconds.value_s > 0:
                yield seconds, estimate.seconds
