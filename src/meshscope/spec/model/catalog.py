"""Built-in model configs with Hugging Face config keys, each with its source."""

from meshscope.spec.model.catalog_dense import DENSE_ENTRIES
from meshscope.spec.model.catalog_entry import (
    AICONFIGURATOR,
    LITGPT,
    MAXTEXT,
    CatalogEntry,
    entry,
    sizes,
)

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
_LONG_QWEN3 = {"max_position_embeddings": 262144}
_QWEN25 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN25_SMALL = _QWEN25 | {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
}
_LLAMA2 = {"model_type": "llama", "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
_LLAMA3_ROPE_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA3 = _LLAMA2 | {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE_SCALING,
    "max_position_embeddings": 131072,
}
_LLAMA3_8K = _LLAMA2 | {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
_LLAMA3_70B = _LLAMA3 | sizes(hidden=8192, mlp=28672, layers=80, heads=64, kv_heads=8)
_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1}
_YARN_40 = {
    "type": "yarn",
    "beta_fast": 32,
    "factor": 40,
    "original_max_position_embeddings": 4096,
}
FP8_BLOCKS = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
}
_DEEPSEEK_V2_LITE = {
    **_DEEPSEEK,
    **sizes(hidden=2048, mlp=10944, layers=27, heads=16, kv_heads=16),
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "vocab_size": 102400,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "rope_scaling": _YARN_40 | {"mscale": 0.707},
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    **FP8_BLOCKS,
    **sizes(hidden=7168, mlp=18432, layers=61, heads=128, kv_heads=128),
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": False,
    "rope_scaling": _YARN | _YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_KIMI_YARN = _YARN_40 | {
    "factor": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 1,
    "beta_slow": 1,
}
_KIMI_K2 = {
    **_DEEPSEEK_V3,
    **sizes(hidden=7168, mlp=18432, layers=61, heads=64, kv_heads=64),
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
    "rope_scaling": _KIMI_YARN,
}
_DEEPSEEK_V32 = _DEEPSEEK_V3 | {
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "compress_rope_theta": 160000,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": _YARN | {"factor": 16, "original_max_position_embeddings": 65536},
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
}
_MIXTRAL_8X7B = {
    **sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8),
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
_GPT_OSS_120B = {
    **sizes(hidden=2880, mlp=2880, layers=36, heads=64, kv_heads=8),
    "model_type": "gpt_oss",
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
_QWEN25_REPORT = (
    "Qwen2.5 report (arXiv 2412.15115, table 1), widths from configs quoted in public code"
)


_ENTRIES = (
    entry(
        "Qwen/Qwen3-32B",
        _QWEN3,
        sizes(hidden=5120, mlp=25600, layers=64, heads=64, kv_heads=8),
        max_position_embeddings=40960,
    ),
    entry(
        "Qwen/Qwen3-8B",
        _QWEN3,
        sizes(hidden=4096, mlp=12288, layers=36, heads=32, kv_heads=8),
        max_position_embeddings=40960,
    ),
    entry(
        "Qwen/Qwen3-4B",
        _QWEN3,
        sizes(hidden=2560, mlp=9728, layers=36, heads=32, kv_heads=8),
        tie_word_embeddings=True,
        source=f"{MAXTEXT}/qwen3-4b.yml",
    ),
    entry(
        "Qwen/Qwen3-0.6B",
        _QWEN3,
        sizes(hidden=1024, mlp=3072, layers=28, heads=16, kv_heads=8),
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    entry(
        "Qwen/Qwen3-1.7B",
        _QWEN3,
        sizes(hidden=2048, mlp=6144, layers=28, heads=16, kv_heads=8),
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    entry(
        "Qwen/Qwen3-14B",
        _QWEN3,
        sizes(hidden=5120, mlp=17408, layers=40, heads=40, kv_heads=8),
        max_position_embeddings=40960,
        source=f"{MAXTEXT}/qwen3-14b.yml",
    ),
    entry(
        "Qwen/Qwen2.5-0.5B",
        _QWEN25_SMALL,
        sizes(hidden=896, mlp=4864, layers=24, heads=14, kv_heads=2),
        source=_QWEN25_REPORT,
    ),
    entry(
        "Qwen/Qwen2.5-1.5B",
        _QWEN25_SMALL,
        sizes(hidden=1536, mlp=8960, layers=28, heads=12, kv_heads=2),
        source=_QWEN25_REPORT,
    ),
    entry(
        "Qwen/Qwen2.5-3B",
        _QWEN25_SMALL,
        sizes(hidden=2048, mlp=11008, layers=36, heads=16, kv_heads=2),
        source=_QWEN25_REPORT,
    ),
    entry(
        "Qwen/Qwen2.5-7B",
        _QWEN25,
        sizes(hidden=3584, mlp=18944, layers=28, heads=28, kv_heads=4),
        source=_QWEN25_REPORT,
    ),
    entry(
        "Qwen/Qwen2.5-14B",
        _QWEN25,
        sizes(hidden=5120, mlp=13824, layers=48, heads=40, kv_heads=8),
        rms_norm_eps=1e-05,
        source=_QWEN25_REPORT,
    ),
    entry(
        "Qwen/Qwen2.5-32B",
        _QWEN25,
        sizes(hidden=5120, mlp=27648, layers=64, heads=40, kv_heads=8),
        rms_norm_eps=1e-05,
        source="quoted config; geometry agrees with GenZ alibaba.py",
    ),
    entry(
        "Qwen/Qwen2.5-72B",
        _QWEN25,
        sizes(hidden=8192, mlp=29568, layers=80, heads=64, kv_heads=8),
        rms_norm_eps=1e-05,
        source=_QWEN25_REPORT,
    ),
    entry(
        "meta-llama/Llama-3.1-8B",
        _LLAMA3,
        sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8),
    ),
    entry(
        "meta-llama/Meta-Llama-3-8B",
        _LLAMA3_8K,
        sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8),
        source=f"{MAXTEXT}/llama3-8b.yml",
    ),
    entry(
        "meta-llama/Meta-Llama-3-70B",
        _LLAMA3_8K,
        sizes(hidden=8192, mlp=28672, layers=80, heads=64, kv_heads=8),
        source=f"{MAXTEXT}/llama3-70b.yml",
    ),
    entry(
        "meta-llama/Llama-3.2-1B",
        _LLAMA3,
        sizes(hidden=2048, mlp=8192, layers=16, heads=32, kv_heads=8),
        head_dim=64,
        rope_scaling=_LLAMA3_ROPE_SCALING | {"factor": 32.0},
        tie_word_embeddings=True,
        source="quoted config of Llama-3.2-1B in public code; rope as Llama-3.2-3B",
    ),
    entry(
        "meta-llama/Llama-3.1-70B",
        _LLAMA3_70B,
    ),
    entry(
        "meta-llama/Llama-3.1-405B",
        _LLAMA3,
        sizes(hidden=16384, mlp=53248, layers=126, heads=128, kv_heads=8),
    ),
    entry(
        "meta-llama/Llama-3.2-3B",
        _LLAMA3,
        sizes(hidden=3072, mlp=8192, layers=28, heads=24, kv_heads=8),
        head_dim=128,
        rope_scaling=_LLAMA3_ROPE_SCALING | {"factor": 32.0},
        tie_word_embeddings=True,
        source="GenZ meta.py geometry, rope and tie fields from a printed LlamaConfig",
    ),
    entry(
        "meta-llama/Llama-3.3-70B",
        _LLAMA3_70B,
        source="ai-dynamo/aiconfigurator@f577ab8 model_configs",
    ),
    entry(
        "meta-llama/Llama-2-13B",
        _LLAMA2,
        sizes(hidden=5120, mlp=13824, layers=40, heads=40, kv_heads=40),
        head_dim=128,
        vocab_size=32000,
        source=f"{MAXTEXT}/llama2-13b.yml",
    ),
    entry(
        "meta-llama/Llama-2-7B",
        _LLAMA2,
        sizes(hidden=4096, mlp=11008, layers=32, heads=32, kv_heads=32),
        vocab_size=32000,
        max_position_embeddings=4096,
        source=f"{MAXTEXT}/llama2-7b.yml",
    ),
    entry(
        "meta-llama/Llama-2-70B",
        _LLAMA2,
        sizes(hidden=8192, mlp=28672, layers=80, heads=64, kv_heads=8),
        vocab_size=32000,
        max_position_embeddings=4096,
        source=f"{MAXTEXT}/llama2-70b.yml",
    ),
    entry(
        "deepseek-ai/DeepSeek-V3.1-Base",
        _DEEPSEEK_V3,
        source=f"{AICONFIGURATOR} (V3; the geometry of V3.1 is the same)",
    ),
    entry(
        "deepseek-ai/DeepSeek-V3",
        _DEEPSEEK_V3,
    ),
    entry(
        "deepseek-ai/DeepSeek-R1",
        _DEEPSEEK_V3,
    ),
    entry("deepseek-ai/DeepSeek-V3.2", _DEEPSEEK_V32),
    entry(
        "deepseek-ai/DeepSeek-V4-Flash-Base",
        _DEEPSEEK_V4,
        source=(
            "defaults of transformers' DeepseekV4Config, which names this checkpoint; compress_ratios "
            "from AI-Hypercomputer/maxtext@00a1eaa configs/models/deepseek4-284b.yml, rope_scaling "
            "from huggingface/transformers pull request 45643"
        ),
    ),
    entry("deepseek-ai/DeepSeek-V4-Flash", _DEEPSEEK_V4, FP8_BLOCKS, expert_dtype="fp4"),
    entry(
        "deepseek-ai/DeepSeek-V4-Pro",
        _DEEPSEEK_V4,
        FP8_BLOCKS,
        expert_dtype="fp4",
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        moe_intermediate_size=3072,
        n_routed_experts=384,
        routed_scaling_factor=2.5,
        index_topk=1024,
        compress_ratios=[128, 128, *[4, 128] * 29, 4],
    ),
    entry(
        "deepseek-ai/DeepSeek-V2-Lite",
        _DEEPSEEK_V2_LITE,
        source=f"{MAXTEXT}/deepseek2-16b.yml",
    ),
    entry("mistralai/Mixtral-8x7B-v0.1", _MIXTRAL_8X7B),
    entry(
        "mistralai/Mixtral-8x22B-v0.1",
        _MIXTRAL_8X7B,
        sizes(hidden=6144, mlp=16384, layers=56, heads=48, kv_heads=8),
        max_position_embeddings=65536,
    ),
    entry(
        "Qwen/Qwen3-Coder-480B-A35B",
        _QWEN3_MOE,
        sizes(hidden=6144, mlp=8192, layers=62, heads=96, kv_heads=8),
        moe_intermediate_size=2560,
        num_experts=160,
        rope_theta=10000000,
        max_position_embeddings=262144,
    ),
    entry("moonshotai/Kimi-K2", _KIMI_K2, max_position_embeddings=131072),
    entry(
        "moonshotai/Kimi-K2.5",
        _KIMI_K2,
        rope_scaling=_KIMI_YARN | {"factor": 64, "beta_fast": 32},
        rms_norm_eps=1e-05,
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
        },
        max_position_embeddings=262144,
        source=f"{AICONFIGURATOR}; the text part",
    ),
    entry(
        "Qwen/Qwen3-4B-Instruct-2507",
        _QWEN3,
        sizes(hidden=2560, mlp=9728, layers=36, heads=32, kv_heads=8),
        _LONG_QWEN3,
        rope_theta=5000000,
        tie_word_embeddings=True,
        source=LITGPT,
    ),
    entry(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        _QWEN3_MOE,
        sizes(hidden=2048, mlp=6144, layers=48, heads=32, kv_heads=4),
        _LONG_QWEN3,
        moe_intermediate_size=768,
        rope_theta=10000000,
        source=LITGPT,
    ),
    entry(
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        _QWEN3_MOE,
        sizes(hidden=4096, mlp=12288, layers=94, heads=64, kv_heads=4),
        _LONG_QWEN3,
        moe_intermediate_size=1536,
        rope_theta=5000000,
        source=LITGPT,
    ),
    entry(
        "Qwen/Qwen3-30B-A3B",
        _QWEN3_MOE,
        sizes(hidden=2048, mlp=6144, layers=48, heads=32, kv_heads=4),
        moe_intermediate_size=768,
    ),
    entry(
        "Qwen/Qwen3-235B-A22B",
        _QWEN3_MOE,
        sizes(hidden=4096, mlp=12288, layers=94, heads=64, kv_heads=4),
        moe_intermediate_size=1536,
    ),
    entry("openai/gpt-oss-120b", _GPT_OSS_120B),
    entry("openai/gpt-oss-20b", _GPT_OSS_120B, num_hidden_layers=24, num_local_experts=32),
)

CATALOG: dict[str, CatalogEntry] = {one.name: one for one in (*_ENTRIES, *DENSE_ENTRIES)}
