"""Small models, with a layer of each kind that their families have, and the plans of the tests for all of them."""

from collections.abc import Mapping
from typing import Any

from meshscope.model.config import model_from_config
from meshscope.model.model import Model
from meshscope.plans.program import Loop

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
ROUTED = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
LOCAL = {"num_local_experts": 16, "num_experts_per_tok": 2}
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
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "global_head_dim": 256,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 4,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_EXPERTS = {"num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 256}
# One layer of each kind of attention, and a second sparse one; deeper models repeat the last two.
TINY_V4_CONFIG = {
    "model_type": "deepseek_v4",
    "hidden_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "compress_ratios": [0, *[4, 128] * 4],
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "hc_mult": 4,
    "vocab_size": 32000,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "ministral": WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 4},
    "ministral3": {},
    "phi3": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW | {"sliding_window_pattern": 2},
    "gemma4_text": GEMMA4,
    "gemma4_text-shared": GEMMA4
    | {"attention_k_eq_v": False, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"use_double_wide_mlp": True}
    | {"hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": BASE["vocab_size"]},
    "gemma4_text-moe": GEMMA4 | {"enable_moe_block": True} | GEMMA4_EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "mixtral": LOCAL,
    "llama4_text": {"num_local_experts": 16, "intermediate_size_mlp": 1024}
    | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 64},
    "qwen3_moe": EXPERTS,
    "qwen3_next": LINEAR | EXPERTS | SHARED,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | SHARED,
    "glm4_moe": ROUTED,
    "gpt_oss": LOCAL | WINDOW,
    "deepseek_v2": ROUTED | LATENT | {"q_lora_rank": None},
    "deepseek_v3": ROUTED | LATENT | {"n_group": 4, "topk_group": 2},
    "deepseek_v32": ROUTED | LATENT | INDEXER,
    "glm_moe_dsa": ROUTED | LATENT | INDEXER | SHARED_INDEXER,
    "deepseek_v4": TINY_V4_CONFIG,
}


def small_model(name: str, n_layers: int | None = None) -> Model:
    """A model of CONFIGS, with as many layers as its config has or as given."""
    config = {**BASE, "model_type": name.partition("-")[0], **CONFIGS[name]}
    n_layers = n_layers or config["num_hidden_layers"]
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:n_layers]
    config["num_hidden_layers"] = n_layers
    return model_from_config(config, name=f"small-{name}", source="test")


# Together they have every axis in loops over layers and in unrolled layers, alone and beside pp and cp.
PLANS = [
    ("dp=4,tp=2,sp", Loop.UNROLL),
    ("fsdp=4,tp=2", Loop.SCAN),
    ("cp=2,dp=2,tp=2", Loop.SCAN),
    ("pp=2,dp=2,tp=2,sp", Loop.SCAN),
    ("pp=2,cp=2,tp=2", Loop.UNROLL),
]
EXPERT_PLANS = [
    ("dp=2,tp=4,ep=8", Loop.UNROLL),
    ("dp=4,tp=2,ep=8,sp", Loop.SCAN),
    ("fsdp=8,ep=8", Loop.SCAN),
    ("pp=2,cp=2,tp=2,ep=2", Loop.UNROLL),
]
OTHER_PLAN = "fsdp=2,cp=2,tp=2"  # unrolled, on one of these slices
OTHER_SLICES = ("v5p-16", "v5e-8", "tpu7x-8", "v4-16")


def plans_of(name: str) -> list[tuple[str, Loop]]:
    """The plans of a small model on v6e-8, and whether its layers are scanned."""
    has_experts = small_model(name).moe is not None
    return PLANS + EXPERT_PLANS if has_experts else PLANS
