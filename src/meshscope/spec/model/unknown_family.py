"""Which family is nearest to an unknown architecture, and what it lacks."""

import os
from collections.abc import Mapping
from typing import Any

from meshscope.spec.model.model import HYBRID_FAMILIES, Family

LATENT = frozenset(
    {
        *(Family.DEEPSEEK_V2, Family.DEEPSEEK_V3, Family.DEEPSEEK_V32, Family.DEEPSEEK_V4),
        Family.GLM_MOE_DSA,
    }
)
EXPERTS = frozenset(
    {
        *(Family.MIXTRAL, Family.QWEN3_MOE, Family.QWEN3_NEXT, Family.QWEN3_5_MOE),
        *(Family.GPT_OSS, Family.GLM4_MOE, Family.LLAMA4, Family.GEMMA4),
        *LATENT,
    }
)
GEMMA = frozenset({Family.GEMMA2, Family.GEMMA3})
GEMMA4 = frozenset({Family.GEMMA4})
GEMMA4_KEYS = ("num_kv_shared_layers", "hidden_size_per_layer_input", "global_head_dim")
NO_FAMILY: frozenset[Family] = frozenset()
# Keys of configs that name a part of an architecture, what it is, and the families that have it.
PARTS: Mapping[str, tuple[str, frozenset[Family]]] = {
    "linear_num_key_heads": ("gated linear attention", HYBRID_FAMILIES),
    "linear_attn_config": ("linear attention", NO_FAMILY),
    "ssm_state_size": ("state space layers", NO_FAMILY),
    "mamba_num_heads": ("state space layers", NO_FAMILY),
    "state_size": ("state space layers", NO_FAMILY),
    "attn_output_gate": ("output gate of attention", HYBRID_FAMILIES),
    "num_kv_shared_layers": ("caches that layers share", GEMMA4),
    "hidden_size_per_layer_input": ("embeddings of each layer", GEMMA4),
    "global_head_dim": ("wider heads in some layers", GEMMA4),
    "kv_lora_rank": ("latent attention", LATENT),
    "num_experts": ("experts", EXPERTS),
    "num_local_experts": ("experts", EXPERTS),
    "n_routed_experts": ("experts", EXPERTS),
    "query_pre_attn_scalar": ("Gemma's scale of scores", GEMMA),
}


def unknown_family(model_type: str, config: Mapping[str, Any]) -> str:
    """The sentences of an error: the nearest family, what it lacks, and all families."""
    nearest = _nearest(model_type, config)
    lacking = dict.fromkeys(
        f"{part} ({key})"
        for key, (part, families) in PARTS.items()
        if config.get(key) and nearest not in families
    )
    differs = f", which has no {' and no '.join(lacking)}" if lacking else ""
    return (
        f"model family '{model_type}' is not supported. The nearest is '{nearest}'{differs}; a config with "
        f"that model_type is read as one. Supported: {', '.join(Family)}."
    )


def _nearest(model_type: str, config: Mapping[str, Any]) -> Family:
    """The family with the most parts of the config; then the one whose name starts most alike.

    Another release of Gemma is nearest to Gemma, whose norms and windows no key names.
    """
    if model_type.startswith("gemma"):
        return Family.GEMMA4 if any(config.get(key) for key in GEMMA4_KEYS) else Family.GEMMA3
    present = {part for key, (part, _) in PARTS.items() if config.get(key)}
    known = dict(PARTS.values())

    def shared(family: Family) -> tuple[int, int]:
        agreeing = [part for part in known if (family in known[part]) == (part in present)]
        return len(agreeing), len(os.path.commonprefix([model_type, family.value]))  # noqa: RUF071

    return max(Family, key=shared)
