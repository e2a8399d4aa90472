"""Predicted equals compiled for a small model of each newer family, with a layer of each of its kinds."""

from pathlib import Path
from typing import NamedTuple

import pytest
from compared import assert_predicted_equals_compiled
from small_configs import BASE, CONFIGS

from meshscope.spec.experiment import experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import model_from_config
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.program import Loop, Program
from meshscope.spec.workload import Workload

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = [pytest.mark.tpu, pytest.mark.slow]


class Case(NamedTuple):
    family: str
    topology: str
    plan: str
    loop: Loop = Loop.UNROLL


CASES = [
    Case("qwen3_next", "v6e-8", "dp=2,tp=4,ep=8"),
    Case("qwen3_5_text", "v6e-8", "fsdp=2,cp=2,tp=2"),
    Case("glm4_moe", "v6e-8", "dp=4,tp=2,ep=8,sp"),
    Case("glm_moe_dsa", "v6e-8", "cp=2,dp=2,tp=2,ep=4"),
    Case("llama4_text", "v6e-8", "dp=4,tp=2,ep=8,sp"),
    Case("phi3", "v5e-8", "fsdp=4,tp=2"),
    Case("gemma2", "v6e-8", "pp=2,tp=4"),
    Case("gemma3_text", "v6e-8", "dp=4,tp=2,sp"),
    Case("gemma4_text", "v6e-8", "cp=2,tp=2,dp=2"),
    Case("gemma4_text-shared", "v6e-8", "pp=2,fsdp=2,tp=2,sp", Loop.SCAN),
    Case("gemma4_text-moe", "v6e-8", "dp=4,tp=2,ep=8,sp"),
]
MATRIX = [
    Case("gemma4_text-shared", "v6e-8", "fsdp=4,tp=2,sp", Loop.SCAN),
    Case("gemma4_text-shared", "v6e-8", "pp=2,cp=2,tp=2", Loop.SCAN),
    Case("glm_moe_dsa", "v5e-8", "pp=2,tp=4", Loop.SCAN),
    Case("glm_moe_dsa", "v6e-8", "pp=2,cp=2,tp=2"),
    Case("gemma4_text-shared", "v6e-8", "cp=2,dp=2,tp=2"),
    Case("gemma4_text-moe", "v6e-8", "dp=2,tp=4,ep=4"),
    Case("mistral", "v6e-8", "cp=2,tp=4"),
    Case("qwen3_5_moe_text", "v5p-16", "pp=2,dp=2,tp=2"),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)],
    ids=lambda case: "-".join(map(str, case[:3])),
)
def test_predicted_equals_compiled(case: Case, tmp_path: Path) -> None:
    config = {**BASE, "model_type": case.family.partition("-")[0], **CONFIGS[case.family]}
    experiment = experiment_of(
        model=model_from_config(config, name=f"small-{case.family}", source="test"),
        plan=parse_plan(case.plan),
        topology=parse_topology(case.topology),
        workload=Workload(batch=8, prompt=128, output=16),
        program=Program(loop=case.loop),
    )
    assert_predicted_equals_compiled(experiment, tmp_path)
