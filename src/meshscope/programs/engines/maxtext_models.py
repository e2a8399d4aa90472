"""The models that MaxText has a configuration for, and the axes of its mesh."""

import re
from collections.abc import Mapping

from meshscope.errors import SpecError
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.mechanisms.latent import latent_of
from meshscope.model.model import Model

# Ids on the Hugging Face Hub and the files of `maxtext/configs/models` (0.2.5). The architectures of a
# base model and its tuned versions are the same.
MODELS: Mapping[str, str] = {
    "meta-llama/Llama-2-7B": "llama2-7b",
    "meta-llama/Llama-2-13B": "llama2-13b",
    "meta-llama/Llama-2-70B": "llama2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama3.1-70b",
    "meta-llama/Llama-3.1-405B": "llama3.1-405b",
    "meta-llama/Llama-3.3-70B": "llama3.3-70b",
    "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "Qwen/Qwen2.5-14B": "qwen2.5-14b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "mistralai/Mixtral-8x7B": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B": "mixtral-8x22b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek2-16b",
}
_TUNED = re.compile(r"(-v0\.1)?(-Instruct|-Base|-Chat|-chat|-it)?(-v0\.1|-2507)?$")
# MaxText's axes by those of a plan. An axis of experts holds the batch of everything else, too.
AXES: Mapping[str, str] = {"tp": "tensor", "fsdp": "fsdp", "dp": "data"}


def maxtext_model(model: Model) -> str:
    """MaxText's name of the model; SpecError if it has none."""
    names = {name.lower(): value for name, value in MODELS.items()}
    name = _TUNED.sub("", model.name).lower()
    if name not in names:
        raise SpecError(
            f"{model.name}: MaxText has no configuration of this model that meshscope knows. Use "
            f"--frontend jax, or one of {', '.join(MODELS)}."
        )
    return names[name]


def sizes_of(model: Model) -> dict[str, int]:
    """The model's sizes by MaxText's names, for a comparison with its configuration."""
    moe = model.moe
    sizes = {
        "emb_dim": model.hidden,
        "num_decoder_layers": model.n_layers,
        "vocab_size": model.vocab,
    }
    if model.attention.mechanism is Mechanism.GROUPED:
        attention = grouped_of(model.attention)
        sizes |= {
            "num_query_heads": attention.n_heads,
            "num_kv_heads": attention.n_kv_heads,
            "head_dim": attention.head_dim,
        }
    if model.attention.mechanism is Mechanism.LATENT:
        latent = latent_of(model.attention)
        sizes |= {
            "num_query_heads": latent.n_heads,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
        }
    if model.ffn is not None:
        sizes["mlp_dim"] = model.ffn
    if moe is not None:
        sizes |= {
            "num_experts": moe.n_experts,
            "num_experts_per_tok": moe.n_active,
            "moe_mlp_dim": moe.ffn,
        }
    return sizes
