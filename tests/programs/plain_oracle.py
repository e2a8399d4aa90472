"""Ling, DeepSeek-MoE and Grok-2 in plain NumPy, float32: an oracle for families that transformers lacks.

Written from modeling_bailing_moe_v2.py of inclusionAI/Ling-V2@efee9bb, from the description of DeepSeekMoE
(arXiv 2401.06066, section 3) and from the model of Grok-2 in sgl-project/sglang-jax, with nothing of the programs: a config,
and tensors [out, in] by their names in the checkpoint. Every step passes the whole sequence.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray
Tensor = Callable[[str], Array]


def logits(config: Mapping[str, Any], tensor: Tensor, tokens: list[int]) -> Array:
    """The logits [vocab] after the tokens of one sequence."""
    is_grok, is_ling = (config["model_type"] == name for name in ("git", "bailing_moe"))
    x = tensor("model.word_embeddings.weight" if is_ling else "model.embed_tokens.weight")[tokens]
    x = x * config.get("embedding_multiplier_scale", 1.0)
    for number in range(config["num_hidden_layers"]):
        x = _layer(x, config, partial(_of_layer, tensor, number))
    out = tensor("lm_head.weight") @ _normed(x[-1], tensor("model.norm.weight"), config)
    out = out * config.get("output_multiplier_scale", 1.0)
    return _capped(out, config["final_logit_softcapping"]) if is_grok else out


def _of_layer(tensor: Tensor, number: int, name: str) -> Array:
    return tensor(f"model.layers.{number}.{name}{'' if name.endswith('bias') else '.weight'}")


def _layer(x: Array, config: Mapping[str, Any], tensor: Tensor) -> Array:
    if config["model_type"] == "git":
        out = _attention(_normed(x, tensor("pre_attn_norm"), config), config, tensor)
        x = x + _normed(out, tensor("post_attn_norm"), config)
        h = _normed(x, tensor("pre_moe_norm"), config)
        both = _mlp(h, "mlp.", tensor, _gelu) + _grok_experts(h, config, tensor)
        return x + _normed(both / np.sqrt(2), tensor("post_moe_norm"), config)
    x = x + _attention(_normed(x, tensor("input_layernorm"), config), config, tensor)
    h = _normed(x, tensor("post_attention_layernorm"), config)
    try:
        tensor("mlp.gate")
    except KeyError:
        return x + _mlp(h, "mlp.", tensor, _silu)
    return x + _mlp(h, "mlp.shared_experts.", tensor, _silu) + _experts(h, config, tensor)


def _attention(x: Array, config: Mapping[str, Any], tensor: Tensor) -> Array:
    n, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // n
    if config["model_type"] == "bailing_moe":
        heads = (x @ tensor("attention.query_key_value").T).reshape(len(x), -1, width)
        q, k, v = heads[:, :n], heads[:, n : n + n_kv], heads[:, n + n_kv :]
        if config["use_qk_norm"]:
            q = _normed(q, tensor("attention.query_layernorm"), config)
            k = _normed(k, tensor("attention.key_layernorm"), config)
        out_name = "attention.dense"
    else:
        q, k, v = (
            (x @ tensor(f"self_attn.{name}_proj").T).reshape(len(x), -1, width) for name in "qkv"
        )
        out_name = "self_attn.o_proj"
    q, k = _rotated(q, config), _rotated(k, config)
    length = config.get("attn_temperature_len")
    if length:
        at = np.arange(len(x))
        q = (
            q
            * np.where(at > length, np.log2(np.maximum(at, 1)) / np.log2(length), 1)[:, None, None]
        )
    k, v = (np.repeat(one, n // n_kv, axis=1) for one in (k, v))
    scores = np.einsum("snh,tnh->nst", q, k) * width**-0.5
    if config.get("attn_logit_softcapping"):
        scores = _capped(scores, config["attn_logit_softcapping"])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    out = np.einsum("nst,tnh->snh", _softmax(scores), v)
    return out.reshape(len(x), -1) @ tensor(out_name).T


def _rotated(x: Array, config: Mapping[str, Any]) -> Array:
    n_turned = int(x.shape[-1] * config.get("partial_rotary_factor", 1.0))
    speeds = config["rope_theta"] ** (-np.arange(0, n_turned, 2) / n_turned)
    angles = np.arange(len(x))[:, None, None] * speeds
    first, second, rest = np.split(x, [n_turned // 2, n_turned], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _experts(x: Array, config: Mapping[str, Any], tensor: Tensor) -> Array:
    logits = x @ tensor("mlp.gate").T
    is_sigmoid = config.get("score_function") == "sigmoid"
    scores = _sigmoid(logits) if is_sigmoid else _softmax(logits)
    out = np.zeros_like(x)
    for row, of_token in enumerate(scores):
        chosen = of_token.copy()
        if is_sigmoid:
            chosen = chosen + tensor("mlp.gate.expert_bias")
            groups = chosen.reshape(config["n_group"], -1)
            best = np.sort(groups, axis=1)[:, -2:].sum(axis=1).argsort()[-config["topk_group"] :]
            is_open = np.isin(np.arange(config["n_group"]), best)[:, None]
            chosen = np.where(is_open, groups, -np.inf).ravel()
        experts = chosen.argsort()[-config["num_experts_per_tok"] :]
        shares = of_token[experts]
        if config.get("norm_topk_prob", False):
            shares = shares / shares.sum()
        for expert, share in zip(experts, shares, strict=True):
            of_expert = _mlp(x[row], f"mlp.experts.{expert}.", tensor, _silu)
            out[row] += share * config.get("routed_scaling_factor", 1.0) * of_expert
    return out


def _grok_experts(x: Array, config: Mapping[str, Any], tensor: Tensor) -> Array:
    logits = _capped(x @ tensor("block_sparse_moe.gate").T, config["router_logit_softcapping"])
    out = np.zeros_like(x)
    for row, of_token in enumerate(logits):
        experts = of_token.argsort()[-config["num_experts_per_tok"] :]
        for expert, share in zip(experts, _softmax(of_token[experts]), strict=True):
            gate, up, down = (tensor(f"block_sparse_moe.experts.{expert}.w{n}") for n in (1, 3, 2))
            out[row] += share * (down @ (_gelu(gate @ x[row]) * (up @ x[row])))
    return out


def _mlp(x: Array, base: str, tensor: Tensor, activation: Callable[[Array], Array]) -> Array:
    gate, up, down = (tensor(f"{base}{name}_proj") for name in ("gate", "up", "down"))
    return (activation(x @ gate.T) * (x @ up.T)) @ down.T


def _normed(x: Array, weight: Array, config: Mapping[str, Any]) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _gelu(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _capped(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap)
