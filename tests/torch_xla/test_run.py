"""`run --frontend torchxla` on virtual CPU devices: programs that torch_xla traces, on JAX's runtime, profiled as any other.

Nothing here says how long anything takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from made import TINY, UNOPTIMIZED

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")

from meshscope.analysis.join import compare
from meshscope.events.enums import Phase, Source
from meshscope.store.read import read_run

SET_OUTSIDE = {"JAX_PLATFORMS", "PJRT_DEVICE", "CPU_NUM_DEVICES", "COLUMNS"}
MIXTURE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
ASK = ("--batch", "4", "--prompt", "8", "--output", "3", "--profiled-steps", "2")


def started(folder: Path, model: str, plan: str, *options: str) -> subprocess.Popen[str]:
    """A run in the folder, as a process."""
    words = ("--frontend", "torchxla", "--topology", "cpu:4", "--plan", plan, *ASK, *options)
    return subprocess.Popen(
        [sys.executable, "-m", "meshscope", "run", model, *words, "--repeats", "1", "--json"],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in SET_OUTSIDE}
        | {"XLA_FLAGS": UNOPTIMIZED},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(config: dict[str, Any], plan: str, folder: Path) -> tuple[Path, dict[str, Any], str]:
    """The run folder, its document, and its standard error."""
    (folder / "small.json").write_text(json.dumps(config))
    process = started(folder, "small.json", plan, "--out", "r")
    document, log = process.communicate()
    assert process.returncode == 0, log
    return folder / "r", json.loads(document), log


def test_predicted_compiled_and_measured_agree(tmp_path: Path) -> None:
    folder, document, _ = ran(TINY, "tp=4,sp", tmp_path)

    run = read_run(folder)
    for source in (Source.COMPILED, Source.MEASURED):
        comparison = compare(run.rows_of(Source.PREDICTED), run.rows_of(source))
        assert comparison.is_exact
        assert comparison.matches
    assert run.measured.n_profiled_steps == {Phase.PREFILL: 1, Phase.DECODE: 2}
    assert run.measured.findings == ()
    assert {load.device for load in run.measured.loads} == {0, 1, 2, 3}
    assert all(cost.flops for cost in run.measured.costs)
    memory = run.memory[Source.COMPILED]
    held = memory.weights_bytes + memory.kv_cache_bytes
    assert held < memory.total_bytes < 2 * held  # the new cache takes the memory of the old one
    assert document["verdict"]["verdict"] == "equal"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("config", "plan"),
    [(TINY, "dp=2,tp=2"), (MIXTURE, "dp=4,ep=4"), (TINY, "pp=2,tp=2"), (TINY, "cp=2,tp=2")],
    ids=["dp", "ep", "pp", "cp"],
)
def test_what_is_compiled_is_measured(config: dict[str, Any], plan: str, tmp_path: Path) -> None:
    """Row by row: no event is lost, none unexplained, and the prediction is exact."""
    folder, document, _ = ran(config, plan, tmp_path)
    run = read_run(folder)
    comparison = compare(run.rows_of(Source.COMPILED), run.rows_of(Source.MEASURED))
    assert comparison.matches
    assert comparison.is_exact, [str(match) for match in comparison.matches]
    assert document["verdict"]["verdict"] == "equal"


def test_two_processes_run_a_pipeline_from_a_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**TINY)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "weights")
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--checkpoint", "weights", "--coordinator", address, "--n-processes", "2")
    processes = [
        started(
            tmp_path, "weights", "pp=2,tp=2", *options, "--process-id", str(i), "--out", f"r{i}"
        )
        for i in range(2)
    ]
    (document, _), _ = ends = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert json.loads(document)["verdict"]["verdict"] == "equal"
    run = read_run(tmp_path / "r0")
    assert not (tmp_path / "r1").exists()
    assert len(run.measured.loads) > 0
    assert all(cost.flops for cost in run.measured.costs)
