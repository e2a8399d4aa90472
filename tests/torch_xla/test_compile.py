"""What torch_xla traced is compiled for TPU: every collective has phase, layer, part and axis."""

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch_xla", reason="the extra 'torchxla' has an environment of its own")

from meshscope.analysis.join import Verdict, compare
from meshscope.backends.compile.compile import compile_experiment
from meshscope.events.enums import Kind, Part, Phase
from meshscope.prediction import predict
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import model_from_config
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.program import Frontend, Program
from meshscope.spec.workload import Workload

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
GEMMA = DENSE | {
    "model_type": "gemma2",
    "sliding_window": 64,
    "query_pre_attn_scalar": 128,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4 = DENSE | {
    "model_type": "gemma4_text",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 256,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}
SHARED = GEMMA4 | {
    "attention_k_eq_v": False,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 128,
    "vocab_size_per_layer_input": DENSE["vocab_size"],
}
GEMMA4_EXPERTS = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 128,
}
GLM = DENSE | {
    "model_type": "glm4_moe",
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
GPT = DENSE | {
    "model_type": "gpt_oss",
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 64,
}
LLAMA4 = DENSE | {
    "model_type": "llama4_text",
    "intermediate_size_mlp": 1024,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 64,
}
HYBRID = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN35 = DENSE | HYBRID | {"model_type": "qwen3_5_text"}
QWEN_NEXT = (
    DENSE
    | HYBRID
    | {"model_type": "qwen3_next", "num_experts": 16, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
)
SPARSE = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 64,
}
DEEPSEEK = DENSE | SPARSE | {"model_type": "deepseek_v32", "n_group": 2, "topk_group": 1}
GLM5 = (
    DENSE
    | SPARSE
    | {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "first_k_dense_replace": 3}
    | {"indexer_types": ["full", "shared", "full", "shared"]}
)
COMPRESSED = {key: DENSE[key] for key in DENSE if key not in {"intermediate_size", "head_dim"}} | {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 8,
    "o_lora_rank": 64,
    "sliding_window": 64,
    "compress_ratios": [0, 4, 128],
    "compress_rate_hca": 32,
    "num_hash_layers": 1,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
PHI = DENSE | {"model_type": "phi3", "hidden_size": 1024}


class Case(NamedTuple):
    config: dict[str, object]
    plan: str


CASES = {
    "sp": Case(DENSE, "tp=8,sp"),
    "ep": Case(MIXTURE, "dp=8,ep=8"),
    "cp": Case(DENSE, "cp=2,tp=4"),
    "cp-experts": Case(MIXTURE, "cp=2,dp=2,tp=2"),
    "pp": Case(DENSE, "pp=2,tp=4"),
    "pp-sp": Case(DENSE, "pp=2,tp=4,sp"),
    "pp-fsdp": Case(DENSE, "pp=2,fsdp=2,tp=2"),
    "pp-ep": Case(MIXTURE, "pp=2,dp=4,ep=4"),
    "pp-ep-over-tp": Case(MIXTURE, "pp=2,dp=2,tp=2,ep=2"),
    "pp-dense-and-experts": Case(GLM | {"num_hidden_layers": 3}, "pp=2,dp=2,tp=2"),
    "pp-chunks": Case(LLAMA4 | {"num_hidden_layers": 4}, "pp=4,dp=2"),
    "pp-heads-by-kind": Case(GEMMA4, "pp=2,dp=2,tp=2"),
    "pp-linear-attention": Case(QWEN35, "pp=4,tp=2"),
    "fsdp": Case(DENSE, "fsdp=8"),
    "hybrid": Case(MIXTURE, "dp=2,tp=4,ep=8"),
    "post-norms": Case(GEMMA, "dp=2,tp=4,sp"),
    "heads-by-kind": Case(GEMMA4, "dp=2,tp=4,sp"),
    "shared-caches": Case(SHARED, "cp=2,dp=2,tp=2"),
    "experts-beside-the-mlp": Case(GEMMA4_EXPERTS, "dp=2,tp=4,ep=4"),
    "experts-beside-the-mlp-sp": Case(GEMMA4_EXPERTS, "dp=2,tp=4,sp"),
    "shared-expert": Case(GLM, "dp=2,tp=4,ep=8"),
    "one-expert": Case(LLAMA4, "dp=2,tp=4,ep=8"),
    "fused-heads": Case(PHI, "tp=8"),
    "indexer": Case(DEEPSEEK, "dp=2,tp=4,ep=8"),
    "shared-indexer": Case(GLM5, "dp=2,tp=4,sp"),
    "indexer-cp": Case(DEEPSEEK, "cp=2,tp=4"),
    "entries": Case(COMPRESSED, "dp=2,tp=4,ep=8"),
    "entries-sp": Case(COMPRESSED, "dp=2,tp=4,sp"),
    "entries-fsdp": Case(COMPRESSED, "fsdp=8"),
    "entries-cp": Case(COMPRESSED, "cp=2,tp=4"),
    "linear-attention": Case(QWEN35, "dp=2,tp=4,sp"),
    "linear-attention-fsdp": Case(QWEN35, "fsdp=8"),
    "linear-attention-cp": Case(QWEN35, "cp=2,tp=4"),
    "linear-attention-experts": Case(QWEN_NEXT, "dp=2,tp=4,ep=8"),
    "linear-attention-shared-expert": Case(QWEN_NEXT, "tp=8"),
    "biased-experts": Case(GPT, "tp=8,ep=8"),
}
DAILY = {"sp", "ep"}
# In decode, where sp splits the batch, the partitioner tells tokens of halves of tp.
HALVES = {"pp-sp": {"groups {{0,2},{1,3},{4,6},{5,7}} match no axis of the mesh (pp=2,tp=4)"}}


def small_experiment(case: Case) -> Experiment:
    return experiment_of(
        model=model_from_config(case.config, name="small", source="test"),
        plan=parse_plan(case.plan),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=8, prompt=128, output=8),
        program=Program(frontend=Frontend.TORCHXLA),
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in DAILY else (pytest.mark.matrix,))
        for name, case in CASES.items()
    ],
)
def test_every_collective_is_attributed(case: Case, tmp_path: Path) -> None:
    """Nothing is unattributed; what programs write themselves is as predicted in prefill."""
    experiment = small_experiment(case)

    result = compile_experiment(experiment, tmp_path, progress=lambda *_: None)

    name = next(name for name, known in CASES.items() if known == case)
    reasons = {row.axis_reason for row in result.rows if row.axis_reason}
    assert reasons == HALVES.get(name, set())
    comparison = compare(predict(experiment), result.rows)
    equal = {
        (match.shown.part, match.shown.kind)
        for match in comparison.with_verdict(Verdict.EQUAL, Phase.PREFILL)
    }
    expected = {
        "sp": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.REDUCE_SCATTER)},
        "ep": {(Part.MOE_DISPATCH, Kind.ALL_TO_ALL), (Part.MOE_COMBINE, Kind.ALL_TO_ALL)},
        "cp": {(Part.ATTN, Kind.ALL_REDUCE), (Part.MLP, Kind.ALL_REDUCE)},
        "cp-experts": {(Part.ATTN, Kind.PERMUTE), (Part.MOE_COMBINE, Kind.ALL_REDUCE)},
        "pp": {(Part.STAGE, Kind.PERMUTE), (Part.MLP, Kind.ALL_REDUCE)},
        "pp-sp": {(Part.STAGE, Kind.PERMUTE), (Part.MLP, Kind.ALL_GATHER)},
        "pp-fsdp": {(Part.STAGE, Kind.PERMUTE), (Part.MLP, Kind.ALL_GATHER)},
        "pp-ep": {(Part.STAGE, Kind.PERMUTE), (Part.MOE_DISPATCH, Kind.ALL_TO_ALL)},
        "pp-ep-over-tp": {(Part.STAGE, Kind.PERMUTE), (Part.MOE_COMBINE, Kind.ALL_REDUCE)},
        "pp-dense-and-experts": {(Part.STAGE, Kind.PERMUTE), (Part.MOE_COMBINE, Kind.ALL_REDUCE)},
        "pp-chunks": {(Part.STAGE, Kind.PERMUTE)},
        "pp-heads-by-kind": {(Part.STAGE, Kind.PERMUTE), (Part.MLP, Kind.ALL_REDUCE)},
        "pp-linear-attention": {(Part.STAGE, Kind.PERMUTE), (Part.ATTN, Kind.ALL_REDUCE)},
        "fsdp": {(Part.MLP, Kind.ALL_GATHER)},
        "hybrid": {(Part.MOE_DISPATCH, Kind.ALL_TO_ALL), (Part.ATTN, Kind.ALL_REDUCE)},
        "post-norms": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
        "heads-by-kind": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
        "shared-caches": {(Part.ATTN, Kind.PERMUTE), (Part.MLP, Kind.ALL_REDUCE)},
        "experts-beside-the-mlp": {
            (Part.MLP, Kind.ALL_REDUCE),
            (Part.MOE_COMBINE, Kind.ALL_REDUCE),
        },
        "experts-beside-the-mlp-sp": {
            (Part.MLP, Kind.ALL_GATHER),
            (Part.MOE_DISPATCH, Kind.ALL_GATHER),
        },
        "shared-expert": {(Part.MOE_DISPATCH, Kind.ALL_TO_ALL), (Part.ATTN, Kind.ALL_REDUCE)},
        "one-expert": {(Part.MOE_DISPATCH, Kind.ALL_TO_ALL), (Part.MLP, Kind.ALL_REDUCE)},
        "fused-heads": {(Part.ATTN, Kind.ALL_REDUCE), (Part.MLP, Kind.ALL_REDUCE)},
        "indexer": {(Part.ATTN, Kind.ALL_REDUCE), (Part.MOE_DISPATCH, Kind.ALL_TO_ALL)},
        "shared-indexer": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
        "indexer-cp": {(Part.ATTN, Kind.ALL_GATHER), (Part.ATTN, Kind.PERMUTE)},
        "entries": {(Part.ATTN, Kind.ALL_REDUCE), (Part.MOE_DISPATCH, Kind.ALL_TO_ALL)},
        "entries-sp": {(Part.ATTN, Kind.ALL_GATHER), (Part.ATTN, Kind.REDUCE_SCATTER)},
        "entries-fsdp": {(Part.ATTN, Kind.ALL_GATHER), (Part.MOE_SHARED, Kind.ALL_GATHER)},
        "entries-cp": {(Part.ATTN, Kind.ALL_GATHER), (Part.ATTN, Kind.ALL_REDUCE)},
        "linear-attention": {
            (Part.ATTN, Kind.ALL_GATHER),
            (Part.ATTN, Kind.REDUCE_SCATTER),
            (Part.MLP, Kind.REDUCE_SCATTER),
        },
        "linear-attention-fsdp": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
        "linear-attention-cp": {(Part.ATTN, Kind.ALL_GATHER), (Part.ATTN, Kind.PERMUTE)},
        "linear-attention-experts": {
            (Part.ATTN, Kind.ALL_REDUCE),
            (Part.MOE_DISPATCH, Kind.ALL_TO_ALL),
        },
        "linear-attention-shared-expert": {
            (Part.ATTN, Kind.ALL_REDUCE),
            (Part.MOE_COMBINE, Kind.ALL_REDUCE),
        },
        "biased-experts": {(Part.ATTN, Kind.ALL_REDUCE), (Part.MOE_COMBINE, Kind.ALL_REDUCE)},
    }[name]
    assert expected <= equal, [str(m) for m in comparison.matches]
    # Beside the collectives over cp, only sums of its output are exchanged.
    if name.startswith(("linear-attention", "entries")) or "indexer" in name:
        differing = {Verdict.EXTRA, Verdict.MISSING, Verdict.CHANGED}
        assert not [
            m for m in comparison.matches if m.verdict in differing and m.shown.part is Part.ATTN
        ]
    if experiment.plan.pp > 1 and not experiment.plan.sp:  # idle stages send nothing
        of_layers = [m for m in comparison.matches if m.shown.part in {Part.ATTN, Part.MLP}]
        assert all(m.verdict is Verdict.EQUAL for m in of_layers), [str(m) for m in of_layers]
    if name == "ep":  # slots for experts are predicted, in decode at least one each
        in_decode = comparison.with_verdict(Verdict.EQUAL, Phase.DECODE)
        assert expected <= {(match.shown.part, match.shown.kind) for match in in_decode}
