"""Times from a profile that calibrate wrote, instead of published figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import words_of

from meshscope.cost.rates import rates_of
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect.constants import constants_of
from meshscope.hardware.interconnect.profile import (
    ChipProfile,
    MatrixRate,
    MemoryRate,
    save_profile,
)

pytestmark = pytest.mark.usefixtures("here")


def written(chip: str, latency_s: float = 1.0) -> ChipProfile:
    """The profile of CHIP.json, in which a collective takes at least so long."""
    rates = replace(constants_of(chip_of("v6e")).rates, latency_s=latency_s)
    profile = ChipProfile(
        chip=chip,
        topology=f"{chip}:8" if chip == "cpu" else f"{chip}:2x4",
        plan="tp=8",
        constants=replace(constants_of(chip_of("v6e")), chip=chip, by_kind=(), rates=rates),
        fits=(),
        points=(),
        matrices=(MatrixRate(n=1024, dtype="bf16", flops_per_s=2e10),),
        memory=(MemoryRate(array_bytes=1 << 26, bytes_per_s=5e9),),
        conditions={},
    )
    save_profile(profile, Path(f"{chip}.json"), force=True)
    return profile


def _time(meshscope, line: str) -> dict:
    status, out, err = meshscope(*words_of(line), "--json")
    assert status == 0, err
    return json.loads(out)["time"]


def test_collectives_cost_what_the_profile_says(meshscope) -> None:
    """A floor of one second a collective, of which there are six in a step of two layers."""
    written("v6e")
    line = "predict meta-llama/Llama-3.1-8B $tp8 --layers 2"
    published, measured = (
        _time(meshscope, one)["steps"]["decode"] for one in (line, f"{line} --profile v6e.json")
    )
    assert published["exposed_s"] < 1e-3
    assert 6 <= measured["exposed_s"] < 6.01
    assert measured["compute_s"] == published["compute_s"]


def test_chip_without_published_peaks_has_times_by_its_profile(meshscope) -> None:
    profile = written("cpu", 1e-3)
    line = "predict Qwen/Qwen3-32B --topology cpu:8 --plan tp=8 --layers 2"
    assert _time(meshscope, line)["ttft_s"] is None
    assert _time(meshscope, f"{line} --profile cpu.json")["steps"]["prefill"]["compute_s"] > 0
    assert rates_of(chip_of("cpu"), profile).flops_per_s == 2e10


def test_profile_of_another_chip_is_refused(meshscope) -> None:
    written("cpu")
    status, _, err = meshscope(*words_of("$predict --profile cpu.json"))
    assert status == 1
    assert "is a profile of 'cpu', and the topology has 'v6e'" in err
