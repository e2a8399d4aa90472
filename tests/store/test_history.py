"""How long the next compilation takes is told by the run beside it that is most alike."""

import json
import os
from pathlib import Path
from typing import Any

from meshscope.events.enums import Phase
from meshscope.store.folder import MANIFEST, TOOL
from meshscope.store.history import earlier_compile

ASKED: dict[str, Any] = {
    "model": {"name": "m", "layers": ["attn+mlp"] * 4, "hidden": 8},
    "engine": "meshscope",
    "program": {"frontend": "jax", "partitioner": "manual"},
    "layers_are": "scanned",
    "topology": "v6e:2x4",
    "plan": "tp=8",
    "workload": {"batch": 1, "prompt": 128},
    "kernels": {},
}
SECONDS = {"prefill.compile": 8.0, "prefill.read": 2.0, "decode.compile": 5.0}


def keep(folder: Path, name: str, *, age_s: float = 0.0, **other: Any) -> None:
    """The manifest of a run, the experiment with other values."""
    told = {"tool": TOOL, "source": "compiled", "seconds": SECONDS, "experiment": ASKED | other}
    told |= {key: other[key] for key in ("source", "seconds") if key in other}
    (folder / name).mkdir()
    path = folder / name / MANIFEST
    path.write_text(json.dumps(told))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))


def test_the_steps_of_a_phase_are_added(tmp_path: Path) -> None:
    keep(tmp_path, "a")
    earlier = earlier_compile(ASKED, tmp_path)
    assert earlier is not None
    assert (earlier.name, earlier.phase_s) == ("a", {Phase.PREFILL: 10.0, Phase.DECODE: 5.0})


def test_the_run_that_is_most_alike_tells_then_the_newest(tmp_path: Path) -> None:
    keep(tmp_path, "other-plan", plan="tp=4,dp=2")
    keep(tmp_path, "old", age_s=50)
    keep(tmp_path, "new", age_s=10)
    found = earlier_compile(ASKED, tmp_path)
    assert found is not None
    assert found.name == "new"
    found = earlier_compile(ASKED | {"plan": "tp=4,dp=2"}, tmp_path)
    assert found is not None
    assert found.name == "other-plan"


def test_another_model_or_program_tells_nothing(tmp_path: Path) -> None:
    keep(tmp_path, "model", model={"name": "other", "layers": ["attn+mlp"] * 4})
    keep(tmp_path, "layers", model={"name": "m", "layers": ["attn+mlp"] * 5})
    keep(tmp_path, "auto", program={"frontend": "jax", "partitioner": "auto"})
    keep(tmp_path, "unrolled", layers_are="unrolled")
    keep(tmp_path, "predicted", source="predicted")
    keep(tmp_path, "nothing-timed", seconds={})
    keep(tmp_path, "words", seconds={"prefill.compile": "long"})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MANIFEST).write_bytes(b"{")
    assert earlier_compile(ASKED, tmp_path) is None
    assert earlier_compile(ASKED, tmp_path / "missing") is None
