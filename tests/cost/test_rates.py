"""What large operations reach of published peaks: figures of others beside the rates of the model."""

from dataclasses import replace

import pytest

from meshscope.cost.efficiency import efficiency_of
from meshscope.cost.rates import Rates, rates_of
from meshscope.spec.hardware.chips import chip_of

GIB = 2**30

# Bytes a second that others measured: an array read, or a triad (RRZE-HPC/gpu-benches@1038c5d, a100_80;
# AI-Hypercomputer's microbenchmarks of Trillium and Ironwood, one of the two cores of a chip).
MEASURED_BYTES_PER_S = {"a100": 1.794e12, "v6e": 1.3596e12, "tpu7x": 6.4e12 / 2}
# FLOPs a second at the best shape (stas00/ml-engineering@b9e2972), and in 8192^3 on a v6e.
MEASURED_FLOPS_PER_S = {"a100": 271.2e12, "h100": 794.5e12, "v6e": 754e12}


@pytest.mark.parametrize(("chip", "measured"), MEASURED_BYTES_PER_S.items())
def test_measured_bandwidths_lie_in_the_interval(chip: str, measured: float) -> None:
    seconds = rates_of(chip_of(chip)).roofline(hbm_bytes=GIB).seconds
    assert seconds.low_s is not None
    assert seconds.high_s is not None
    assert seconds.low_s <= GIB / measured <= seconds.high_s
    assert seconds.value_s == pytest.approx(GIB / measured, rel=0.1)


@pytest.mark.parametrize(("chip", "measured"), MEASURED_FLOPS_PER_S.items())
def test_measured_products_lie_in_the_interval(chip: str, measured: float) -> None:
    seconds = rates_of(chip_of(chip)).roofline(flops=1e12).seconds
    assert seconds.low_s is not None
    assert seconds.high_s is not None
    assert seconds.low_s <= 1e12 / measured <= seconds.high_s
    assert seconds.value_s == pytest.approx(1e12 / measured, rel=0.1)


def test_a_gpu_reads_at_more_of_its_rate_than_a_tpu() -> None:
    usual = Rates(flops_per_s=1e15, hbm_bytes_per_s=1e12, clock_hz=None)
    gpu = replace(usual, reach=rates_of(chip_of("h100")).reach)
    ratio = (
        gpu.roofline(hbm_bytes=GIB).seconds.value_s / usual.roofline(hbm_bytes=GIB).seconds.value_s
    )
    assert ratio == pytest.approx(0.85 / 0.95)
    assert gpu.unknown(n_bytes=GIB).seconds.value_s == gpu.roofline(hbm_bytes=GIB).seconds.value_s


def test_the_closed_form_of_a_gpu_takes_the_same_shares() -> None:
    reach, shares = rates_of(chip_of("h200")).reach, efficiency_of(chip_of("h200"))
    assert (shares.usual.matmul, shares.usual.weight) == (reach.matmul, reach.hbm)
    assert (shares.reach, shares.spread) == (reach, None)
    assert f"{reach.hbm:.0%} of the HBM's rate" in shares.source
