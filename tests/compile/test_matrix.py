"""Predicted equals compiled: kind, count, shape, groups and payload of every collective."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from compared import assert_predicted_equals_compiled, compiled, meanings
from small_configs import CONFIGS, TINY_V4_CONFIG, small_model

from meshscope.cost.collectives import predict
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import model_from_config, read_model
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.placement import parse_device_order
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

LLAMA_8B, LLAMA_3B, QWEN_32B = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-32B",
)
MIXTRAL, QWEN_MOE, GPT_OSS = (
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B",
    "openai/gpt-oss-20b",
)
V2_LITE, V3, V32 = (
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2",
)
SCOUT, GEMMA_2B, GEMMA_4B, MISTRAL, PHI, GLM_AIR, GLM_5 = (
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "google/gemma-2-2b",
    "google/gemma-3-4b-it",
    "mistralai/Mistral-7B-v0.1",
    "microsoft/phi-4",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-5",
)
QWEN_NEXT, QWEN_35, QWEN_35_MOE = (
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-35B-A3B",
)
SLICES_OF_8 = ("v4-16", "v5e-8", "v5p-16", "v6e-8", "tpu7x-8")  # eight devices each
PLANS = ("tp=1", "tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4", "fsdp=8", "fsdp=2,tp=4")

ODD_VOCABULARY = "llama-with-odd-vocabulary"
ODD_CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32003,
    "attention_bias": True,
    "mlp_bias": True,
}

TINY_V4 = "tiny-deepseek-v4"  # one layer of each kind of attention, and a second sparse one


class Case(NamedTuple):
    model: str
    topology: str
    plan: str
    loop: Loop = Loop.SCAN
    n_layers: int | None = None
    batch: int = 8
    prompt: int = 128
    context: ContextForm = ContextForm.AUTO
    kernels: Kernels = Kernels.AUTO
    chunk: int | None = None
    dtype: str = "bf16"
    output: int = 16


# Small models compile in a tenth of the time, to collectives of the same kinds.
TELLING = [
    Case(LLAMA_3B, "tpu7x-8", "fsdp=2,tp=4"),  # tied embeddings; collectives on the sparse core
    Case(ODD_VOCABULARY, "v6e-8", "tp=8", Loop.UNROLL, 1),  # tp does not divide the vocabulary
    Case("llama", "2xv6e:2x4", "fsdp=2,tp=8"),  # weights are gathered over DCN
    Case("llama", "v6e-8", "cp=2,tp=4", Loop.UNROLL, 2, prompt=512),  # with both kernels
    Case("deepseek_v2", "v6e-8", "dp=2,tp=4,ep=8", n_layers=3),
    Case("mixtral", "v5p-16", "dp=4,tp=2,ep=8,sp"),
    Case("qwen3", "2xv6e:2x2", "pp=2,tp=4"),  # stages send over DCN
]

WHOLE_MATRIX = [
    Case(model, topology, plan)
    for model in (LLAMA_8B, LLAMA_3B, QWEN_32B)
    for topology in SLICES_OF_8
    for plan in PLANS
    if plan != "tp=1"
] + [
    Case(model, topology, plan)
    for model in (LLAMA_8B, LLAMA_3B, QWEN_32B)
    for topology, plan in (
        ("v5e:1x1", "tp=1"),
        ("v5p:1x1x1", "tp=1"),
        ("v6e:1x1", "tp=1"),
        ("v4:1x1x1", "tp=1"),
        ("tpu7x:1x1x1", "tp=2"),
    )
]
WHOLE_MATRIX += [
    Case(model, topology, plan, context=form)
    for form in ContextForm
    for model, topology, plan in (
        (QWEN_32B, "v6e-8", "cp=2,tp=4"),
        (LLAMA_8B, "v5p-16", "cp=4,tp=2,sp"),
        (LLAMA_8B, "tpu7x-8", "cp=2,tp=4"),
        (LLAMA_3B, "v5e-8", "dp=2,cp=4"),
        (V2_LITE, "v6e-8", "cp=2,tp=4"),
    )
]

EXPERT_PLANS = (
    *("tp=8", "tp=8,ep=8", "dp=8,ep=8", "dp=4,tp=2,ep=8", "dp=4,tp=2,ep=8,sp", "dp=2,tp=4,ep=2"),
    *("fsdp=8", "fsdp=8,ep=8", "fsdp=4,tp=2,ep=2,sp"),
)
WHOLE_MATRIX += [
    Case(model, topology, plan)
    for model in (V2_LITE, QWEN_MOE, MIXTRAL, GPT_OSS)
    for topology in ("v5e-8", "v5p-16", "v6e-8")
    for plan in EXPERT_PLANS
] + [
    Case(model, topology, "dp=8,tp=8,ep=64", n_layers=6, batch=64)
    for model in (V3, V32, GLM_5)
    for topology in ("v5p:4x4x4", "v6e:8x8")
]

PIPELINES = ("pp=8", "pp=2,tp=4", "pp=4,tp=2,sp", "pp=2,fsdp=2,tp=2", "pp=2,cp=2,tp=2")
WHOLE_MATRIX += [
    Case(model, topology, plan)
    for model in (LLAMA_8B, LLAMA_3B, QWEN_32B)
    for topology in SLICES_OF_8
    for plan in PIPELINES
] + [
    Case(model, topology, plan)
    for model in (V2_LITE, QWEN_MOE, MIXTRAL, GPT_OSS)
    for topology in ("v5e-8", "v5p-16", "v6e-8")
    for plan in ("pp=2,tp=4", "pp=2,tp=4,ep=4", "pp=2,dp=2,tp=2,ep=4", "pp=4,dp=2,ep=2")
]

WHOLE_MATRIX += [
    Case(TINY_V4, topology, plan, Loop.SCAN, batch=batch, prompt=prompt)
    for topology, plan, batch, prompt in (
        ("v6e-8", "dp=2,tp=4,ep=8", 8, 256),
        ("v6e-8", "pp=2,tp=4", 8, 256),
        ("v5p-16", "pp=2,dp=2,tp=2,ep=4", 8, 256),
        ("v6e-8", "cp=2,tp=4", 8, 256),  # blocks of whole windows
        ("v5p-16", "cp=2,tp=4,sp", 2, 128),  # in sparse layers only
        ("v6e-8", "pp=2,cp=2,tp=2", 8, 256),
        ("v5p-16", "pp=2,dp=2,tp=2,ep=4,sp", 8, 256),  # decode gathers the batch at the end
        ("v6e-8", "dp=2,tp=4,ep=8,sp", 8, 256),
    )
]
WHOLE_MATRIX += [
    Case(TINY_V4, "v6e-8", "dp=2,tp=4,ep=8", Loop.SCAN, prompt=256, chunk=128),
    Case(TINY_V4, "v5p-16", "dp=2,tp=4,sp", Loop.UNROLL, batch=4, prompt=512, chunk=256),
]
CLOSE_PLANS = ("tp=2,dp=4", "dp=4,tp=2,sp", "fsdp=4,tp=2", "cp=2,dp=2,tp=2", "pp=2,dp=2,tp=2")
WHOLE_MATRIX += [
    Case(model, topology, plan, n_layers=7)
    for model in (GEMMA_2B, GEMMA_4B, MISTRAL, PHI)
    for topology in ("v6e-8", "v5p-16")
    for plan in CLOSE_PLANS
] + [
    Case(model, topology, plan, n_layers=n_layers)
    for model, n_layers in ((GLM_AIR, 3), (SCOUT, 4))
    for topology in ("v6e-8", "v5p-16")
    for plan in (*CLOSE_PLANS, "dp=2,tp=4,ep=8", "dp=4,tp=2,ep=8,sp", "fsdp=8,ep=8", "tp=8,ep=8")
]
WHOLE_MATRIX += [
    Case(QWEN_NEXT, "v6e-8", "tp=8", Loop.UNROLL, n_layers=4),
    Case(QWEN_NEXT, "v6e-8", "fsdp=4,tp=2", n_layers=4),
    Case(QWEN_NEXT, "v6e-8", "pp=2,dp=2,tp=2", n_layers=8),
    Case(QWEN_35, "v6e-8", "tp=8", Loop.UNROLL, n_layers=4),
    Case(QWEN_35, "v6e-8", "fsdp=4,tp=2", n_layers=4),
    Case(QWEN_35_MOE, "v5p-16", "pp=2,dp=2,tp=2", n_layers=8),
    Case(QWEN_NEXT, "v6e-8", "cp=2,tp=4", Loop.UNROLL, n_layers=4, prompt=512),
    Case(QWEN_35, "v6e-8", "fsdp=2,cp=4", n_layers=4, batch=2, prompt=1024, chunk=512),
    Case(QWEN_NEXT, "v5p-16", "pp=2,cp=2,tp=2", n_layers=8, prompt=512),
    Case(QWEN_35, "v6e-8", "cp=4,tp=2", n_layers=4, prompt=512),
    Case(QWEN_35, "tpu7x-8", "fsdp=2,cp=2,tp=2", Loop.UNROLL, n_layers=4, prompt=512),
    Case(QWEN_35_MOE, "v5e-8", "dp=2,cp=2,tp=2,ep=4", n_layers=4, prompt=512),
]
WHOLE_MATRIX += [
    Case(LLAMA_8B, "2xv6e:2x4", "fsdp=2,tp=8"),
    Case(LLAMA_8B, "v6e-8", "cp=2,tp=4", Loop.UNROLL, 2, prompt=512),
    Case(LLAMA_3B, "2xv6e:2x2", "pp=2,tp=4"),
    Case(LLAMA_8B, "v6e-8", "cp=4,tp=2", Loop.UNROLL, 1, batch=2, prompt=2048, chunk=1024),
    Case(LLAMA_3B, "2xv6e:2x2", "cp=2,tp=4", Loop.SCAN, 2),  # merged over DCN, with padding
    Case(LLAMA_3B, "v5e-8", "tp=8,sp"),
    Case(LLAMA_8B, "v4-16", "dp=2,tp=4", Loop.UNROLL, 4),
    Case(LLAMA_3B, "v6e-8", "fsdp=2,cp=4", context=ContextForm.ALLGATHER),
    Case(
        LLAMA_3B, "tpu7x-8", "pp=2,fsdp=2,tp=2", Loop.UNROLL, 3
    ),  # the tied table is on both end stages
    Case(QWEN_32B, "v6e-8", "tp=8,sp", Loop.UNROLL, 2),
    Case(LLAMA_8B, "v6e-16", "tp=16"),  # more devices than KV heads: heads are replicated
    Case(LLAMA_3B, "v6e-8", "tp=8,sp", batch=1),  # sp without effect in decode
    Case(LLAMA_3B, "v4-16", "tp=8", prompt=100),  # no kernel takes this prompt
    Case(LLAMA_8B, "v5p-16", "pp=4,tp=2,sp"),
    Case(V32, "v6e-8", "dp=4,tp=2,ep=4,sp", n_layers=4),
    Case(QWEN_32B, "v6e-8", "pp=2,tp=4"),
    Case(QWEN_32B, "v6e-8", "cp=2,tp=4", Loop.UNROLL, 2),
    Case(V2_LITE, "v6e-8", "cp=4,tp=2", n_layers=3, prompt=1024),  # the decode kernel on latents
    Case(V2_LITE, "v6e-8", "cp=2,tp=4,sp", n_layers=3, batch=2, prompt=1024, chunk=512),
    Case(LLAMA_3B, "v6e:1x1", "tp=1"),
    Case(LLAMA_3B, "v5p-16", "tp=8", kernels=Kernels.OFF),
    Case(V2_LITE, "v6e-8", "pp=2,tp=4"),  # 27 layers, the first one dense
    Case(LLAMA_8B, "v5p-16", "cp=4,tp=2,sp"),
    Case(QWEN_MOE, "v5e-8", "dp=8,ep=8"),
]


V4, KIMI, MAVERICK = (
    "deepseek-ai/DeepSeek-V4-Flash",
    "moonshotai/Kimi-K2-Instruct",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
)
MXFP4, FP8_MXFP4 = "f4e2m1fn_experts", "f8e4m3fn_block128_f4e2m1fn_experts"


def quantized(
    dtype: str,
    model: str,
    topology: str,
    plan: str,
    *,
    n_layers: int = 2,
    loop: Loop = Loop.SCAN,
) -> Case:
    """The first layers of a model with a format of weights, which fsdp gathers as they are stored."""
    return Case(model, topology, plan, loop, n_layers, batch=16, output=128, dtype=dtype)


FORMATS = [
    quantized(MXFP4, "gpt_oss", "v6e-8", "dp=2,tp=4,ep=8"),
    quantized("s4_group32", "qwen3_moe", "v6e-8", "fsdp=4,tp=2"),
]
FORMATS_OF_MATRIX = [
    quantized(MXFP4, GPT_OSS, "v6e-8", "dp=2,tp=4,ep=8"),
    quantized("s4", QWEN_MOE, "v6e-8", "fsdp=4,tp=2"),
    quantized("s8_experts", QWEN_MOE, "v6e-8", "fsdp=4,tp=2"),
    quantized("s8_experts", QWEN_MOE, "v6e-8", "dp=2,tp=4,ep=8"),
    quantized("f8e4m3fn_not_linear", QWEN_NEXT, "v6e-8", "fsdp=4,tp=2", n_layers=4),
    quantized("s4_not_linear", QWEN_35, "v6e-8", "dp=2,tp=4", n_layers=4, loop=Loop.UNROLL),
    quantized("f8e4m3fn_layers", LLAMA_8B, "v6e-8", "fsdp=4,tp=2"),
    quantized("f8e4m3fn_experts", MAVERICK, "tpu7x-8", "tp=8,ep=8"),
    quantized("f8e4m3fn_mlps", LLAMA_8B, "v6e-8", "fsdp=4,tp=2", loop=Loop.UNROLL),
    quantized("f4e2m1fn", LLAMA_8B, "v6e-8", "fsdp=4,tp=2"),
    quantized("f4e2m1fn", QWEN_MOE, "v6e-8", "dp=2,tp=4,ep=8,sp", loop=Loop.UNROLL),
    quantized(MXFP4, GPT_OSS, "v5e-8", "fsdp=4,tp=2", loop=Loop.UNROLL),
    quantized("s8_w8a8", QWEN_MOE, "v6e-8", "dp=2,tp=4,ep=8"),
    quantized("s8_w8a8", QWEN_MOE, "v5e-8", "fsdp=4,tp=2,sp", loop=Loop.UNROLL),
    quantized("f8e4m3fn_w8a8", QWEN_MOE, "tpu7x-8", "tp=8"),
    quantized("f8e4m3fn_w8a8", MIXTRAL, "v6e-8", "pp=2,dp=2,tp=2,ep=4"),
    quantized("s8_w8a8", V2_LITE, "v6e-8", "cp=2,tp=4,ep=4"),
    quantized("s8_w8a8", QWEN_NEXT, "v6e-8", "fsdp=4,tp=2", n_layers=4),
    quantized("f8e4m3fn_w8a8", QWEN_35, "tpu7x-8", "cp=4,tp=2", n_layers=4, loop=Loop.UNROLL),
    quantized("s8_w8a8", V32, "v6e-8", "tp=8,ep=8", n_layers=4),
    quantized("s8_w8a8", V32, "v6e-8", "cp=2,tp=4", loop=Loop.UNROLL),
    quantized("s8_w8a8", V4, "v6e-8", "fsdp=4,tp=2", n_layers=4, loop=Loop.UNROLL),
    quantized("f8e4m3fn_w8a8", V4, "tpu7x-8", "cp=2,tp=4,ep=4", n_layers=4),
    quantized(MXFP4, GPT_OSS, "v6e-8", "tp=8,ep=8", loop=Loop.UNROLL),
    quantized(MXFP4, GPT_OSS, "tpu7x-8", "pp=2,dp=2,tp=2"),
    quantized("s4_group64", QWEN_MOE, "v5e-8", "dp=2,tp=4,sp"),
    quantized("s4_channel", QWEN_MOE, "v6e-8", "tp=8"),
    quantized("s4", MIXTRAL, "v6e-8", "tp=8,sp"),
    quantized("s4_group32", KIMI, "v6e:4x4", "tp=16,ep=16"),
    quantized("s4", V3, "v5p:2x2x2", "tp=8,ep=8", n_layers=4),
    quantized(FP8_MXFP4, V4, "v6e-8", "tp=8,ep=8", n_layers=3),
]


def experiment_for(case: Case) -> Experiment:
    return experiment_of(
        model=_model(case.model),
        plan=parse_plan(case.plan),
        topology=parse_topology(case.topology),
        workload=Workload(
            batch=case.batch,
            prompt=case.prompt,
            output=case.output,
            prefill_chunk=case.chunk,
            weight_dtype=case.dtype,
        ),
        program=Program(loop=case.loop, context=case.context, kernels=case.kernels),
        n_layers=case.n_layers,
    )


def _model(name: str) -> Model:
    if name == TINY_V4:
        return model_from_config(TINY_V4_CONFIG, name=name, source="test")
    if name == ODD_VOCABULARY:
        return model_from_config(ODD_CONFIG, name=name, source="test")
    return small_model(name, 8) if name in CONFIGS else read_model(name)


@pytest.mark.parametrize("case", TELLING, ids=lambda c: "-".join(map(str, c[:4])))
def test_predicted_equals_compiled(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(experiment_for(case), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("case", WHOLE_MATRIX, ids=lambda c: "-".join(map(str, c[:3])))
def test_predicted_equals_compiled_everywhere(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(experiment_for(case), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*FORMATS, *(pytest.param(case, marks=pytest.mark.matrix) for case in FORMATS_OF_MATRIX)],
    ids=lambda case: f"{case.dtype}-{'-'.join(case[:3])}-{case.loop}",
)
def test_quantized_weights_and_activations_compile_as_predicted(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(experiment_for(case), tmp_path)


@pytest.mark.parametrize(
    ("topology", "plan", "order"),
    [
        ("v6e:2x4", "dp=2,tp=4", "y:tp=4,x:dp=2"),
        ("v5p:2x2x2", "pp=2,tp=4", "z:tp=2,y:pp=2,x:tp=2"),
    ],
)
def test_an_order_of_devices_is_that_of_the_program(
    topology: str, plan: str, order: str, tmp_path: Path
) -> None:
    experiment = experiment_for(Case("llama", topology, plan, n_layers=2))
    devices = parse_device_order(order, experiment.plan.mesh, experiment.topology)
    ordered = replace(experiment, device_order=devices)

    result = compiled(ordered, tmp_path)

    assert meanings(predict(ordered)) == meanings(result.rows)
    assert meanings(predict(ordered)) != meanings(predict(experiment))
    groups = {frozenset(group) for group in ordered.mesh.groups("tp")}
    in_rows = {frozenset(g) for row in result.rows if row.axis == "tp" for g in row.groups}
    assert in_rows == groups


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "plan"), [(QWEN_NEXT, "dp=4,tp=2,ep=8,sp"), (QWEN_35_MOE, "dp=2,tp=4,ep=8")]
)
def test_many_row_counts_are_gathered_in_another_shape(
    model: str, plan: str, tmp_path: Path
) -> None:
    """libtpu gathers s32[8,512] as s32[8,4,128]: the same bytes; all other rows are equal."""
    experiment = experiment_for(Case(model, "v6e-8", plan, n_layers=1))

    predicted, of_program = (
        meanings(predict(experiment)),
        meanings(compiled(experiment, tmp_path).rows),
    )

    only_predicted, only_compiled = (
        Counter({(*key[:9], *key[10:]): n for key, n in rows.items() if key[8] == "s32"})
        for rows in (predicted, of_program)
    )
    assert only_predicted == only_compiled
    assert {key[8] for key in (predicted - of_program) + (of_program - predicted)} <= {"s32"}


def test_scanned_and_unrolled_layers_give_the_same_table(tmp_path: Path) -> None:
    results = []
    for loop in (Loop.SCAN, Loop.UNROLL):
        directory = tmp_path / loop
        directory.mkdir()
        case = Case("llama", "v6e-8", "fsdp=2,tp=4", loop, 3)
        results.append(compiled(experiment_for(case), directory))

    scanned, unrolled = (meanings(result.rows) for result in results)
    assert scanned == unrolled
    assert scanned
    noted_phases = [
        [step.time.phase for step in result.steps if any("scanned" in n for n in step.time.notes)]
        for result in results
    ]
    assert noted_phases == [[Phase.DECODE], []]
