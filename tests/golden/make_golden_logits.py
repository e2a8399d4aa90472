"""Tiny random models in `transformers`: the logits of a prompt and 16 greedy steps.

Names with a dtype are the same models with dequantized 8-bit weights.

Run: make golden, or this file with names of configs. Writes logits/NAME.npz; needs torch and
transformers. Weights have the names of published checkpoints and are made again from their names.
"""

import json
import sys
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DIRECTORY = Path(__file__).parent / "logits"
BATCH, PROMPT, N_DECODE = 8, 16, 16

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 101,  # no multiple of any tp: the vocabulary is padded
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "initializer_range": 0.2,  # large enough that logits differ between tokens
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
LATENT: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
}
COMPRESSED: dict[str, Any] = {key: BASE[key] for key in BASE if key != "intermediate_size"} | {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 8,
    "o_lora_rank": 4,
    "sliding_window": 6,
    "compress_rate_csa": 4,
    "compress_rate_hca": 8,
    "index_n_heads": 24,  # so many that none of the sums of rectified products is zero
    "index_head_dim": 16,
    "index_topk": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "swiglu_limit": 0.5,  # low enough to cut
    "hc_mult": 3,
    "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"},
}
GROUPED: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
GEMMA: dict[str, Any] = GROUPED | {"query_pre_attn_scalar": 24, "sliding_window": 5}
HYBRID: dict[str, Any] = GROUPED | {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
GEMMA4: dict[str, Any] = (
    {key: value for key, value in BASE.items() if key != "rope_theta"}
    | GROUPED
    | {"model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "final_logit_softcapping": 3.0}
    | {"hidden_size_per_layer_input": 0, "pad_token_id": 0}
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000.0,
            },
        }
    }
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE
    | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "mlp_bias": True}
    | {"attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "llama-tied": BASE
    | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}
    | {"tie_word_embeddings": True},
    "qwen2": BASE | {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": BASE
    | {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "mistral": BASE | GROUPED | {"model_type": "mistral", "sliding_window": 5},
    "ministral": BASE
    | GROUPED
    | {"model_type": "ministral", "sliding_window": 5}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {key: value for key, value in BASE.items() if key != "rope_theta"}
    | GROUPED
    | {"model_type": "ministral3", "pad_token_id": 0}
    | {
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    },
    "phi3": BASE
    | {"model_type": "phi3", "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"hidden_size": 64, "pad_token_id": 0, "partial_rotary_factor": 0.5}
    | {"original_max_position_embeddings": 8}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.5, 4.0]}},
    "phi4": BASE
    | {"model_type": "phi3", "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"hidden_size": 64, "pad_token_id": 0, "sliding_window": 7},
    "gemma2": BASE
    | GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": BASE
    | GEMMA
    | {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2}
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 1_000.0}
    | {"rope_local_base_freq": 100.0},
    "gemma4": GEMMA4,
    "gemma4-moe": GEMMA4
    | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4-shared": {key: value for key, value in GEMMA4.items() if "global_key" not in key}
    | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    | {"attention_k_eq_v": False, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": BASE["vocab_size"]},
    "glm4_moe": BASE
    | GROUPED
    | {
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "attention_bias": True,
        "num_hidden_layers": 3,
    }
    | {"partial_rotary_factor": 0.5, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"n_shared_experts": 1, "moe_intermediate_size": 16, "routed_scaling_factor": 2.0},
    "llama4": BASE
    | GROUPED
    | {"model_type": "llama4_text", "num_hidden_layers": 4, "intermediate_size": 16}
    | {"intermediate_size_mlp": 64, "num_local_experts": 8, "num_experts_per_tok": 1}
    | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 8}
    | {"floor_scale": 4, "attn_scale": 0.5, "pad_token_id": 0},
    "mixtral": BASE
    | {"model_type": "mixtral", "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": BASE
    | {"model_type": "qwen3_moe", "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    | {"norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen3_next": BASE
    | HYBRID
    | {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5": BASE
    | HYBRID
    | {"model_type": "qwen3_5_text", "linear_num_key_heads": 8, "linear_num_value_heads": 24},
    "qwen3_5_moe": BASE
    | HYBRID
    | {"model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "gpt_oss": BASE
    | {"model_type": "gpt_oss", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    | {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": YARN | {"truncate": False}},
    "deepseek_v2": BASE
    | LATENT
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 1}
    | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v2-limited": BASE
    | LATENT
    | {"model_type": "deepseek_v2", "q_lora_rank": 16, "topk_method": "group_limited_greedy"}
    | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0, "attention_bias": True},
    "deepseek_v3": BASE
    | LATENT
    | {"model_type": "deepseek_v3", "q_lora_rank": 16, "first_k_dense_replace": 1}
    | {"num_hidden_layers": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v4": COMPRESSED | {"compress_ratios": [0, 4, 128, 4, 128, 4], "num_hash_layers": 2},
    "glm_moe_dsa": BASE
    | LATENT
    | {"model_type": "glm_moe_dsa", "q_lora_rank": 16, "first_k_dense_replace": 1}
    | {"num_hidden_layers": 3, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.0}
    | {"v_head_dim": 16, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 8},
    "glm_moe_dsa-shared": BASE
    | LATENT
    | {"model_type": "glm_moe_dsa", "q_lora_rank": 16, "first_k_dense_replace": 1}
    | {"num_hidden_layers": 6, "index_topk_freq": 2, "index_skip_topk_offset": 3}
    | {"v_head_dim": 16, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 4},
    "glm4_moe_lite": {key: value for key, value in BASE.items() if key != "rms_norm_eps"}
    | LATENT
    | {"model_type": "glm4_moe_lite", "q_lora_rank": 16, "num_hidden_layers": 3},
    "deepseek_v32": BASE
    | LATENT
    | {"model_type": "deepseek_v32", "q_lora_rank": 16, "first_k_dense_replace": 1}
    | {"n_group": 2, "topk_group": 1, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 8},
}

# The stored logits of these are for the dequantized weights of the first name.
QUANTIZED = {
    "qwen3-s8": ("qwen3", "s8"),
    "qwen3-f8e4m3fn": ("qwen3", "f8e4m3fn"),
    "llama-tied-s8": ("llama-tied", "s8"),
    "gpt_oss-s8": ("gpt_oss", "s8"),
    "deepseek_v3-s8": ("deepseek_v3", "s8"),
    "deepseek_v3-block8": ("deepseek_v3", "block8"),
    "qwen3-s4_group8": ("qwen3", "s4_group8"),
    "gemma3-s4_channel": ("gemma3", "s4_channel"),
    "qwen3-mxfp4_group8": ("qwen3", "mxfp4_group8"),
}
# 8-bit weights and activations: the config, the dtype, and the tp devices that scale their own activations.
NARROW = {
    "qwen3-s8_w8a8": ("qwen3", "s8", 1),
    "qwen3-s8_w8a8-tp4": ("qwen3", "s8", 4),
    "llama-f8e4m3fn_w8a8-tp2": ("llama", "f8e4m3fn", 2),
    "qwen3_moe-s8_w8a8": ("qwen3_moe", "s8", 1),
    "qwen3_moe-s8_w8a8-tp4": ("qwen3_moe", "s8", 4),
    "deepseek_v3-s8_w8a8-tp2": ("deepseek_v3", "s8", 2),
    "qwen3_next-s8_w8a8-tp2": ("qwen3_next", "s8", 2),
    "qwen3_5-f8e4m3fn_w8a8-tp2": ("qwen3_5", "f8e4m3fn", 2),
    "deepseek_v32-s8_w8a8-tp2": ("deepseek_v32", "s8", 2),
    "glm_moe_dsa-shared-s8_w8a8-tp2": ("glm_moe_dsa-shared", "s8", 2),
    "deepseek_v4-s8_w8a8-tp2": ("deepseek_v4", "s8", 2),
}
BLOCK = 8  # rows and columns that share a scale; DeepSeek-V3 has 128
TABLES = ("embed_tokens", "lm_head")  # that stay in bfloat16 if blocks have scales
WIDE = (  # in names of tensors that stay in bfloat16
    *("norm", "bias", "sinks", "mlp.gate.", "router", "shared_expert_gate", "weights_proj"),
    *("conv1d", "A_log", "in_proj_ba", "in_proj_b.", "in_proj_a."),
    *("_hc.", "hc_head", "tid2eid", "compressor.kv_proj", "compressor.gate_proj"),
    *("compressor.indexer.kv_proj", "compressor.indexer.gate_proj"),
)


def quantized_model(name: str, dtype: str, *, has_wide_tables: bool = False) -> Any:
    """The same model with matrices rounded to 8 bits, and a scale per output channel or block."""
    import torch  # noqa: PLC0415  only the oracle needs it

    model = oracle_model(name)
    has_wide_tables |= dtype == "block8" or dtype.startswith(("s4", "mxfp4"))
    wide = (*WIDE, *TABLES) if has_wide_tables else WIDE
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if any(part in tensor_name for part in wide):
                tensor.copy_(tensor.bfloat16())
            elif dtype == "block8":
                tensor.copy_(_rounded_blocks(tensor))
            elif dtype == "s4_group8":
                tensor.copy_(_rounded(tensor.unflatten(-1, (-1, BLOCK)), -1, "s4").flatten(-2))
            elif dtype == "mxfp4_group8":
                tensor.copy_(_rounded_mxfp4(tensor.unflatten(-1, (-1, BLOCK))).flatten(-2))
            elif dtype == "s4_channel":
                tensor.copy_(_rounded(tensor, -1, "s4"))
            else:
                # gpt-oss has experts [E, in, out], all other matrices are [out, in]
                dim = -2 if name == "gpt_oss" and "experts" in tensor_name else -1
                tensor.copy_(_rounded(tensor, dim, dtype))
    return model


def narrow_model(name: str, dtype: str, n_devices: int) -> Any:
    """The quantized model whose layers round the inputs of every product, by a scale for each token.

    Up-projections of latents take them as they are. The products that tp sums over devices have a scale for each of the `n_devices` parts of their inputs.
    """
    import torch  # noqa: PLC0415  only the oracle needs it

    model = quantized_model(name, dtype, has_wide_tables=True)
    for module_name, module in model.model.named_modules():
        if module_name.endswith("kv_b_proj") or any(part in f"{module_name}." for part in WIDE):
            continue  # decode multiplies the up-projection with queries and outputs, not with latents
        if isinstance(module, torch.nn.Linear):
            is_summed = module_name.endswith(("o_proj", "o_b_proj", "out_proj", "down_proj"))
            n_parts = n_devices if is_summed else 1
            module.register_forward_pre_hook(
                lambda _, inputs, n=n_parts: _rounded_parts(inputs[0], n, dtype)
            )
        elif module_name.endswith("mlp.experts"):
            module.forward = partial(_narrow_experts, module, n_devices, dtype)
    return model


def _narrow_experts(  # noqa: PLR0917  as the module's own, and how inputs are rounded
    experts: Any, n_parts: int, dtype: str, x: Any, top_k_index: Any, top_k_weights: Any
) -> Any:
    """The weighted sum of experts for tokens x [T, D], with rounded inputs of both products."""
    import torch  # noqa: PLC0415  only the oracle needs it

    def gated(both: Any) -> Any:
        gate, up = both.chunk(2, dim=-1)
        return experts.act_fn(gate) * up

    gated = getattr(experts, "_apply_gate", gated)  # DeepSeek-V4 has its own
    rounded, out = _rounded_parts(x, 1, dtype), torch.zeros_like(x)
    for expert in range(len(experts.down_proj)):
        inner = gated(rounded @ experts.gate_up_proj[expert].T)
        inner = _rounded_parts(inner, n_parts, dtype)
        share = (top_k_weights * (top_k_index == expert)).sum(dim=-1, keepdim=True)
        out += inner @ experts.down_proj[expert].T * share
    return out


def _rounded_parts(x: Any, n_parts: int, dtype: str) -> Any:
    """Activations [..., width] rounded in parts of the width."""
    return _rounded(x.unflatten(-1, (n_parts, -1)), -1, dtype).flatten(-2)


def _rounded(matrix: Any, dim: int, dtype: str) -> Any:
    """The matrix as 8-bit or 4-bit values times scales, whose inputs are along `dim`.

    Int4 has bfloat16 scales.
    """
    import torch  # noqa: PLC0415  only the oracle needs it

    largest = {"s4": 7, "s8": 127, "f8e4m3fn": 448}[dtype]
    scale = matrix.abs().amax(dim=dim, keepdim=True) / largest
    scale = scale.bfloat16().float() if dtype == "s4" else scale
    values = matrix / scale
    return scale * (
        values.to(torch.float8_e4m3fn).float() if dtype == "f8e4m3fn" else values.round()
    )


def _rounded_mxfp4(groups: Any) -> Any:
    """Groups [..., inputs] as numbers of e2m1 times powers of two (OCP MX 1.0, section 6.3)."""
    import ml_dtypes  # noqa: PLC0415  only the oracle needs them
    import torch  # noqa: PLC0415

    scale = 2.0 ** (groups.abs().amax(dim=-1, keepdim=True).log2().floor() - 2)
    values = (groups / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    return scale * torch.from_numpy(values.astype(np.float32))


def _rounded_blocks(matrix: Any) -> Any:
    """The matrix [..., out, in] as fp8 values times scales of square blocks."""
    import torch  # noqa: PLC0415  only the oracle needs it

    *lead, n_out, n_in = matrix.shape
    blocks = matrix.reshape(*lead, n_out // BLOCK, BLOCK, n_in // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(-3, -1), keepdim=True) / 448
    return (scale * (blocks / scale).to(torch.float8_e4m3fn).float()).reshape(matrix.shape)


def oracle_model(name: str) -> Any:
    """The Hugging Face model of this config with the weights of `weights_of`, in float32."""
    import torch  # noqa: PLC0415  only the oracle needs it
    import transformers  # noqa: PLC0415
    from safetensors.numpy import save_file  # noqa: PLC0415  comes with transformers

    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        save_file(weights_of(name), Path(directory) / "model.safetensors", {"format": "pt"})
        model, problems = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    assert not any(problems.values()), problems
    return model.eval()


class Spread(NamedTuple):
    """Shape, mean and standard deviation of the random values of a tensor."""

    shape: list[int]
    mean: float
    std: float


def weights_of(name: str) -> dict[str, np.ndarray]:
    """Random weights by checkpoint name, each with its name as seed, representable in float16."""
    with np.load(DIRECTORY / f"{name}.npz") as stored:
        spreads = {
            key: Spread(*spread) for key, spread in json.loads(str(stored["spreads"])).items()
        }
    return {key: _random(key, spread, CONFIGS[name]) for key, spread in spreads.items()}


def _random(name: str, spread: Spread, config: dict[str, Any]) -> np.ndarray:
    """The legacy generator's stream is frozen (NumPy's NEP 19), so the values never change."""
    generator = np.random.RandomState(zlib.crc32(name.encode()))
    if name.endswith("tid2eid"):  # the experts of each token ID, all different
        n_tokens, n_active = spread.shape
        order = generator.random_sample((n_tokens, config["n_routed_experts"])).argsort(axis=1)
        return np.ascontiguousarray(order[:, :n_active])
    values = spread.mean + spread.std * generator.standard_normal(spread.shape)
    return values.astype(np.float16).astype(np.float32)


def spreads_of(name: str) -> dict[str, Spread]:
    """How `transformers` starts the tensors that it saves; constants get some noise, not to hide a mistake."""
    import torch  # noqa: PLC0415  only the oracle needs it
    import transformers  # noqa: PLC0415
    from safetensors.numpy import load_file  # noqa: PLC0415  comes with transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    with tempfile.TemporaryDirectory() as directory:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        stored = load_file(Path(directory) / "model.safetensors")
    spreads = {}
    for key, tensor in stored.items():
        mean, std = float(tensor.mean()), float(tensor.std())
        if std < 1e-6:
            std = 0.3 if config.model_type == "deepseek_v4" and "norm" not in key else 0.1
        if config.model_type == "gemma4_text" and "q_norm" in key:
            mean, std = (
                mean / 4,
                std / 4,
            )  # scores are not divided by the width of heads: else one key wins
        if key.endswith("A_log"):
            mean -= 3.0  # slow decays: else a state forgets a position at the next one
        spreads[key] = Spread(list(tensor.shape), round(mean, 3), round(std, 3))
    return spreads


def greedy_logits(model: Any, prompt: np.ndarray) -> np.ndarray:
    """Logits [1 + N_DECODE, BATCH, vocab] of the last position, each step fed its own argmax."""
    import torch  # noqa: PLC0415  only the oracle needs it

    tokens, logits = torch.tensor(prompt), []
    with torch.no_grad():
        for _ in range(1 + N_DECODE):
            logits.append(model(tokens).logits[:, -1].numpy())
            tokens = torch.cat([tokens, torch.tensor(logits[-1].argmax(-1))[:, None]], dim=1)
    return np.stack(logits)


def read_golden(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights by checkpoint name, prompt [BATCH, PROMPT], and greedy logits.

    If the name has a dtype, the weights are those before they are rounded.
    """
    base = (QUANTIZED | NARROW).get(name, (name,))[0]
    with np.load(DIRECTORY / f"{name}.npz") as stored:
        return weights_of(base), prompt_of(base), stored["logits"]


def prompt_of(name: str) -> np.ndarray:
    return np.random.RandomState(0).randint(0, CONFIGS[name]["vocab_size"], (BATCH, PROMPT))


def main() -> None:
    """Writes the golden files of the given names, by default of all."""
    DIRECTORY.mkdir(exist_ok=True)
    for name in sys.argv[1:] or (*CONFIGS, *QUANTIZED, *NARROW):
        path = DIRECTORY / f"{name}.npz"
        if name in NARROW:
            base, extra = NARROW[name][0], {}
            model = narrow_model(*NARROW[name])
        elif name in QUANTIZED:
            base, extra = QUANTIZED[name][0], {}
            model = quantized_model(*QUANTIZED[name])
        else:
            base, extra = name, {"spreads": np.array(json.dumps(spreads_of(name)))}
            np.savez_compressed(path, **extra)
            model = oracle_model(name)
        np.savez_compressed(path, logits=greedy_logits(model, prompt_of(base)), **extra)


if __name__ == "__main__":
    main()
