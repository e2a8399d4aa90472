"""Predicted equals compiled: kind, count, shape, groups and payload of every collective."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compared import assert_predicted_equals_compiled, compiled, meanings
from small_configs import CONFIGS, small_model
from tables import cases, stored

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
    *("meta-llama/Llama-4-Scout-17B-16E-Instruct", "google/gemma-2-2b", "google/gemma-3-4b-it"),
    *("mistralai/Mistral-7B-v0.1", "microsoft/phi-4", "zai-org/GLM-4.5-Air", "zai-org/GLM-5"),
)
QWEN_NEXT, QWEN_35, QWEN_35_MOE = (
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-35B-A3B",
)
SLICES_OF_8 = ("v4-16", "v5e-8", "v5p-16", "v6e-8", "tpu7x-8")  # eight devices each
PLANS = ("tp=1", "tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4", "fsdp=8", "fsdp=2,tp=4")

ODD_VOCABULARY = "llama-with-odd-vocabulary"
ODD: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))["odd"]
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
TELLING = cases(__file__, Case, "telling")

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
WHOLE_MATRIX += cases(__file__, Case, "in_chunks")
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
WHOLE_MATRIX += cases(__file__, Case, "linear_attention")
WHOLE_MATRIX += cases(__file__, Case, "others")


V4, KIMI, MAVERICK = (
    "deepseek-ai/DeepSeek-V4-Flash",
    "moonshotai/Kimi-K2-Instruct",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
)
MXFP4, FP8_MXFP4 = "f4e2m1fn_experts", "f8e4m3fn_block128_f4e2m1fn_experts"


def quantized(
    dtype: str, model: str, topology: str, plan: str, *, n_layers: int = 2, loop: Loop = Loop.SCAN
) -> Case:
    """The first layers of a model with a format of weights, which fsdp gathers as they are stored."""
    return Case(model, topology, plan, loop, n_layers, batch=16, output=128, dtype=dtype)


FORMATS = cases(__file__, quantized, "formats")
FORMATS_OF_MATRIX = cases(__file__, quantized, "formats_of_matrix")


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
        return model_from_config(CONFIGS["deepseek_v4"], name=name, source="test")
    if name == ODD_VOCABULARY:
        return model_from_config(ODD, name=name, source="test")
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
    [("v6e:2x4", "dp=2,tp=4", "y:tp=4,x:dp=2"), ("v5p:2x2x2", "pp=2,tp=4", "z:tp=2,y:pp=2,x:tp=2")],
)
def test_an_order_of_devices_is_that_of_the_program(topology, plan, order, tmp_path) -> None:
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
def test_many_row_counts_are_gathered_in_another_shape(model, plan, tmp_path) -> None:
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
