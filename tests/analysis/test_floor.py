"""The floor of a step and the causes beyond it, from figures that are easy to divide."""

import pytest

from meshscope.analysis.floor import OTHER, step_floor
from meshscope.analysis.roofline import BindingResource
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate
from meshscope.spec.hardware.chips import chip_of

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
)


def test_bounds_are_work_over_peak_rates() -> None:
    floor = step_floor(STEP, V5E)
    assert floor is not None
    assert (floor.hbm_s, floor.compute_s, floor.link_s) == pytest.approx((5e-3, 2e-3, 1e-3))
    assert (floor.binding, floor.floor_s) == (BindingResource.HBM, pytest.approx(5e-3))


def test_causes_add_up_to_the_step_minus_its_floor() -> None:
    floor = step_floor(STEP, V5E)
    assert floor is not None
    causes = {cause.cause: cause.seconds for cause in floor.causes if cause.cause != OTHER}
    # The weights of the MLP take 4 ms of the HBM and 2 ms of the core: the rest is fetched beside others.
    expected = {"attn": 2e-3, "exposed over tp": 1e-3, "waiting": 0.5e-3, "mlp": -2e-3}
    assert causes == pytest.approx(expected)
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(6.5e-3 - 5e-3)


def test_a_chip_without_published_peaks_has_no_floor() -> None:
    assert step_floor(STEP, chip_of("cpu")) is None
