"""Fits of points with known constants, published points, and stored profiles."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from meshscope.analysis.samples import KINDS, TimedCollective, read_points
from meshscope.api.calibrate import profile_text
from meshscope.backends.calibrate.calibrate import (
    CalibrationRequest,
    published_profile,
    write_points,
)
from meshscope.backends.calibrate.fit import fit_constants
from meshscope.errors import MeshscopeError, ParseError, RunError, SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.interconnect.constants import (
    KindRates,
    LinkConstants,
    RateConstants,
    spec_constants,
)
from meshscope.hardware.interconnect.lines import collective_time
from meshscope.hardware.interconnect.profile import load_profile, save_profile
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.caches import ring_pairs
from meshscope.plans.plan import Plan, parse_plan

TORUS, PLAN = parse_topology("v6e:4x4"), parse_plan("dp=4,tp=4")
SIZES = [1 << power for power in range(4, 28, 2)]


def timed_by(
    constants: LinkConstants, topology: Topology, plan: Plan, *, noise: float = 0.0
) -> list[TimedCollective]:
    """Points as the model with these constants would time them."""
    rng = np.random.default_rng(0)
    points: list[TimedCollective] = []
    for axis in plan.mesh.names:
        for kind in KINDS:
            groups: Groups = plan.mesh.groups(axis)
            groups = ring_pairs(groups) if kind is Kind.PERMUTE else groups
            for size in SIZES:
                seconds = collective_time(
                    kind, groups=groups, payload_bytes=size, topology=topology, constants=constants
                ).seconds
                points.append(
                    TimedCollective(
                        axis=axis,
                        groups=groups,
                        kind=kind,
                        payload_bytes=size,
                        seconds=seconds * float(np.exp(noise * rng.standard_normal())),
                    )
                )
    return points


def known(topology: Topology) -> LinkConstants:
    return replace(
        spec_constants(topology.chip),
        hop_s=0.0,  # calibrated latencies include the hops
        rates=RateConstants(latency_s=2e-5, efficiency=0.8),
        by_kind=(
            KindRates(kind=Kind.ALL_REDUCE, rates=RateConstants(latency_s=3e-5, efficiency=0.6)),
        ),
    )


def test_constants_of_a_torus_are_recovered() -> None:
    fitted = fit_constants(timed_by(known(TORUS), TORUS, PLAN), TORUS, source="")
    rates = fitted.constants.rates_of
    assert rates(Kind.ALL_GATHER, 4).latency_s == pytest.approx(2e-5, rel=1e-3)
    assert rates(Kind.ALL_GATHER, 4).efficiency == pytest.approx(0.8, rel=1e-3)
    assert rates(Kind.ALL_REDUCE, 4).efficiency == pytest.approx(0.6, rel=1e-3)
    assert all(fit.largest_error_frac < 1e-3 for fit in fitted.fits)


def test_noise_becomes_the_interval() -> None:
    points = timed_by(known(TORUS), TORUS, PLAN, noise=0.1)
    spreads = fit_constants(points, TORUS, source="").constants.spreads
    # 90 % of normal errors of 0.1 are below 1.645 x 0.1; the line itself errs a little.
    assert 1.1 < spreads.short < 1.35
    assert 1.1 < spreads.long < 1.35
    assert spreads.out_of_sample >= spreads.long


def test_devices_of_one_memory_share_its_bandwidth() -> None:
    """cpu: seconds = floor + all bytes that all devices send / rate, whatever the axis."""
    topology, plan = parse_topology("cpu:8"), parse_plan("dp=2,tp=4")
    truth = LinkConstants(
        chip="cpu",
        link_bytes_per_s=None,
        links_at_once=None,
        die_bytes_per_s=None,
        host_bytes_per_s=None,
        memory_bytes_per_s=5e9,
        hop_s=0.0,
        rates=RateConstants(latency_s=5e-5, efficiency=1.0),
    )
    points = timed_by(truth, topology, plan)
    fitted = fit_constants(points, topology, source="").constants
    groups = plan.mesh.groups("dp", "tp")
    for kind in (Kind.ALL_REDUCE, Kind.ALL_TO_ALL):
        times = [
            collective_time(
                kind, groups=groups, payload_bytes=1 << 25, topology=topology, constants=constants
            )
            for constants in (truth, fitted)
        ]
        assert times[1].seconds == pytest.approx(times[0].seconds, rel=1e-3)
        assert times[1].is_extrapolated  # groups of eight were not measured
    eight = collective_time(
        Kind.ALL_REDUCE, groups=groups, payload_bytes=1 << 25, topology=topology, constants=truth
    )
    assert eight.seconds == pytest.approx(5e-5 + 8 * (2 * 7 / 8) * (1 << 25) / 5e9)


@pytest.mark.parametrize(
    ("n_points", "message"),
    [(0, "there are no points"), (3, "3 points, all below 65536 B, cannot fit a bandwidth")],
)
def test_too_few_points_are_refused(n_points: int, message: str) -> None:
    points = timed_by(known(TORUS), TORUS, PLAN)[:n_points]
    with pytest.raises(SpecError, match=message):
        fit_constants(points, TORUS, source="")


def test_a_few_points_of_a_cpu_give_a_latency_in_seconds() -> None:
    """Two sizes of each kind, as a short budget leaves them."""
    topology, plan = parse_topology("cpu:4"), parse_plan("tp=4")
    groups = plan.mesh.groups("tp")
    of_kind = dict.fromkeys(KINDS, groups) | {Kind.PERMUTE: ring_pairs(groups)}
    points = [
        TimedCollective(
            axis="tp", groups=of_kind[kind], kind=kind, payload_bytes=n_bytes, seconds=seconds
        )
        for kind in KINDS
        for n_bytes, seconds in ((16, 2e-4), (1 << 17, 1e-3))
    ]
    fitted = fit_constants(points, topology, source="")
    assert fitted.constants.rates.latency_s == pytest.approx(2e-4)


def test_times_that_fall_with_bytes_are_refused() -> None:
    points = [
        replace(point, seconds=1e-3 / (1 + point.payload_bytes))
        for point in timed_by(known(TORUS), TORUS, PLAN)
    ]
    with pytest.raises(SpecError, match="may be negative"):
        fit_constants(points, TORUS, source="")


def test_a_stored_profile_is_read_unchanged(tmp_path: Path) -> None:
    points = timed_by(known(TORUS), TORUS, PLAN)
    write_points(points, "v6e", tmp_path / "points.csv")
    read = read_points(tmp_path / "points.csv", TORUS, PLAN.mesh)
    assert [p.groups for p in read.points] == [p.groups for p in points]
    profile = published_profile(read, TORUS, source="here")
    save_profile(profile, tmp_path / "v6e.json", force=False)
    assert load_profile(tmp_path / "v6e.json").constants == profile.constants
    assert load_profile(tmp_path / "v6e.json").fits == profile.fits
    with pytest.raises(RunError, match=r"exists\. Use --force"):
        save_profile(profile, tmp_path / "v6e.json", force=False)


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 0}', "cut", "less", "\x00"])
def test_a_damaged_profile_is_one_message(damage: str, tmp_path: Path) -> None:
    fitted = fit_constants(timed_by(known(TORUS), TORUS, PLAN), TORUS, source="")
    path = tmp_path / "p.json"
    read = read_points(_points_file(tmp_path), TORUS, PLAN.mesh)
    save_profile(published_profile(read, TORUS, source=""), path, force=False)
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    del document["constants"]["rates"]
    damaged = {"cut": text[: len(text) // 2], "less": json.dumps(document)}.get(damage, damage)
    path.write_text(damaged, encoding="utf-8")
    with pytest.raises(ParseError, match=r"p\.json: .*(Make it|profile)"):
        load_profile(path)
    assert fitted.constants


def _points_file(folder: Path) -> Path:
    path = folder / "points.csv"
    path.write_text(
        "chip,kind,group_size,payload_bytes,seconds\n"
        "v6e,all_reduce,4,4,7e-6\nv6e,all_reduce,4,67108864,6e-4\nv5p,all_reduce,4,4,7e-6\n",
        encoding="utf-8",
    )
    return path


def test_unusable_rows_are_reported(tmp_path: Path) -> None:
    path = _points_file(tmp_path)
    with path.open("a", encoding="utf-8") as file:
        file.write(
            "v6e,all_reduce,4,64,\nv6e,sort,4,64,1e-6\nv6e,all_reduce,3,64,1e-6\nno,x,1,1,1\n"
        )
    read = read_points(path, parse_topology("v6e:4x4"), parse_plan("tp=16").mesh)
    assert (len(read.points), read.n_of_other_chips) == (2, 1)
    for reason, said in zip(
        read.skipped,
        (
            "got `str` - at `$.seconds`",
            "Invalid enum value 'sort'",
            "groups of 3 do not divide 'v6e:4x4' of 16 devices",
            "unknown chip 'no'. Known",
        ),
        strict=True,
    ):
        assert said in reason


# Published timings, with the source of each in its first column; tools/published_collectives.py has the
# full references.
PUBLISHED = Path(__file__).parent / "data" / "published_collectives.csv"


@pytest.mark.parametrize(
    ("slice_name", "plan", "n_points", "share"),
    [
        ("v5p:2x2x1", "tp=4", 10, 1.0),
        ("v6e:2x4", "dp=2,tp=4", 1, 0.98),
        ("tpu7x:2x2x1", "dp=4,tp=2", 6, 0.87),
    ],
)
def test_published_points_make_a_profile(slice_name, plan, n_points, share) -> None:
    topology = parse_topology(slice_name)
    read = read_points(PUBLISHED, topology, parse_plan(plan).mesh)
    profile = published_profile(read, topology, source="")
    assert len(profile.points) == n_points
    assert profile.constants.rates.efficiency == pytest.approx(share, abs=0.03)
    assert 4e-6 < profile.constants.rates.latency_s < 9e-6


def test_rates_are_those_of_nccl_tests() -> None:
    """PERFORMANCE.md: all-reduce of S over n in t: algbw S/t, busbw S/t x 2(n-1)/n."""
    point = TimedCollective(
        axis="tp",
        groups=(tuple(range(8)),),
        kind=Kind.ALL_REDUCE,
        payload_bytes=8_000_000,
        seconds=1e-3,
    )
    assert (point.algbw_bytes_per_s, point.busbw_bytes_per_s) == (8e9, 14e9)


def test_a_plan_of_fewer_devices_than_the_slice_is_refused() -> None:
    with pytest.raises(MeshscopeError, match="is for 4 devices"):
        CalibrationRequest(topology="cpu:8", plan="tp=4", max_bytes=1024, budget_s=1.0, repeats=1)


@pytest.mark.parametrize(
    ("n_points", "errors"), [(1, r"1\+0 +unknown +unknown"), (2, r"2\+0 +[\d.]+% +[\d.]+%")]
)
def test_a_line_through_a_single_point_has_no_error(n_points, errors, tmp_path) -> None:
    timed = timed_by(known(TORUS), TORUS, PLAN)
    large = [point for point in timed if point.payload_bytes >= 1 << 20]
    write_points(large[:n_points], "v6e", tmp_path / "points.csv")
    read = read_points(tmp_path / "points.csv", TORUS, PLAN.mesh)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(*profile_text(published_profile(read, TORUS, source="here")))
    assert re.search(errors, shown.get())


@pytest.mark.parametrize("max_bytes", [0, 3])
def test_payloads_below_one_element_are_refused(max_bytes: int) -> None:
    with pytest.raises(SpecError, match=f"--max-bytes {max_bytes} is less than one element"):
        CalibrationRequest(
            topology="cpu:2", plan="tp=2", max_bytes=max_bytes, budget_s=1.0, repeats=1
        )
