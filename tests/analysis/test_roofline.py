"""Steps against the peaks of a chip, by hand."""

import pytest

from meshscope.analysis.roofline import rooflines
from meshscope.events.enums import Phase
from meshscope.events.measured import StepCost
from meshscope.spec.hardware.chips import chip_of

COST = StepCost(phase=Phase.DECODE, flops=1e12, accessed_bytes=2.4e10)


def test_a_step_at_half_the_bandwidth_of_an_h200() -> None:
    (found,) = rooflines((COST,), {Phase.DECODE: 0.01}, chip_of("h200"))
    assert found.hbm_frac == pytest.approx(0.5)
    assert found.flops_frac == pytest.approx(1e14 / 9.89e14)


def test_a_device_of_a_chip_with_two_has_half_its_peak() -> None:
    (found,) = rooflines((COST,), {Phase.DECODE: 0.04}, chip_of("v4"))
    assert found.hbm_frac == pytest.approx(1.0)


def test_a_cpu_has_no_roofline() -> None:
    assert rooflines((COST,), {Phase.DECODE: 0.01}, chip_of("cpu")) == []
