"""No compiled step transposes or copies an expert's weights or the embedding table."""

from dataclasses import replace
from pathlib import Path

import pytest
from compared import compiled
from made import experiment_with

from meshscope.model.config import read_model
from meshscope.plans.program import Loop, Program
from meshscope.readers.hlo.parse import read_hlo

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

EXPERT_COLUMNS = 360  # of gpt-oss on one of eight devices: they do not fill tiles of 128


def test_narrow_experts_are_read_as_stored(tmp_path: Path) -> None:
    """A layer of the model with a quarter of its experts and of its vocabulary."""
    model = read_model("openai/gpt-oss-20b")
    assert model.moe.ffn // 8 == EXPERT_COLUMNS
    model = replace(model, moe=replace(model.moe, n_experts=8), vocab=model.vocab // 4)
    options = {"batch": 8, "prompt": 128, "n_layers": 1, "program": Program(loop=Loop.UNROLL)}
    experiment = experiment_with(model, "tp=8", "v6e-8", **options)

    compiled(experiment, tmp_path)

    for phase in experiment.phases:
        entry = read_hlo(tmp_path / f"{phase}.hlo.txt.gz").entry
        copied = [i.op_name or "" for i in entry.instructions if i.opcode == "copy"]
        weights = [name for name in copied if name.startswith("weights")]
        assert [name for name in weights if "experts_w" in name or "embed" in name] == []
