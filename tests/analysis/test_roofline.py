"""Roofline points, bounds and fractions of peak, from figures that are easy to divide."""

from dataclasses import replace

import pytest
from made import estimate, part_cost, step_time

from meshscope.analysis.roofline import BindingResource, roofline_bounds, step_floor
from meshscope.events.enums import Phase
from meshscope.events.measured import StepCost
from meshscope.hardware.chips import chip_of

COST = StepCost(phase=Phase.DECODE, flops=1e12, accessed_bytes=2.4e10)
V5E = chip_of("v5e")
ATTN = part_cost("attn", 0.5, collective_s=0.1, exposed_s=0.1, flops=1.97e13, hbm_bytes=1.638e11)
MLP = part_cost(
    "mlp", 1.0, collective_s=0.7, exposed_s=0.2, flops=1.576e14, hbm_bytes=8.19e10, wire_bytes=9e10
)
STEP = step_time(
    Phase.PREFILL,
    estimate(2.0, 1.0, 3.0),
    1.5,
    exposed_s=0.3,
    idle_s=0.2,
    collective_s=0.6,
    exposed_by_axis_s={"tp": 0.3},
    parts=(MLP, ATTN),
)


def test_the_largest_bound_binds_and_the_factor_is_its_lead() -> None:
    whole, mlp, attn = roofline_bounds(STEP, V5E)
    assert (mlp.part, mlp.binding) == ("mlp", BindingResource.COMPUTE)
    assert (mlp.compute_s, mlp.hbm_s, mlp.interconnect_s) == pytest.approx((0.8, 0.1, 0.5))
    assert (mlp.factor, mlp.taken_s) == pytest.approx((1.6, 1.2))
    assert (attn.binding, attn.hbm_s, attn.factor) == (
        BindingResource.HBM,
        pytest.approx(0.2),
        pytest.approx(2),
    )
    assert (whole.compute_s, whole.hbm_s, whole.interconnect_s) == pytest.approx((0.9, 0.3, 0.5))
    assert (whole.binding, whole.roof_frac) == (BindingResource.COMPUTE, pytest.approx(0.45))


def test_the_bound_of_a_step_is_its_floor() -> None:
    """Seconds of collectives, which no peak gives, are in neither."""
    slow = replace(STEP, parts=(replace(MLP, collective_s=50.0), ATTN))
    whole, floor = roofline_bounds(slow, V5E)[0], step_floor(slow, V5E)
    bounds = (whole.binding, whole.compute_s, whole.hbm_s, whole.interconnect_s)
    assert bounds == (floor.binding, floor.compute_s, floor.hbm_s, floor.link_s)


def test_a_gpu_sends_at_the_rate_of_all_its_links() -> None:
    whole = roofline_bounds(STEP, chip_of("h100"))[0]
    assert whole.interconnect_s == pytest.approx(9e10 / 4.5e11)


def test_two_devices_share_the_peaks_of_a_chip() -> None:
    whole = roofline_bounds(STEP, chip_of("tpu7x"))[0]
    assert whole.compute_s == pytest.approx((1.97e13 + 1.576e14) / 1.1535e15)


def test_a_chip_without_published_peaks_has_no_bounds() -> None:
    assert roofline_bounds(STEP, chip_of("cpu")) == []
