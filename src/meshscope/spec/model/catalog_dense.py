"""Configs of Gemma, Mistral, Phi and GLM with their sources."""

from typing import Any

from meshscope.spec.model.catalog_entry import LITGPT, MAXTEXT, CatalogEntry, entry, sizes

_SLIME = "THUDM/slime@624b824 scripts/models"
_GEMMA_2: dict[str, Any] = {
    "model_type": "gemma2",
    "head_dim": 256,
    "vocab_size": 256000,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
_GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "head_dim": 128,
}
_MISTRAL_7B = _MISTRAL | sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8)
_PHI_3: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 32064,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    **sizes(hidden=3072, mlp=8192, layers=32, heads=32, kv_heads=32),
}
_PHI_4: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 100352,
    "rms_norm_eps": 1e-05,
    **sizes(hidden=5120, mlp=17920, layers=40, heads=40, kv_heads=10),
}
_GLM_45: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "head_dim": 128,
    "vocab_size": 151552,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 131072,
}
_GLM_45_355B = {
    **_GLM_45,
    **sizes(hidden=5120, mlp=12288, layers=92, heads=96, kv_heads=8),
    "use_qk_norm": True,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}

DENSE_ENTRIES: tuple[CatalogEntry, ...] = (
    entry(
        "google/gemma-2-2b",
        _GEMMA_2,
        sizes(hidden=2304, mlp=9216, layers=26, heads=8, kv_heads=4),
        source="defaults of transformers' Gemma2Config; litgpt and maxtext agree",
    ),
    entry(
        "google/gemma-2-9b",
        _GEMMA_2,
        sizes(hidden=3584, mlp=14336, layers=42, heads=16, kv_heads=8),
        source=f"{LITGPT}; {MAXTEXT}/gemma2-9b.yml",
    ),
    entry(
        "google/gemma-2-27b",
        _GEMMA_2,
        sizes(hidden=4608, mlp=36864, layers=46, heads=32, kv_heads=16),
        head_dim=128,
        query_pre_attn_scalar=144,
        source=f"{LITGPT}; {MAXTEXT}/gemma2-27b.yml",
    ),
    entry(
        "google/gemma-3-1b-it",
        _GEMMA_3,
        sizes(hidden=1152, mlp=6912, layers=26, heads=4, kv_heads=1),
        rope_scaling=None,
        sliding_window=512,
        max_position_embeddings=32768,
        vocab_size=262144,
        source=LITGPT,
    ),
    entry(
        "google/gemma-3-4b-it",
        _GEMMA_3,
        sizes(hidden=2560, mlp=10240, layers=34, heads=8, kv_heads=4),
        source=f"{LITGPT}; {MAXTEXT}/gemma3-4b.yml; the text part",
    ),
    entry(
        "google/gemma-3-12b-it",
        _GEMMA_3,
        sizes(hidden=3840, mlp=15360, layers=48, heads=16, kv_heads=8),
        source=f"{LITGPT}; {MAXTEXT}/gemma3-12b.yml; the text part",
    ),
    entry(
        "google/gemma-3-27b-it",
        _GEMMA_3,
        sizes(hidden=5376, mlp=21504, layers=62, heads=32, kv_heads=16),
        head_dim=128,
        query_pre_attn_scalar=168,
        source=f"{LITGPT}; {MAXTEXT}/gemma3-27b.yml; the text part",
    ),
    entry(
        "mistralai/Mistral-7B-v0.1",
        _MISTRAL_7B,
        rope_theta=10000.0,
        sliding_window=4096,
        vocab_size=32000,
        source=f"{LITGPT}; {MAXTEXT}/mistral-7b.yml",
    ),
    entry(
        "mistralai/Mistral-7B-Instruct-v0.2",
        _MISTRAL_7B,
        vocab_size=32000,
        source=LITGPT,
    ),
    entry(
        "mistralai/Mistral-7B-v0.3",
        _MISTRAL_7B,
        source=LITGPT,
    ),
    entry(
        "mistralai/Ministral-8B-Instruct-2410",
        _MISTRAL,
        sizes(hidden=4096, mlp=12288, layers=36, heads=32, kv_heads=8),
        rope_theta=100000000.0,
        sliding_window=32768,
        vocab_size=131072,
        source="the config.json as NX-AI/mlstm_kernels quotes it",
    ),
    entry(
        "mistralai/Ministral-3-8B-Base-2512",
        {"model_type": "ministral3", "head_dim": 128, "rms_norm_eps": 1e-05},
        sizes(hidden=4096, mlp=14336, layers=34, heads=32, kv_heads=8),
        vocab_size=131072,
        max_position_embeddings=262144,
        source="defaults of transformers' Ministral3Config, which names this checkpoint; the text part",
    ),
    entry(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _MISTRAL,
        sizes(hidden=5120, mlp=32768, layers=40, heads=32, kv_heads=8),
        rope_theta=100000000.0,
        vocab_size=131072,
        source="the config.json as quoted in public tests of other engines",
    ),
    entry(
        "mistralai/Mistral-Large-Instruct-2407",
        _MISTRAL,
        sizes(hidden=12288, mlp=28672, layers=88, heads=96, kv_heads=8),
        max_position_embeddings=None,
        source=f"{LITGPT}, without its context",
    ),
    entry(
        "microsoft/Phi-3-mini-4k-instruct",
        _PHI_3,
        sliding_window=2047,
        max_position_embeddings=4096,
        source=f"defaults of transformers' Phi3Config, which names this checkpoint; {LITGPT}",
    ),
    entry(
        "microsoft/phi-4",
        _PHI_4,
        rope_theta=250000.0,
        max_position_embeddings=16384,
        source=LITGPT,
    ),
    entry(
        "microsoft/Phi-4-reasoning",
        _PHI_4,
        rope_theta=500000.0,
        max_position_embeddings=32768,
        source=LITGPT,
    ),
    entry(
        "zai-org/GLM-4.5-Air",
        _GLM_45,
        sizes(hidden=4096, mlp=10944, layers=46, heads=96, kv_heads=8),
        moe_intermediate_size=1408,
        n_routed_experts=128,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        source=f"{_SLIME}/glm4.5-106B-A12B.sh; defaults of transformers' Glm4MoeConfig",
    ),
    entry(
        "zai-org/GLM-4.5",
        _GLM_45_355B,
        source=f"{_SLIME}/glm4.5-355B-A32B.sh",
    ),
)
