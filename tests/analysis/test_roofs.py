"""Which roof binds, from figures that are easy to divide."""

import pytest

from meshscope.analysis.roofline_bound import BindingResource, roofs_of
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate
from meshscope.spec.hardware.chips import chip_of

V5E = chip_of("v5e")
ATTN = PartCost(
    part="attn", compute_s=0.5, collective_s=0.1, exposed_s=0.1, flops=1.97e13, hbm_bytes=1.62e11
)
MLP = PartCost(
    part="mlp", compute_s=1.0, collective_s=0.5, exposed_s=0.2, flops=1.576e14, hbm_bytes=8.1e10
)
STEP = StepTime(
    source=Source.COMPILED,
    phase=Phase.PREFILL,
    step=TimeEstimate(value_s=2.0, low_s=1.0, high_s=3.0),
    compute_s=1.5,
    exposed_s=0.3,
    idle_s=0.2,
    bubble_s=0.0,
    collective_s=0.6,
    exposed_by_axis_s={"tp": 0.3},
    by_basis_s={},
    parts=(MLP, ATTN),
)


def test_the_highest_roof_binds_and_the_next_tells_by_how_much():
    whole, mlp, attn = roofs_of(STEP, V5E)
    assert (mlp.part, mlp.binding) == ("mlp", BindingResource.COMPUTE)
    assert (mlp.compute_s, mlp.hbm_s, mlp.interconnect_s) == pytest.approx((0.8, 0.1, 0.5))
    assert (mlp.factor, mlp.taken_s) == pytest.approx((1.6, 1.2))
    assert (attn.binding, attn.hbm_s, attn.factor) == (
        BindingResource.HBM,
        pytest.approx(0.2),
        pytest.approx(2),
    )
    assert (whole.compute_s, whole.hbm_s, whole.interconnect_s) == pytest.approx((0.9, 0.3, 0.6))
    assert (whole.binding, whole.roof_frac) == (BindingResource.COMPUTE, pytest.approx(0.45))


def test_two_devices_share_the_peaks_of_a_chip():
    whole = roofs_of(STEP, chip_of("v4"))[0]
    assert whole.compute_s == pytest.approx((1.97e13 + 1.576e14) / 1.375e14)


def test_chip_without_published_peaks_has_no_roofs():
    assert roofs_of(STEP, chip_of("cpu")) == []
