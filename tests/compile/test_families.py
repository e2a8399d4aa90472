"""Predicted equals compiled for a small model of each newer family, with a layer of each of its kinds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compared import assert_predicted_equals_compiled

from meshscope.spec.experiment import experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import model_from_config
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.program import Loop, Program
from meshscope.spec.workload import Workload

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = [pytest.mark.tpu, pytest.mark.slow]

BASE: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SHARED = {"shared_expert_intermediate_size": 256}
ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LINEAR = {"full_attention_interval": 2, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
INDEXER = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 32}
SHARED_INDEXER = {"index_topk_freq": 2, "index_skip_topk_offset": 1}  # the second layer has none
WINDOW = {"sliding_window": 64}
GEMMA4 = WINDOW | {
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 256,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 4,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_EXPERTS = {"num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 256}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": LINEAR | EXPERTS | SHARED,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | SHARED,
    "glm4_moe": ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm_moe_dsa": ROUTED
    | LATENT
    | INDEXER
    | SHARED_INDEXER
    | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "llama4_text": {"num_local_experts": 16, "intermediate_size_mlp": 1024}
    | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 64},
    "mistral": WINDOW,
    "phi3": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW | {"sliding_window_pattern": 2},
    "gemma4_text": GEMMA4,
    "gemma4_text-shared": GEMMA4
    | {"attention_k_eq_v": False, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True}
    | {"hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": BASE["vocab_size"]},
    "gemma4_text-moe": GEMMA4 | {"enable_moe_block": True} | GEMMA4_EXPERTS,
}


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
