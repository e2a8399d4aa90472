"""What torch_xla traced is compiled for TPU: every collective has phase, layer, part and axis.

This process compiles, as importing torch_xla takes longer than most programs; `DAILY` cases use workers, as `compile`
does.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")

from meshscope.analysis.join import Verdict, compare
from meshscope.backends.compile.compile import compile_experiment
from meshscope.backends.compile.read import read_chunks
from meshscope.backends.compile.worker import (
    compile_program,
    set_environment,
)
from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import model_from_config
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Frontend, Program
from meshscope.plans.workload import Workload
from meshscope.programs.torchxla.configs import check_traceable

pytestmark = pytest.mark.filterwarnings("ignore:.*XLA_USE_SPMD is being deprecated")

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
WINDOWS = {"sliding_window": 64}
LATENT = {key: value for key, value in SPARSE.items() if not key.startswith("index")}
# By family, as `docs/support.md` lists them, those that have pp and cp.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": DENSE | {"model_type": "llama"},
    "mistral": DENSE | WINDOWS | {"model_type": "mistral"},
    "ministral": DENSE
    | WINDOWS
    | {"model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": DENSE | {"model_type": "ministral3"},
    "phi3": PHI,
    "gemma2": GEMMA,
    "gemma3": DENSE | WINDOWS | {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "gemma4": GEMMA4,
    "gemma4-shared": SHARED,
    "qwen2": DENSE | {"model_type": "qwen2"},
    "qwen3": DENSE,
    "mixtral": DENSE | {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 4},
    "llama4": LLAMA4,
    "gemma4-moe": GEMMA4_EXPERTS,
    "qwen3_moe": MIXTURE,
    "glm4_moe": GLM,
    "gpt_oss": GPT,
    "deepseek_v2": DENSE | LATENT | {"model_type": "deepseek_v2"},
    "deepseek_v3": DENSE | LATENT | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1},
}
# Together they have every axis; mixtures also place experts.
PLANS = {"pp=2,fsdp=2,tp=2,sp": ",ep=2", "dp=2,cp=2,tp=2": ",ep=4"}
MORE_PLANS = (  # of a pipeline: with cp, and with experts over tp and the data axis
    ("gemma4-shared", "pp=2,cp=2,tp=2"),
    ("deepseek_v3", "pp=2,cp=2,tp=2"),
    ("glm4_moe", "pp=2,dp=2,tp=2,sp,ep=4"),
    ("gemma4-moe", "pp=2,dp=2,tp=2,sp,ep=4"),
    ("gpt_oss", "pp=2,dp=2,tp=2,ep=4"),
)
ENDS = {Part.EMBED, Part.LM_HEAD, Part.SAMPLE}
# The partitioner moves the tokens of experts beside an MLP if cp splits them, and gathers scores of groups of experts.
MOVED = {
    ("gemma4-moe", "dp=2,cp=2,tp=2,ep=4"): {
        (Verdict.EXTRA, Part.MOE_ROUTER, "cp", (2, 64, 4)),
        (Verdict.EXTRA, Part.MOE_ROUTER, "cp", (4, 128, 256)),
        (Verdict.CHANGED, Part.MOE_COMBINE, "tp", (512, 256)),
    },
    ("deepseek_v3", "dp=2,cp=2,tp=2,ep=4"): {
        (Verdict.EXTRA, Part.MOE_ROUTER, "dp+cp", (1024, 2)),
        (Verdict.EXTRA, Part.MOE_ROUTER, "dp", (8, 2)),
    },
}


class Case(NamedTuple):
    config: dict[str, object]
    plan: str


CASES = {
    "sp": Case(DENSE, "tp=8,sp"),
    "ep": Case(MIXTURE, "dp=8,ep=8"),
    "pp-sp": Case(DENSE, "pp=2,tp=4,sp"),
    "pp-chunks": Case(LLAMA4 | {"num_hidden_layers": 4}, "pp=4,dp=2"),
    "fsdp": Case(DENSE, "fsdp=8"),
    "hybrid": Case(MIXTURE, "dp=2,tp=4,ep=8"),
    "post-norms": Case(GEMMA, "dp=2,tp=4,sp"),
    "heads-by-kind": Case(GEMMA4, "dp=2,tp=4,sp"),
    "experts-beside-the-mlp": Case(GEMMA4_EXPERTS, "dp=2,tp=4,ep=4"),
    "experts-beside-the-mlp-sp": Case(GEMMA4_EXPERTS, "dp=2,tp=4,sp"),
    "shared-expert": Case(GLM, "dp=2,tp=4,ep=8"),
    "one-expert": Case(LLAMA4, "dp=2,tp=4,ep=8"),
    "fused-heads": Case(PHI, "tp=8"),
    "indexer": Case(DEEPSEEK, "dp=2,tp=4,ep=8"),
    "shared-indexer": Case(GLM5, "dp=2,tp=4,sp"),
    "entries": Case(COMPRESSED, "dp=2,tp=4,ep=8"),
    "entries-sp": Case(COMPRESSED, "dp=2,tp=4,sp"),
    "entries-fsdp": Case(COMPRESSED, "fsdp=8"),
    "linear-attention": Case(QWEN35, "dp=2,tp=4,sp"),
    "linear-attention-fsdp": Case(QWEN35, "fsdp=8"),
    "linear-attention-experts": Case(QWEN_NEXT, "dp=2,tp=4,ep=8"),
    "linear-attention-shared-expert": Case(QWEN_NEXT, "tp=8"),
    "biased-experts": Case(GPT, "tp=8,ep=8"),
}
DAILY = {"sp", "ep"}
# In decode, where sp splits the batch, the partitioner tells tokens of halves of tp.
HALVES = {"pp-sp": {"groups of 2 devices are subsets of tp"}}


def small_experiment(case: Case) -> Experiment:
    return experiment_of(
        model=model_from_config(case.config, name="small", source="test"),
        plan=parse_plan(case.plan),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=8, prompt=128, output=8),
        program=Program(frontend=Frontend.TORCHXLA),
    )


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """The environment of a worker, which libtpu reads when it is loaded."""
    before = dict(os.environ)
    set_environment()
    yield
    os.environ.clear()
    os.environ.update(before)


def compiled(experiment: Experiment, folder: Path) -> list[Collective]:
    """The collectives of both phases, compiled by this process."""
    check_traceable(experiment)
    rows: list[Collective] = []
    for phase in experiment.phases:
        compile_program(experiment, phase, -1, folder)
        rows += read_chunks(experiment, phase, folder).rows
    return rows


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in DAILY else (pytest.mark.matrix,))
        for name, case in CASES.items()
    ],
)
@pytest.mark.usefixtures("environment")
def test_every_collective_is_attributed(case: Case, tmp_path: Path) -> None:
    """Nothing is unattributed; what programs write themselves is as predicted in prefill."""
    experiment = small_experiment(case)
    name = next(name for name, known in CASES.items() if known == case)

    if name in DAILY:
        rows = compile_experiment(experiment, tmp_path, progress=lambda *_: None).rows
    else:
        rows = compiled(experiment, tmp_path)

    reasons = {row.axis_reason for row in rows if row.axis_reason}
    assert reasons == HALVES.get(name, set())
    comparison = compare(predict(experiment), rows)
    equal = {
        (match.shown.part, match.shown.kind)
        for match in comparison.with_verdict(Verdict.EQUAL, Phase.PREFILL)
    }
    expected = {
        "sp": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.REDUCE_SCATTER)},
        "ep": {(Part.MOE_DISPATCH, Kind.ALL_TO_ALL), (Part.MOE_COMBINE, Kind.ALL_TO_ALL)},
        "pp-sp": {(Part.STAGE, Kind.PERMUTE), (Part.MLP, Kind.ALL_GATHER)},
        "pp-chunks": {(Part.STAGE, Kind.PERMUTE)},
        "fsdp": {(Part.MLP, Kind.ALL_GATHER)},
        "hybrid": {(Part.MOE_DISPATCH, Kind.ALL_TO_ALL), (Part.ATTN, Kind.ALL_REDUCE)},
        "post-norms": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
        "heads-by-kind": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
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
        "entries": {(Part.ATTN, Kind.ALL_REDUCE), (Part.MOE_DISPATCH, Kind.ALL_TO_ALL)},
        "entries-sp": {(Part.ATTN, Kind.ALL_GATHER), (Part.ATTN, Kind.REDUCE_SCATTER)},
        "entries-fsdp": {(Part.ATTN, Kind.ALL_GATHER), (Part.MOE_SHARED, Kind.ALL_GATHER)},
        "linear-attention": {
            (Part.ATTN, Kind.ALL_GATHER),
            (Part.ATTN, Kind.REDUCE_SCATTER),
            (Part.MLP, Kind.REDUCE_SCATTER),
        },
        "linear-attention-fsdp": {(Part.ATTN, Kind.ALL_GATHER), (Part.MLP, Kind.ALL_GATHER)},
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


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *(
            (family, plan + experts * ("experts" in " ".join(config)))
            for family, config in FAMILIES.items()
            for plan, experts in PLANS.items()
        ),
        *MORE_PLANS,
    ],
)
@pytest.mark.usefixtures("environment")
def test_layers_and_stages_are_as_predicted(family: str, plan: str, tmp_path: Path) -> None:
    """Every collective of layers, of stages and of the program; docs/evidence/torchxla.md has what the partitioner adds."""
    experiment = small_experiment(Case(FAMILIES[family], plan))

    rows = compiled(experiment, tmp_path)

    assert not {row.axis_reason for row in rows if row.axis_reason}
    matches = compare(predict(experiment), rows).matches
    differing = [match for match in matches if match.verdict is not Verdict.EQUAL]
    inside = [m for m in differing if m.shown.part not in ENDS]
    shown = {(m.verdict, m.shown.part, m.shown.axis, m.shown.shape) for m in inside}
    assert shown == MOVED.get((family, plan), set())
    extra = [m.shown for m in differing if m.verdict is Verdict.EXTRA]
    assert not [row for row in extra if row.inserted_by == "program"]
