"""`meshscope calibrate` on virtual CPU devices: what it measures and writes, not how fast it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made import UNOPTIMIZED

from meshscope.hardware.interconnect.profile import load_profile


def meshscope(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshscope", "calibrate", *arguments]
    environment = os.environ | {"XLA_FLAGS": UNOPTIMIZED}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of two devices with eight sizes, enough to fit each kind by itself."""
    path = tmp_path_factory.mktemp("calibrated") / "cpu.json"
    sizes = ("--max-bytes", "2097152", "--repeats", "3")
    done = meshscope("--topology", "cpu:2", *sizes, "--out", str(path), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["profile"] == str(path)
    return path


def test_every_kind_is_measured_up_to_the_largest(measured: Path) -> None:
    profile = load_profile(measured)
    by_kind: dict[str, list[int]] = {}
    for point in profile.points:
        by_kind.setdefault(point["kind"], []).append(point["payload_bytes"])
        assert point["seconds"] > 0
    assert sorted(by_kind) == [
        *("all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter"),
    ]
    assert all((len(sizes), max(sizes)) == (8, 2097152) for sizes in by_kind.values())
    assert min(by_kind["all_reduce"]) == 4


def test_matrices_and_memory_are_measured(measured: Path) -> None:
    profile = load_profile(measured)
    assert profile.flops_per_s is not None
    assert profile.memory_bytes_per_s is not None
    assert profile.conditions["versions"]["jax"]
    assert len(profile.conditions["devices"]) == 2


def test_a_profile_is_not_replaced_without_force(measured: Path) -> None:
    before = measured.read_bytes()
    done = meshscope("--topology", "cpu:2", "--out", str(measured))
    assert (done.returncode, "--force" in done.stderr) == (1, True)
    assert measured.read_bytes() == before


def test_a_missing_platform_is_one_message(tmp_path: Path) -> None:
    done = meshscope("--topology", "h100:2", "--out", str(tmp_path / "x.json"), "--budget", "1")
    assert done.returncode == 1
    assert "needs gpu devices" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("place", ["file.txt/x.json", "."])
def test_an_unwritable_output_is_refused_before_measuring(place: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("", encoding="utf-8")
    done = meshscope("--topology", "cpu:2", "--out", str(tmp_path / place), "--force")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "is not a writable folder" in line or "cannot be written" in line


def test_one_device_has_rates_and_no_collectives(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    done = meshscope("--topology", "cpu:1", "--repeats", "1", "--out", str(path), "--full")
    assert done.returncode == 0, done.stderr
    profile = load_profile(path)
    assert (profile.points, profile.fits) == ((), ())
    assert profile.flops_per_s is not None
