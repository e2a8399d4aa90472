"""No compiled step transposes or copies an expert's weights or the embedding table."""

from pathlib import Path

import pytest

from meshscope.backends.compile.compile import compile_experiment
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload
from meshscope.readers.hlo.parse import read_hlo

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

EXPERT_COLUMNS = 360  # of gpt-oss on one of eight devices: they do not fill tiles of 128


def test_narrow_experts_are_read_as_stored(tmp_path: Path) -> None:
    experiment = experiment_of(
        model=read_model("openai/gpt-oss-20b"),
        plan=parse_plan("tp=8"),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=8, prompt=128),
        program=Program(loop=Loop.UNROLL),
        n_layers=1,
    )
    assert experiment.model.moe.ffn // 8 == EXPERT_COLUMNS

    compile_experiment(experiment, tmp_path, progress=lambda *_: None)

    for phase in experiment.phases:
        entry = read_hlo(tmp_path / f"{phase}.hlo.txt.gz").entry
        copied = [i.op_name or "" for i in entry.instructions if i.opcode == "copy"]
        weights = [name for name in copied if name.startswith("weights")]
        assert [name for name in weights if "experts_w" in name or "embed" in name] == []
