"""One device: products by shape and the launch of a kernel, and the times that follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshscope.backends.calibrate.calibrate import CalibrationRequest
from meshscope.backends.calibrate.fit import fit_constants
from meshscope.cost.rates import ArrayTraffic, measured_rates, rates_of
from meshscope.hardware.interconnect.profile import (
    ChipProfile,
    MatrixRate,
    MemoryRate,
    ProductTime,
    load_profile,
    save_profile,
)
from meshscope.hardware.topology import parse_topology

FLOPS_PER_S, BYTES_PER_S, LAUNCH_S = 8e14, 4e12, 2e-6


def product(rows: int, *, slower: float) -> ProductTime:
    """A product that takes `slower` times its roofline, and a launch."""
    flops, n_bytes = 2.0 * rows * 4096 * 4096, 2.0 * (4096 * 4096 + rows * 8192)
    ideal_s = max(flops / FLOPS_PER_S, n_bytes / BYTES_PER_S)
    return ProductTime(
        rows=rows,
        depth=4096,
        columns=4096,
        dtype="bf16",
        weight_dtype="bf16",
        flops=flops,
        n_bytes=n_bytes,
        seconds=slower * ideal_s + LAUNCH_S,
    )


def profile(topology: str = "h200:1") -> ChipProfile:
    """A made-up card: few rows 1.25 times their roofline, many rows at the best rate there is."""
    where = parse_topology(topology)
    best = product(8192, slower=1.0)
    best = replace(best, seconds=best.flops / FLOPS_PER_S)
    return ChipProfile(
        chip=where.chip.name,
        topology=where.name,
        plan="tp=1",
        constants=fit_constants((), where, source="made up").constants,
        fits=(),
        points=(),
        matrices=(MatrixRate(n=8192, dtype="bfloat16", flops_per_s=2 * FLOPS_PER_S),),
        memory=(MemoryRate(array_bytes=1 << 31, bytes_per_s=BYTES_PER_S),),
        conditions={},
        products=(product(1, slower=1.25), product(64, slower=1.5), best),
        launch_s=LAUNCH_S,
    )


def request(topology: str) -> CalibrationRequest:
    return CalibrationRequest(
        topology=topology,
        plan="tp=1",
        max_bytes=1024,
        budget_s=1.0,
        repeats=1,
    )


def test_a_gpu_times_few_and_many_rows_with_16_and_8_bit_weights() -> None:
    shapes = request("h200:1").product_shapes
    assert {shape.rows for shape in shapes} == {1, 8, 64, 256, 1024, 4096, 8192}
    assert {shape.weight_dtype for shape in shapes} == {"bf16", "f8e4m3fn"}
    first = shapes[0]
    assert (first.flops, first.n_bytes) == (2 * 4096 * 4096, 2 * 4096 * 4096 + 2 * 8192)


def test_the_best_rate_is_that_of_random_matrices_where_they_were_timed() -> None:
    """Matrices of zeros multiply faster than others: 894 beside 788 TFLOP/s on one H200."""
    assert profile().flops_per_s == pytest.approx(FLOPS_PER_S)


def test_a_profile_keeps_its_products(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    save_profile(profile(), path, force=False)
    loaded = load_profile(path)
    assert (loaded.products, loaded.launch_s) == (profile().products, LAUNCH_S)


def test_products_take_what_was_measured_at_their_flops_per_byte() -> None:
    rates = rates_of(parse_topology("h200:1").chip, profile())
    for one in profile().products[:2]:
        price = rates.roofline(flops=one.flops, moved=ArrayTraffic(hbm_bytes=one.n_bytes))
        assert price.seconds.value_s == pytest.approx(one.seconds)


def test_between_two_measured_shapes_the_factor_is_between_theirs() -> None:
    rates = measured_rates(profile())
    between = product(8, slower=1.0)
    assert 1.25 < rates.factor(between.flops, between.n_bytes) < 1.5


def test_the_fastest_shape_of_some_rows_counts_and_8_bit_weights_do_not() -> None:
    """On one H200, a row takes 1.58 times the bytes of 4,096 x 4,096 and 1.15 of 12,288 x 4,096 weights."""
    one, *others = profile().products
    small = replace(one, depth=1024, n_bytes=one.n_bytes / 4, flops=one.flops / 4)
    narrow = replace(one, weight_dtype="f8e4m3fn", n_bytes=one.n_bytes / 2)
    known = measured_rates(profile())
    assert measured_rates(replace(profile(), products=(small, one, narrow, *others))) == known


def test_a_pass_over_arrays_takes_its_bytes_and_a_launch() -> None:
    rates = rates_of(parse_topology("h200:1").chip, profile())
    assert rates.roofline(moved=ArrayTraffic(hbm_bytes=4 * 10**9)).seconds.value_s == pytest.approx(
        1e-3 + LAUNCH_S
    )


def test_a_tpu_keeps_the_cycles_of_its_compiler() -> None:
    chip = parse_topology("v6e-8").chip
    assert rates_of(chip, replace(profile(), chip="v6e")) == rates_of(chip)
