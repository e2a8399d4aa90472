"""Times from a profile that calibrate wrote, instead of published figures."""

import json
from dataclasses import replace

import pytest

from meshscope.cost.rates import rates_of
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect import constants_of
from meshscope.hardware.interconnect.profile import (
    ChipProfile,
    MatrixRate,
    MemoryRate,
    save_profile,
)

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")


def _profile(chip: str, latency_s: float) -> ChipProfile:
    known = constants_of(chip_of("v6e"))
    constants = replace(
        known, chip=chip, by_kind=(), rates=replace(known.rates, latency_s=latency_s)
    )
    return ChipProfile(
        chip=chip,
        topology=f"{chip}:8" if chip == "cpu" else f"{chip}:2x4",
        plan="tp=8",
        constants=constants,
        fits=(),
        points=(),
        matrices=(MatrixRate(n=1024, dtype="bf16", flops_per_s=2e10),),
        memory=(MemoryRate(array_bytes=1 << 26, bytes_per_s=5e9),),
        conditions={},
    )


@pytest.fixture
def written(tmp_path):
    def write(chip: str, latency_s: float = 1.0):
        path = tmp_path / f"{chip}.json"
        save_profile(_profile(chip, latency_s), path, force=True)
        return path

    return write


def _steps(out: str) -> dict:
    return json.loads(out)["time"]["steps"]


def test_collectives_cost_what_the_profile_says(meshscope, written):
    _, published, _ = meshscope("predict", *ASK, "--json")
    _, measured, _ = meshscope("predict", *ASK, "--profile", str(written("v6e")), "--json")
    # A floor of one second a collective, of which there are six in a step of two layers.
    assert _steps(published)["decode"]["exposed_s"] < 1e-3
    assert 6 <= _steps(measured)["decode"]["exposed_s"] < 6.01
    assert _steps(measured)["decode"]["compute_s"] == _steps(published)["decode"]["compute_s"]


def test_a_run_is_shown_anew_by_a_profile(meshscope, written, tmp_path):
    kept = str(tmp_path / "kept")
    meshscope("predict", *ASK, "--out", kept)
    _, out, _ = meshscope("show", kept, "--profile", str(written("v6e")), "--json")
    assert _steps(out)["decode"]["exposed_s"] >= 6


def test_chip_without_published_peaks_has_times_by_its_profile(meshscope, written):
    ask = ("predict", ASK[0], "--topology", "cpu:8", "--plan", "tp=8", "--layers", "2", "--json")
    _, without, _ = meshscope(*ask)
    assert json.loads(without)["time"]["ttft_s"] is None
    _, out, _ = meshscope(*ask, "--profile", str(written("cpu", 1e-3)))
    steps = _steps(out)
    assert steps["prefill"]["compute_s"] > 0
    assert rates_of(chip_of("cpu"), _profile("cpu", 1.0)).flops_per_s == 2e10


def test_profile_of_another_chip_is_refused(meshscope, written):
    status, _, err = meshscope("predict", *ASK, "--profile", str(written("cpu")))
    assert status == 1
    assert "is a profile of 'cpu', and the topology has 'v6e'" in err
