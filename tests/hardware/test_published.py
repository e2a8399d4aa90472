"""The interconnect model against published measurements, and the coverage of its intervals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fit_collectives import holdout_errors, modeled_s
from published_collectives import CCL_BENCH, POINTS, XPROF_V5P, Point, split_points
from tables import read_rows, table

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect.constants import constants_of, spec_constants
from meshscope.hardware.interconnect.lines import collective_lines, collective_time, fastest
from meshscope.hardware.interconnect.strategies import geometry_of
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan


def point_id(point: Point) -> str:
    return f"{point.topology}-{point.kind}-{point.payload_bytes}"


AR = Kind.ALL_REDUCE


def test_at_most_half_of_the_points_are_fitted() -> None:
    fitted, holdout = split_points(POINTS)
    assert not set(fitted) & set(holdout)
    assert set(fitted) | set(holdout) == set(POINTS)
    assert len(fitted) <= len(POINTS) / 2


@table
def test_v6e_all_reduce_rates(topology: str, gb_per_s: float) -> None:
    """CCL-Bench: 81, 167, 176 GB/s on the wire of a chip at TP 2, 4, 8 for 67.1 MB messages."""
    (point,) = (p for p in POINTS if p.source == CCL_BENCH and p.topology == topology)
    n = len(point.groups[0])
    wire_bytes = float(point.payload_bytes * wire_factor(point.kind, n))
    assert wire_bytes / point.seconds == pytest.approx(gb_per_s * 1e9, rel=0.01)
    seconds = modeled_s(point, constants_of(chip_of("v6e")))
    assert wire_bytes / seconds == pytest.approx(gb_per_s * 1e9, rel=0.10)


@pytest.mark.parametrize(
    "point",
    [p for p in POINTS if p.source == XPROF_V5P and p.payload_bytes > 1 << 20],
    ids=point_id,
)
def test_v5p_collectives_of_a_step(point: Point) -> None:
    """xprof's golden profile of a MaxText step on 2x2x1: 1 MB and more within 10 %."""
    assert modeled_s(point, constants_of(chip_of("v5p"))) == pytest.approx(point.seconds, rel=0.10)


def test_half_of_the_holdout_is_within_five_percent() -> None:
    errors = np.abs(list(holdout_errors().values()))
    assert float(np.median(errors)) <= 0.05
    assert float(errors.max()) <= 0.35


def test_intervals_cover_the_holdout() -> None:
    """With 7 and 11 holdout points, conformal intervals cover at least 90 % of them."""
    inside = [
        time.low_s <= point.seconds <= time.high_s
        for point in holdout_errors()
        if (time := timed(point.kind, point.topology, point.groups, point.payload_bytes)).low_s
    ]
    assert sum(inside) >= 0.9 * len(holdout_errors())


def timed(kind: Kind, slices: str, groups: Groups | str, payload_bytes: int, **options: Any):
    """The time over these groups, or those of the axis of a plan such as 'dp=2,tp=4: tp'."""
    if isinstance(groups, str):
        plan, _, axis = groups.partition(": ")
        groups = parse_plan(plan).mesh.groups(axis)
    topology = parse_topology(slices)
    asked = {"groups": groups, "payload_bytes": payload_bytes, "topology": topology}
    return collective_time(kind, **asked, **options)


def test_only_collectives_outside_the_measurements_are_extrapolated() -> None:
    measured, small, other = (
        timed(kind, "v6e:2x4", "tp=8: tp", payload_bytes)
        for kind, payload_bytes in ((AR, 1 << 26), (AR, 1 << 12), (Kind.ALL_GATHER, 1 << 26))
    )
    assert [time.is_extrapolated for time in (measured, small, other)] == [False, True, True]
    assert measured.high_s / measured.seconds < other.high_s / other.seconds


@table
def test_names_in_compiled_hlo_select_the_strategy(name, algorithm, strategy) -> None:
    groups = (tuple(range(parse_topology(name).n_devices)),)
    assert timed(AR, name, groups, 1 << 26, algorithm=algorithm).strategy == strategy


def test_slices_communicate_over_dcn() -> None:
    """Trillium: psum of 303,038,464 B between the same chips of two slices of 256: 4.11 GB/s published.

    Each host of four chips sends 4 x 303 MB. Inside a slice each chip ends with an eighth.
    """
    (point,) = (p for p in POINTS if p.topology.startswith("2x"))
    assert modeled_s(point, constants_of(chip_of("v6e"))) == pytest.approx(point.seconds, rel=0.01)
    together = timed(AR, "2xv6e:2x4", (tuple(range(16)),), 1 << 28)
    inside = timed(AR, "2xv6e:2x4", (tuple(range(8)), tuple(range(8, 16))), 1 << 28)
    network_s = 2 * 4 * (1 << 28) / 8 / 2 / constants_of(chip_of("v6e")).host_bytes_per_s
    assert together.seconds == pytest.approx(network_s + inside.seconds, rel=0.02)


EIGHT = (tuple(range(8)),)


@table
def test_h100_reaches_the_published_nccl_rates(
    kind: Kind, name, groups: Groups | str, bytes_per_s
) -> None:
    time = timed(kind, name, groups, 1 << 34)
    wire_bytes = (1 << 34) * float(wire_factor(kind, 2 if kind is Kind.PERMUTE else 8))
    assert wire_bytes / time.seconds == pytest.approx(bytes_per_s, rel=0.01)


def test_small_all_reduces_of_h100_take_nccls_latency() -> None:
    """tuning.cc, ring, LL: 3.6 us and 2(n-1) steps of 0.47 us over NVLink."""
    time = timed(AR, "h100:4", ((0, 1, 2, 3),), 4)
    assert time.seconds == pytest.approx(3.6e-6 + 6 * 0.47e-6, rel=0.01)


def test_a_chip_without_published_figures_is_refused_and_a_group_of_one_sends_nothing() -> None:
    with pytest.raises(SpecError, match=r"'cpu' has no published .*calibrate.*--profile"):
        constants_of(chip_of("cpu"))
    time = timed(AR, "v6e:1x2", ((0,), (1,)), 4)
    assert (time.seconds, time.is_extrapolated) == (0.0, False)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (((0, 8),), "device 8 is not in 'v6e:2x4', which has 8 devices"),
        (((0, 1), (2, 3, 4)), "2 to 3 devices"),
    ],
)
def test_impossible_groups_are_refused(groups: Groups, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        geometry_of(parse_topology("v6e:2x4"), groups)


def test_both_cores_of_a_chip_share_its_links() -> None:
    """tpu7x 2x2x1, gather of V over 8 cores: each core gathers its half of V over the chips, both over
    two links of 1e11 B/s, then the cores swap halves at 6e11: V 3/4 / 2e11 + V/2 / 6e11."""
    constants = replace(spec_constants(chip_of("tpu7x")), hop_s=0.0)
    time = timed(Kind.ALL_GATHER, "tpu7x:2x2x1", EIGHT, 1 << 30, constants=constants)
    assert time.seconds == pytest.approx((1 << 30) * (3 / 4 / 2e11 + 1 / 2 / 6e11))


def all_reduce(name: str, payload_bytes: int, *, plan: str | None = None, **options: Any):
    plan = plan or f"tp={parse_topology(name).n_devices}"
    return timed(AR, name, f"{plan}: tp", payload_bytes, **options)


@pytest.mark.parametrize(
    ("name", "plan", "payload_bytes", "strategy"),
    read_rows(Path(__file__).parent / "short_rings.csv", str, str, int, str),
)
def test_phases_are_those_of_the_compiler(name, plan, payload_bytes, strategy) -> None:
    assert all_reduce(name, payload_bytes, plan=plan).strategy == strategy


@pytest.mark.parametrize(("payload_bytes", "n_shards"), [(131_072, 2 * 3), (524_288, 3 * 3)])
def test_a_phase_sends_the_array_of_its_color_or_shards_of_it(payload_bytes, n_shards) -> None:
    """4x4 without wrap: of 128 KiB, two colors of 64 KiB, of which the end of a line receives three.

    2 phases x 3 x 65,536 B / 4.5e10 B/s = 8.74 us, longer than 2 x 2 steps of 1 us. 512 KiB takes steps
    along one dimension, 2 x 3 shards of 64 KiB as in a reduce-scatter; then one shot of 64 KiB.
    """
    time = all_reduce("v5e:4x4", payload_bytes, constants=spec_constants(chip_of("v5e")))
    assert time.seconds == pytest.approx(n_shards * 65_536 / 4.5e10)


@table
def test_a_small_all_reduce_takes_the_launch_and_its_steps(name, payload_bytes, n_steps) -> None:
    """n // 2 steps of 1 us in one shot, or two phases of one; v5p profiles have 6.6 to 9.0 us."""
    seconds = all_reduce(name, payload_bytes).seconds
    launch_s = constants_of(parse_topology(name).chip).rates.latency_s
    assert seconds == pytest.approx(launch_s + n_steps * 1e-6)
    assert name != "v5p:2x2x1" or 6e-6 < seconds < 9e-6


def test_sparse_cores_take_longer_steps() -> None:
    """Issue 71: 124, 130 and 162 us for 2, 4 and 8 MiB over 32 devices; below 64 KiB the core reduces.

    Over 2x2 chips each leg is one step to a neighbor: a decode step of Qwen3.5-397B leaves some 16 us for each of
    its 121 all-reduces of 64 KiB.
    """
    assert all_reduce("tpu7x:2x2x4", 65_535).seconds < 3e-5
    assert all_reduce("tpu7x:2x2x4", 4 << 20).seconds == pytest.approx(130e-6, rel=0.15)
    assert all_reduce("tpu7x:2x2x4", 2 << 20).seconds == pytest.approx(124e-6, rel=0.2)
    small, offloaded = (all_reduce("tpu7x:2x2x1", n << 10).seconds for n in (32, 64))
    assert small < offloaded < 20e-6
    assert all_reduce("tpu7x:2x2x4", 8 << 20).seconds == pytest.approx(162e-6, rel=0.25)


def test_a_server_that_keeps_all_reduces_on_the_core_has_short_rings_up_to_2_mib() -> None:
    """Compiled for tpu7x:2x2x1 with the offload from 64 MiB on: RotatedPincerShortEmitter from 64 KiB to 2 MiB."""
    topology = parse_topology("tpu7x:2x2x1")
    by_default = constants_of(topology.chip)
    geometry = geometry_of(topology, (tuple(range(8)),))
    for kind, is_short in ((Kind.ALL_REDUCE, True), (Kind.ALL_GATHER, False)):
        for payload in (64 << 10, 1 << 20, 2 << 20):
            offloaded, on_core = (
                fastest(collective_lines(kind, geometry, constants), payload)
                for constants in (by_default, replace(by_default, offloads_from=64 << 20))
            )
            assert on_core.seconds(payload) < offloaded.seconds(payload)
            assert on_core.strategy.startswith("short") is is_short


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v5p:4x4x4", "tpu7x:2x2x1", "v4:2x2x1"])
def test_every_payload_has_a_strategy(name: str) -> None:
    topology = parse_topology(name)
    geometry = geometry_of(topology, (tuple(range(topology.n_devices)),))
    lines = collective_lines(Kind.ALL_REDUCE, geometry, constants_of(topology.chip))
    edges = {edge for line in lines for edge in line.payloads if edge < float("inf")}
    for payload in {0, 1} | {int(edge) + d for edge in edges for d in (-1, 0, 1) if edge + d >= 0}:
        assert min(line.seconds(payload) for line in lines) < 1e-2
