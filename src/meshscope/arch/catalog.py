"""Model configs that come with meshscope, as Hugging Face config keys, each with where it was read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A published config under the id of its model."""

    name: str
    config: Mapping[str, Any]
    source: str


_ENTRIES = (
    CatalogEntry(
        name="Qwen/Qwen3-32B",
        source="ai-dynamo/aiconfigurator@095f58a model_configs",
        config={
            "model_type": "qwen3",
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
        },
    ),
    CatalogEntry(
        name="Qwen/Qwen3-8B",
        source="ai-dynamo/aiconfigurator@095f58a model_configs",
        config={
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
        },
    ),
    CatalogEntry(
        name="Qwen/Qwen3-4B",
        source="AI-Hypercomputer/maxtext@e591f30 configs/models/qwen3-4b.yml",
        config={
            "model_type": "qwen3",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
        },
    ),
    CatalogEntry(
        name="Qwen/Qwen2.5-32B",
        source="quoted config; geometry agrees with GenZ alibaba.py",
        config={
            "model_type": "qwen2",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 131072,
        },
    ),
    CatalogEntry(
        name="meta-llama/Llama-3.1-8B",
        source="ai-dynamo/aiconfigurator@095f58a model_configs",
        config={
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        },
    ),
    CatalogEntry(
        name="meta-llama/Llama-3.1-70B",
        source="ai-dynamo/aiconfigurator@095f58a model_configs",
        config={
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        },
    ),
    CatalogEntry(
        name="meta-llama/Llama-3.1-405B",
        source="ai-dynamo/aiconfigurator@095f58a model_configs",
        config={
            "model_type": "llama",
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        },
    ),
    CatalogEntry(
        name="meta-llama/Llama-3.2-3B",
        source="GenZ meta.py geometry, rope and tie fields from a printed LlamaConfig",
        config={
            "model_type": "llama",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    ),
    CatalogEntry(
        name="meta-llama/Llama-3.3-70B",
        source="ai-dynamo/aiconfigurator@f577ab8 model_configs",
        config={
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        },
    ),
    CatalogEntry(
        name="meta-llama/Llama-2-13B",
        source="AI-Hypercomputer/maxtext@e591f30 configs/models/llama2-13b.yml",
        config={
            "model_type": "llama",
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "head_dim": 128,
            "vocab_size": 32000,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
        },
    ),
)

CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}
