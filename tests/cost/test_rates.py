"""Published rates of large operations beside the modeled rates."""

from dataclasses import replace

import pytest

from meshscope.cost.rates import ArrayTraffic, Rates, efficiency_of, rates_of
from meshscope.hardware.chips import chip_of

GIB = 2**30
COPIED = ArrayTraffic(hbm_bytes=GIB, hbm_written_bytes=GIB // 2)

# Measured bytes/s: an array read, or a triad (RRZE-HPC/gpu-benches@1038c5d, a100_80;
# AI-Hypercomputer's microbenchmarks of Trillium and Ironwood, one of a chip's two cores).
MEASURED_BYTES_PER_S = {"a100": 1.794e12, "v6e": 1.3596e12, "tpu7x": 6.4e12 / 2}
# Measured FLOP/s at the best shape (stas00/ml-engineering@b9e2972), and in 8192^3 on a v6e.
MEASURED_FLOPS_PER_S = {"a100": 271.2e12, "h100": 794.5e12, "v6e": 754e12}


@pytest.mark.parametrize(("chip", "measured"), MEASURED_BYTES_PER_S.items())
def test_measured_bandwidths_are_in_the_interval(chip: str, measured: float) -> None:
    seconds = rates_of(chip_of(chip)).roofline(moved=COPIED).seconds
    assert seconds.low_s <= GIB / measured <= seconds.high_s
    assert seconds.value_s == pytest.approx(GIB / measured, rel=0.1)


@pytest.mark.parametrize(("chip", "measured"), MEASURED_FLOPS_PER_S.items())
def test_measured_products_are_in_the_interval(chip: str, measured: float) -> None:
    seconds = rates_of(chip_of(chip)).roofline(flops=1e12).seconds
    assert seconds.low_s <= 1e12 / measured <= seconds.high_s
    assert seconds.value_s == pytest.approx(1e12 / measured, rel=0.1)


def test_gpus_reach_more_of_their_hbm_rate_than_tpus() -> None:
    tpu = Rates(flops_per_s=1e15, hbm_bytes_per_s=1e12, clock_hz=None)
    gpu = replace(tpu, efficiency=rates_of(chip_of("h100")).efficiency)
    ratio = gpu.roofline(moved=COPIED).seconds.value_s / tpu.roofline(moved=COPIED).seconds.value_s
    assert ratio == pytest.approx((0.5 / 0.91 + 0.5 / 0.76) ** -1 / 0.95)
    unknown_s = gpu.unknown(COPIED).seconds.value_s
    assert unknown_s == pytest.approx(gpu.roofline(moved=COPIED).seconds.value_s)


def test_the_closed_form_of_a_gpu_uses_the_same_efficiency() -> None:
    chip = chip_of("h200")
    rates = rates_of(chip)
    efficiency = efficiency_of(chip, rates)
    peak, constants = rates.efficiency, efficiency.constants
    assert (constants.matmul, constants.weights) == (peak.matmul, peak.hbm)
    assert (efficiency.fast.matmul, efficiency.slow.matmul) == (0.9, 0.7)
    assert not efficiency.streams_weights
    assert f"{peak.hbm:.0%} of the HBM rate" in efficiency.source
