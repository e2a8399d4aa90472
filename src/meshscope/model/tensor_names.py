"""Tensor names in Hugging Face checkpoints that differ between families."""

from collections.abc import Mapping

from meshscope.model.model import Family

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def moe_block(family: Family) -> str:
    """Prefix of the router's tensors within a layer."""
    match family:
        case Family.MIXTRAL:
            return "block_sparse_moe.gate."
        case Family.GPT_OSS:
            return "mlp.router."
        case Family.LLAMA4:
            return "feed_forward.router."
        case Family.GEMMA4:
            return "router.proj."
        case Family.DEEPSEEK_V4:
            return "ffn.gate."
        case _:
            return "mlp.gate."


def expert_tensors(family: Family) -> Mapping[str, str]:
    """Tensors of the expert `{expert}`, by role in the gated MLP."""
    match family:
        case Family.MIXTRAL:
            return _gated("block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"))
        case Family.DEEPSEEK_V4:
            return _gated("ffn.experts.{expert}.", ("w1", "w3", "w2"))
        case _:
            return _gated("mlp.experts.{expert}.", PROJECTIONS)


def shared_tensors(family: Family) -> Mapping[str, str]:
    """Tensors of the shared experts, by role in the gated MLP."""
    if family is Family.DEEPSEEK_V4:
        return _gated("ffn.shared_experts.", ("w1", "w3", "w2"))
    if family in {Family.QWEN3_NEXT, Family.QWEN3_5_MOE}:
        return _gated("mlp.shared_expert.", PROJECTIONS)
    base = "feed_forward.shared_expert." if family is Family.LLAMA4 else "mlp.shared_experts."
    return _gated(base, PROJECTIONS)


def dense_tensors(family: Family) -> Mapping[str, str]:
    """Tensors of the MLP of dense layers, by role."""
    return _gated("feed_forward." if family is Family.LLAMA4 else "mlp.", PROJECTIONS)


def norm_tensors(family: Family) -> tuple[str, str]:
    """Tensors of the norms before attention and before the MLP."""
    if family in {Family.GEMMA2, Family.GEMMA3, Family.GEMMA4}:
        return "input_layernorm.weight", "pre_feedforward_layernorm.weight"
    if family is Family.DEEPSEEK_V4:
        return "attn_norm.weight", "ffn_norm.weight"
    return "input_layernorm.weight", "post_attention_layernorm.weight"


# Tensors of the norms after attention and after the MLP, in families that have them.
POST_NORM_TENSORS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
# Scales of an MLP beside experts (Gemma 4): of the MLP's output, and of the experts' input and output.
SIDE_NORM_TENSORS = {
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
}


def head_tensor(family: Family) -> str:
    """Tensor of the output head."""
    return "head.weight" if family is Family.DEEPSEEK_V4 else "lm_head.weight"


def correction_tensor(family: Family) -> str:
    """Tensor of the router's correction bias, within the router."""
    return "bias" if family is Family.DEEPSEEK_V4 else "e_score_correction_bias"


def _gated(base: str, names: tuple[str, str, str]) -> Mapping[str, str]:
    roles = ("gate", "up", "down")
    return {role: f"{base}{name}.weight" for role, name in zip(roles, names, strict=True)}
