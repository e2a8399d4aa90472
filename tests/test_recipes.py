"""What CONTRIBUTING says of additions holds: the files that they take."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = """
  "v9": {
   "kind": "tpu", "devices_per_chip": 1, "n_grid_dims": 2, "chips_per_host": 4, "hbm_gib": 64,
   "hbm_bytes_per_s": 3.0e12, "bf16_flops_per_s": 1.8e15, "link_bytes_per_s": 1.2e11, "wraps_from": 16,
   "pod_chips": 256, "clock_hz": 2.0e9, "mxu_dim": 256, "device_kinds": ["tpu v9"],
   "narrow_dtypes": ["s8"], "narrow_speedup": 2.0, "cloud": {"kubernetes": "tpu-v9"}, "source": "a test"
  },"""


@pytest.mark.slow
def test_a_chip_is_one_entry_and_its_fitted_constants(tmp_path: Path) -> None:
    for folder in ("src/meshscope", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    chips = tmp_path / "src/meshscope/hardware/chips.json"
    chips.write_text(chips.read_text("utf-8").replace('"chips": {', '"chips": {' + ENTRY, 1))
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "", "COLUMNS": "100"}

    def output(*words: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    output("tools/fit_collectives.py")
    ask = ("predict", "Qwen/Qwen3-8B", "--topology", "v9-4", "--plan", "tp=4", "--prompt", "8192")
    times = [
        json.loads(output("-m", "meshscope", *ask, "--weight-dtype", dtype, "--json"))["time"]
        for dtype in ("bf16", "int8_w8a8")
    ]
    assert 0 < times[1]["ttft_s"] < times[0]["ttft_s"]
    assert "v9" in output("-m", "meshscope", "topologies")
    before, after = (
        {
            file.relative_to(top): file.read_bytes()
            for file in top.rglob("*.*")
            if file.suffix != ".pyc"
        }
        for top in (ROOT / "src", tmp_path / "src")
    )
    assert {path.name for path in after if after[path] != before.get(path)} == {
        "chips.json",
        "fitted_constants.json",
    }
