"""Fits of points with known constants, and stored profiles."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshscope.analysis.samples import KINDS, TimedCollective
from meshscope.backends.calibrate.calibrate import CalibrationRequest
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
from meshscope.hardware.interconnect.profile import ChipProfile, load_profile, save_profile
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
    [
        (0, "there are no points"),
        (5, "5 sizes of a collective are too few .* Use a larger --budget"),
    ],
)
def test_too_few_points_are_refused(n_points: int, message: str) -> None:
    points = timed_by(known(TORUS), TORUS, PLAN)[:n_points]
    with pytest.raises(SpecError, match=message):
        fit_constants(points, TORUS, source="")


def test_times_that_fall_with_bytes_are_refused() -> None:
    points = [
        replace(point, seconds=1e-3 / (1 + point.payload_bytes))
        for point in timed_by(known(TORUS), TORUS, PLAN)
    ]
    with pytest.raises(SpecError, match="may be negative"):
        fit_constants(points, TORUS, source="")


def _profile() -> ChipProfile:
    fitted = fit_constants(timed_by(known(TORUS), TORUS, PLAN), TORUS, source="here")
    return ChipProfile(
        chip="v6e",
        topology=TORUS.name,
        plan="",
        constants=fitted.constants,
        fits=fitted.fits,
        points=(),
        matrices=(),
        memory=(),
        conditions={},
    )


def test_a_stored_profile_is_read_unchanged(tmp_path: Path) -> None:
    profile = _profile()
    save_profile(profile, tmp_path / "v6e.json", force=False)
    assert load_profile(tmp_path / "v6e.json").constants == profile.constants
    assert load_profile(tmp_path / "v6e.json").fits == profile.fits
    with pytest.raises(RunError, match=r"exists\. Use --force"):
        save_profile(profile, tmp_path / "v6e.json", force=False)


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 0}', "cut", "less", "\x00"])
def test_a_damaged_profile_is_one_message(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(_profile(), path, force=False)
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    del document["constants"]["rates"]
    damaged = {"cut": text[: len(text) // 2], "less": json.dumps(document)}.get(damage, damage)
    path.write_text(damaged, encoding="utf-8")
    with pytest.raises(ParseError, match=r"p\.json: .*(Make it|profile)"):
        load_profile(path)


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


@pytest.mark.parametrize("max_bytes", [0, 3])
def test_payloads_below_one_element_are_refused(max_bytes: int) -> None:
    with pytest.raises(SpecError, match=f"--max-bytes {max_bytes} is less than one element"):
        CalibrationRequest(
            topology="cpu:2", plan="tp=2", max_bytes=max_bytes, budget_s=1.0, repeats=1
        )
