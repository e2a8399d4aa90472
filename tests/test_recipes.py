"""What CONTRIBUTING says of additions holds: the files that they take."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = """
  "v9": {
   "kind": "tpu", "devices_per_chip": 1, "n_grid_dims": 2, "chips_per_host": 4, "hbm_gib": 64,
   "hbm_bytes_per_s": 3.0e12, "bf16_flops_per_s": 1.8e15, "link_bytes_per_s": 1.2e11, "wraps_from": 16,
   "pod_chips": 256, "clock_hz": 2.0e9, "mxu_dim": 256, "device_kinds": ["tpu v9"],
   "narrow_dtypes": ["s8"], "narrow_speedup": 2.0, "source": "a test"
  },"""


METRIC = '''

def largest_operation(events: pl.DataFrame) -> pl.DataFrame:
    """The largest payload of one operation.

    Source: a test.
    """
    return events.select(pl.col("payload_bytes").max())
'''
ROW = """    Metric("largest_operation", "Largest operation", "bytes",
     volume.largest_operation, lambda run: volume.largest_operation(_events(run))),
)  # fmt: skip
"""


class Clone:
    """A copy of the package in which a recipe can be followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("src/meshscope", "tools"):
            shutil.copytree(ROOT / part, folder / part)

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces text that a file of the package has once."""
        path = self.folder / "src/meshscope" / name
        assert path.read_text("utf-8").count(old) == 1
        path.write_text(path.read_text("utf-8").replace(old, new))

    def output(self, *words: str) -> str:
        environment = {"PYTHONPATH": str(self.folder / "src"), "PATH": "", "COLUMNS": "100"}
        options: dict[str, Any] = {"cwd": self.folder, "env": environment, "text": True}
        return subprocess.run(
            [sys.executable, *words], capture_output=True, check=True, **options
        ).stdout

    def changed(self) -> set[str]:
        """The files of the package that differ from the repository's."""
        return {
            path.name
            for path in (self.folder / "src").rglob("*.*")
            if path.suffix != ".pyc"
            and path.read_bytes() != (ROOT / path.relative_to(self.folder)).read_bytes()
        }


@pytest.mark.slow
def test_a_chip_is_one_entry_and_its_fitted_constants(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    clone.edit("hardware/chips.json", '"chips": {', '"chips": {' + ENTRY)
    clone.output("tools/fit_collectives.py")
    ask = ("predict", "Qwen/Qwen3-8B", "--topology", "v9-4", "--plan", "tp=4", "--prompt", "8192")
    times = [
        json.loads(clone.output("-m", "meshscope", *ask, "--weight-dtype", dtype, "--json"))["time"]
        for dtype in ("bf16", "int8_w8a8")
    ]
    assert 0 < times[1]["ttft_s"] < times[0]["ttft_s"]
    assert "v9" in clone.output("-m", "meshscope", "topologies")
    assert clone.changed() == {"chips.json", "fitted_constants.json"}


@pytest.mark.slow
def test_a_metric_is_a_function_and_a_row(tmp_path: Path) -> None:
    """Text, JSON and report have it."""
    clone = Clone(tmp_path)
    clone.edit("analysis/catalog.py", ")  # fmt: skip\n", ROW)
    volume = tmp_path / "src/meshscope/analysis/volume.py"
    volume.write_text(volume.read_text("utf-8") + METRIC)
    ask = ("predict", "Qwen/Qwen3-8B", "--topology", "v6e-4", "--plan", "tp=4", "--out", "run")
    clone.output("-m", "meshscope", *ask)
    assert "Largest operation" in clone.output(
        "-m", "meshscope", "show", "run", "--metrics", "--full"
    )
    document = json.loads(clone.output("-m", "meshscope", "show", "run", "--metrics", "--json"))
    rows = document["metrics"]["largest_operation"]["rows"]
    assert rows == [{"payload_bytes": 128 * 4096 * 2}]
    clone.output("-m", "meshscope", "report", "run", "--out", "report.html")
    assert "Largest operation" in (tmp_path / "report.html").read_text("utf-8")
    assert clone.changed() == {"catalog.py", "volume.py"}


SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"


@pytest.mark.slow
def test_a_family_is_its_rows(tmp_path: Path) -> None:
    """Without the rows of Llama 4, it is refused and others are predicted; with them, it is as before."""
    clone = Clone(tmp_path)
    model = tmp_path / "src/meshscope/model"
    rest = ("--topology", "v6e-8", "--plan", "tp=8", "--layers", "4", "--json")
    before = clone.output("-m", "meshscope", "predict", SCOUT, *rest)
    stored = {path: path.read_text("utf-8") for path in model.glob("*.*")}

    rows = model / "families.toml"
    n_rows = r"(?m)^\[(?:families\.llama4_text|experts\.llama4)\]\n(?:.+\n)+\n?"
    text, n = re.subn(n_rows, "", stored[rows])
    rows.write_text(text)
    names = model / "names.toml"
    names.write_text(re.sub(r"(?m)^.*'\^meta-llama/llama-4-.*\n", "", stored[names]))
    catalog = json.loads(stored[model / "catalog.json"])
    catalog = {
        part: {
            name: entry
            for name, entry in entries.items()
            if "llama4" not in {name, entry.get("like")}
        }
        if part in {"families", "models"}
        else entries
        for part, entries in catalog.items()
    }
    (model / "catalog.json").write_text(json.dumps(catalog))
    assert n == 2
    assert clone.changed() == {"families.toml", "names.toml", "catalog.json"}
    assert json.loads(clone.output("-m", "meshscope", "predict", "Qwen/Qwen3-8B", *rest))["totals"]
    assert "llama-4" not in clone.output("-m", "meshscope", "models").lower()
    with pytest.raises(subprocess.CalledProcessError) as refused:
        clone.output("-m", "meshscope", "predict", SCOUT, *rest)
    assert "is not in the catalog" in refused.value.stderr

    for path, content in stored.items():
        path.write_text(content)
    assert clone.changed() == set()
    assert clone.output("-m", "meshscope", "predict", SCOUT, *rest) == before
