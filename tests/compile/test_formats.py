"""Predicted equals compiled with weights of 4 bits, which fsdp gathers as they are stored, and with 8-bit activations."""

from pathlib import Path
from typing import NamedTuple

import pytest
from compared import assert_predicted_equals_compiled

from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = [pytest.mark.tpu, pytest.mark.slow]

GPT_OSS, LLAMA, QWEN, NEXT, V3, V4, KIMI = (
    "openai/gpt-oss-20b",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V4-Flash",
    "moonshotai/Kimi-K2-Instruct",
)
MXFP4, FP8_MXFP4 = "f4e2m1fn_experts", "f8e4m3fn_block128_f4e2m1fn_experts"


class Case(NamedTuple):
    """The first layers of a model with a format of weights."""

    model: str
    dtype: str
    topology: str
    plan: str
    n_layers: int = 2
    loop: Loop = Loop.SCAN


CASES = [
    Case(GPT_OSS, MXFP4, "v6e-8", "dp=2,tp=4,ep=8"),
    Case(QWEN, "s4", "v6e-8", "fsdp=4,tp=2"),
]
MATRIX = [
    Case(QWEN, "s8_experts", "v6e-8", "fsdp=4,tp=2"),
    Case(QWEN, "s8_experts", "v6e-8", "dp=2,tp=4,ep=8"),
    Case(NEXT, "f8e4m3fn_not_linear", "v6e-8", "fsdp=4,tp=2", n_layers=4),
    Case("Qwen/Qwen3.5-9B", "s4_not_linear", "v6e-8", "dp=2,tp=4", n_layers=4, loop=Loop.UNROLL),
    Case(LLAMA, "f8e4m3fn_layers", "v6e-8", "fsdp=4,tp=2"),
    Case(
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct", "f8e4m3fn_experts", "tpu7x-8", "tp=8,ep=8"
    ),
    Case(LLAMA, "f8e4m3fn_mlps", "v6e-8", "fsdp=4,tp=2", loop=Loop.UNROLL),
    Case(LLAMA, "f4e2m1fn", "v6e-8", "fsdp=4,tp=2"),
    Case(QWEN, "f4e2m1fn", "v6e-8", "dp=2,tp=4,ep=8,sp", loop=Loop.UNROLL),
    Case(GPT_OSS, MXFP4, "v5e-8", "fsdp=4,tp=2", loop=Loop.UNROLL),
    Case(QWEN, "s8_w8a8", "v6e-8", "dp=2,tp=4,ep=8"),
    Case(QWEN, "s8_w8a8", "v5e-8", "fsdp=4,tp=2,sp", loop=Loop.UNROLL),
    Case(QWEN, "f8e4m3fn_w8a8", "tpu7x-8", "tp=8"),
    Case("mistralai/Mixtral-8x7B-v0.1", "f8e4m3fn_w8a8", "v6e-8", "pp=2,dp=2,tp=2,ep=4"),
    Case("deepseek-ai/DeepSeek-V2-Lite", "s8_w8a8", "v6e-8", "cp=2,tp=4,ep=4"),
    Case(NEXT, "s8_w8a8", "v6e-8", "fsdp=4,tp=2", n_layers=4),
    Case("Qwen/Qwen3.5-9B", "f8e4m3fn_w8a8", "tpu7x-8", "cp=4,tp=2", n_layers=4, loop=Loop.UNROLL),
    Case("deepseek-ai/DeepSeek-V3.2", "s8_w8a8", "v6e-8", "tp=8,ep=8", n_layers=4),
    Case("deepseek-ai/DeepSeek-V3.2", "s8_w8a8", "v6e-8", "cp=2,tp=4", loop=Loop.UNROLL),
    Case(V4, "s8_w8a8", "v6e-8", "fsdp=4,tp=2", n_layers=4, loop=Loop.UNROLL),
    Case(V4, "f8e4m3fn_w8a8", "tpu7x-8", "cp=2,tp=4,ep=4", n_layers=4),
    Case(GPT_OSS, MXFP4, "v6e-8", "tp=8,ep=8", loop=Loop.UNROLL),
    Case(GPT_OSS, MXFP4, "tpu7x-8", "pp=2,dp=2,tp=2"),
    Case(QWEN, "s4_group64", "v5e-8", "dp=2,tp=4,sp"),
    Case(QWEN, "s4_channel", "v6e-8", "tp=8"),
    Case("mistralai/Mixtral-8x7B-v0.1", "s4", "v6e-8", "tp=8,sp"),
    Case(KIMI, "s4_group32", "v6e:4x4", "tp=16,ep=16"),
    Case(V3, "s4", "v5p:2x2x2", "tp=8,ep=8", n_layers=4),
    Case(V4, FP8_MXFP4, "v6e-8", "tp=8,ep=8", n_layers=3),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_predicted_collectives_equal_compiled_ones(case: Case, tmp_path: Path) -> None:
    experiment = experiment_of(
        model=read_model(case.model),
        plan=parse_plan(case.plan),
        topology=parse_topology(case.topology),
        workload=Workload(batch=16, prompt=128, output=128, weight_dtype=case.dtype),
        program=Program(loop=case.loop),
        n_layers=case.n_layers,
    )
    assert_predicted_equals_compiled(experiment, tmp_path)
