"""`run --frontend torchxla` on virtual CPU devices: torch_xla's own runtime and profiler, read as any other.

Nothing here says how long anything takes; a profile of torch_xla on CPU tells no devices either.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made import TINY

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")

from meshscope.analysis.join import compare
from meshscope.events.enums import Phase, Source
from meshscope.store.read import read_run

SET_OUTSIDE = {"XLA_FLAGS", "JAX_PLATFORMS", "PJRT_DEVICE", "CPU_NUM_DEVICES", "COLUMNS"}
MIXTURE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
ASK = ("--batch", "4", "--prompt", "8", "--output", "3", "--profiled-steps", "2")


def ran(config: dict[str, Any], plan: str, folder: Path) -> tuple[Path, dict[str, Any], str]:
    """The run folder, its document, and its standard error."""
    (folder / "small.json").write_text(json.dumps(config))
    options = ("--frontend", "torchxla", "--topology", "cpu:4", "--plan", plan, *ASK)
    command = [sys.executable, "-m", "meshscope", "run", "small.json", *options]
    done = subprocess.run(
        [*command, "--repeats", "1", "--out", "r", "--json"],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in SET_OUTSIDE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "r", json.loads(done.stdout), done.stderr


def test_predicted_compiled_and_measured_agree(tmp_path: Path) -> None:
    folder, document, _ = ran(TINY, "dp=2,tp=2", tmp_path)

    run = read_run(folder)
    for source in (Source.COMPILED, Source.MEASURED):
        comparison = compare(run.rows_of(Source.PREDICTED), run.rows_of(source))
        assert comparison.is_exact
        assert comparison.matches
    assert run.measured.n_profiled_steps == {Phase.PREFILL: 1, Phase.DECODE: 2}
    assert [text[:40] for text in run.measured.findings if "no device number" not in text] == []
    assert run.measured.loads == ()
    memory = run.memory[Source.COMPILED]
    held = memory.weights_bytes + memory.kv_cache_bytes
    assert held < memory.total_bytes < 2 * held  # the new cache takes the memory of the old one
    assert not (folder / "dumps").exists()
    assert document["verdict"]["verdict"] == "equal"


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        pytest.param(TINY, "tp=4,sp", id="sp"),  # a permute between two of the four devices
        pytest.param(MIXTURE, "dp=4,ep=4", id="ep", marks=pytest.mark.matrix),
        pytest.param(TINY, "pp=2,tp=2", id="pp", marks=pytest.mark.matrix),
        pytest.param(TINY, "cp=2,tp=2", id="cp", marks=pytest.mark.matrix),
    ],
)
def test_what_is_compiled_is_measured(config: dict[str, Any], plan: str, tmp_path: Path) -> None:
    """Row by row: no event is lost, none unexplained; the run states each difference from the prediction."""
    folder, _, _ = ran(config, plan, tmp_path)
    run = read_run(folder)
    comparison = compare(run.rows_of(Source.COMPILED), run.rows_of(Source.MEASURED))
    assert comparison.matches
    assert comparison.is_exact, [str(match) for match in comparison.matches]
