"""The format of a checkpoint as its config states it, in the forms that the tools write."""

from typing import Any, NamedTuple

import pytest

from meshscope.errors import SpecError
from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config
from meshscope.model.model import Model
from meshscope.model.reader import ConfigReader
from meshscope.model.stored_format import ModulePatterns, StoredFormat, stored_format
from meshscope.plans.plan import Plan
from meshscope.plans.weights import device_weight_bytes

TENSORS = "compressed-tensors"
DENSE, EXPERTS, KIMI = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "moonshotai/Kimi-K2"
NEXT, HYBRID, HYBRID_EXPERTS = (
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-122B-A10B",
)
LLAMA_405B, MAVERICK = (
    "meta-llama/Llama-3.1-405B",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
)
GPT_OSS, GLM_5, V4 = "openai/gpt-oss-20b", "zai-org/GLM-5", "deepseek-ai/DeepSeek-V4-Flash-Base"
DEEPSEEK, GEMMA_4 = "deepseek-ai/DeepSeek-V3", "google/gemma-4-26B-A4B-it"

# ignore of Kimi-K2.6, in vLLM's tests; the same in Kimi-K3's config.json (aiconfigurator@095f58a model_configs).
KIMI_IGNORE = [
    *("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"),
    *("re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"),
]
# ignore of vllm-project/llm-compressor, examples/quantization_w8a8_fp8/qwen3_5_moe.py.
QWEN_3_5_IGNORE = [
    *("re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:.*mlp.gate$", "re:.*embed_tokens$"),
    *("re:.*shared_expert_gate$", r"re:.*mlp\.shared_expert$", "re:.*linear_attn.*"),
]
# ignore of vllm-project/llm-compressor, examples/model_free_ptq/kimi_k2_thinking_fp8_block.py.
KIMI_FP8_IGNORE = [
    *("re:.*gate$", "lm_head", "re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$", "model.embed_tokens"),
]


def names(n_layers: int, *modules: str, prefix: str = "model.layers.") -> list[str]:
    """The modules of each layer, as tools list them one by one."""
    return [f"{prefix}{layer}.{module}" for layer in range(n_layers) for module in modules]


def group(
    weights: dict[str, Any], *targets: str, inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "targets": list(targets or ("Linear",)),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def compressed(*groups: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    numbered = {f"group_{number}": of for number, of in enumerate(groups)}
    return {"quant_method": TENSORS, "config_groups": numbered} | keys


FIXED = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
OF_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
FP8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "actorder": "weight"}
INT4_32 = INT4 | {"group_size": 32}
MXFP4 = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


class Case(NamedTuple):
    """A quantization config of a checkpoint of `model`; `nearest` if no weight dtype equals it."""

    name: str
    model: str
    config: dict[str, Any]
    text: str
    weight_dtype: str | None
    nearest: str | None = None
    cache: str | None = None


FP8_AND_BLOCKS = [
    Case("a scale per tensor", DENSE, {"quant_method": "fp8"}, "fp8", "f8e4m3fn_layers"),
    Case(
        "Ministral-3-8B-Instruct-2512",
        "mistralai/Ministral-3-8B-Base-2512",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": [
                "model.vision_tower",
                "model.multi_modal_projector",
                "lm_head",
            ],
        },
        "fp8",
        "f8e4m3fn_layers",
    ),
    Case(
        "Llama-3.1-405B-Instruct-FP8",  # arXiv 2407.21783, section 6.2
        LLAMA_405B,
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [
                *names(126, *(f"self_attn.{name}_proj" for name in "qkvo")),
                *(
                    f"model.layers.{at}.mlp.{name}_proj"
                    for at in (0, 125)
                    for name in ("up", "down")
                ),
                "lm_head",
            ],
        },
        "fbgemm_fp8 in the MLPs",
        "f8e4m3fn_mlps",
    ),
    Case(
        "attention by its name alone",
        DENSE,
        {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]},
        "fp8 in the MLPs",
        "f8e4m3fn_mlps",
    ),
    Case(
        "one layer's attention, and entries that name nothing",
        DENSE,
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj", 3]},
        "fp8",
        "f8e4m3fn_layers",
    ),
    Case(
        "Qwen3-30B-A3B-FP8",  # aiconfigurator@095f58a model_configs
        EXPERTS,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *names(48, "input_layernorm", "mlp.gate")],
        },
        "fp8 with scales of 128 x 128 blocks",
        "f8e4m3fn_block128",
    ),
    Case(
        "DeepSeek-V3.2",  # same
        "deepseek-ai/DeepSeek-V3.2",
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        "fp8 with scales of 128 x 128 blocks",
        "f8e4m3fn_block128",
    ),
    Case(
        "GLM-5-FP8",  # same
        GLM_5,
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                "lm_head",
                *names(79, "self_attn.indexer.k_norm", "self_attn.indexers_proj"),
            ],
        },
        "fp8 with scales of 128 x 128 blocks",
        "f8e4m3fn_block128",
    ),
    Case(
        "other blocks",
        DENSE,
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "fp8 with scales of 64 x 64 blocks",
        None,
        "f8e4m3fn_layers",
    ),
    Case(
        "gpt-oss-20b",  # same
        GPT_OSS,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
        "mxfp4 in the experts",
        "f4e2m1fn_experts",
    ),
    Case(
        "DeepSeek-V4-Flash-NVFP4",  # same, shortened
        V4,
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "quantized_layers": {
                name: {"quant_algo": "NVFP4", "group_size": 16}
                for name in names(43, "ffn.experts", prefix="layers.")
            },
        },
        "fp8 with scales of 128 x 128 blocks in attention and the MLPs, modelopt NVFP4 in the experts",
        "f8e4m3fn_block128_f4e2m1fn_group16_experts",
    ),
]
OF_COMPRESSED_TENSORS = [
    Case(
        "FP8-dynamic",
        DENSE,
        compressed(group(FP8, inputs=OF_TOKENS), ignore=["lm_head"]),
        f"{TENSORS} W8A8 (float)",
        "f8e4m3fn_w8a8",
    ),
    Case(
        "FP8 with fixed scales and an fp8 cache",
        DENSE,
        compressed(
            group(FP8 | {"strategy": "tensor"}, inputs=FIXED),
            ignore=["lm_head"],
            kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False},
        ),
        f"{TENSORS} W8A8 (float)",
        "f8e4m3fn_layers",
        cache="fp8",
    ),
    Case(
        "quantized.w8a8",
        DENSE,
        compressed(group(INT8, inputs=OF_TOKENS | {"type": "int"}), ignore=["lm_head"]),
        f"{TENSORS} W8A8 (int)",
        "s8_w8a8",
    ),
    Case("W8A16", DENSE, compressed(group(INT8)), f"{TENSORS} W8A16 (int)", "s8_layers"),
    Case(
        "quantized.w4a16 of a model with experts",
        EXPERTS,
        compressed(group(INT4), ignore=["lm_head", "re:.*mlp.gate$"], format="pack-quantized"),
        f"{TENSORS} W4A16 (int)",
        "s4",
    ),
    Case(
        "W4A8",
        DENSE,
        compressed(group(INT4_32, inputs=OF_TOKENS)),
        f"{TENSORS} W4A8 (int) with scales of 32 inputs",
        "s4_group32",
    ),
    Case(
        "W4A16 with a scale a channel",
        DENSE,
        compressed(group({"num_bits": 4, "type": "int", "strategy": "channel"})),
        f"{TENSORS} W4A16 (int) with a scale a channel",
        "s4_channel",
    ),
    Case(
        "FP8-BLOCK of Kimi-K2-Thinking",
        KIMI,
        compressed(group(FP8_BLOCK), ignore=KIMI_FP8_IGNORE),
        f"{TENSORS} W8A16 (float) with scales of 128 x 128 blocks",
        "f8e4m3fn_block128",
    ),
    Case(
        "Kimi-K2.5",
        KIMI,
        compressed(group(INT4_32), ignore=KIMI_IGNORE),
        f"{TENSORS} W4A16 (int) with scales of 32 inputs in the experts",
        "s4_group32_experts",
    ),
    Case(
        "Kimi-K3",
        KIMI,
        compressed(group(MXFP4), ignore=KIMI_IGNORE, format="mxfp4-pack-quantized"),
        f"{TENSORS} W4A16 (float) in the experts",
        "f4e2m1fn_experts",
    ),
    Case(
        "single layers",
        KIMI,
        compressed(
            group(INT4), ignore=["re:.*layers.0.self_attn.*", "re:.*layers.1.*shared_experts.*"]
        ),
        f"{TENSORS} W4A16 (int)",
        "s4",
    ),
    Case(
        "attention alone",
        KIMI,
        compressed(group(INT4), ignore=["lm_head", "re:.*self_attn.*", 7]),
        f"{TENSORS} W4A16 (int) in the MLPs",
        "s4_mlps",
    ),
    Case(
        "Llama-4-Maverick-17B-128E-Instruct-FP8",
        MAVERICK,
        compressed(
            group(FP8, inputs=OF_TOKENS),
            ignore=[
                *names(
                    48,
                    *(f"self_attn.{name}_proj" for name in "qkvo"),
                    "feed_forward.router",
                    prefix="language_model.model.layers.",
                ),
                *names(34, "self_attn.q_proj", prefix="vision_model.model.layers."),
                "language_model.lm_head",
            ],
        ),
        f"{TENSORS} W8A8 (float) in the MLPs",
        "f8e4m3fn_mlps",
    ),
    Case(
        "Qwen3.5-397B-A17B-FP8-Dynamic-NoLinearAttn",
        HYBRID_EXPERTS,
        compressed(group(FP8, inputs=OF_TOKENS), ignore=QWEN_3_5_IGNORE),
        f"{TENSORS} W8A8 (float) except in linear attention",
        "f8e4m3fn_not_linear",
    ),
    Case(
        "W4A16 of Qwen3-Next",
        NEXT,
        compressed(
            group(INT4),
            ignore=["lm_head", *names(48, "linear_attn.in_proj_qkvz", "linear_attn.out_proj")],
        ),
        f"{TENSORS} W4A16 (int) except in linear attention",
        "s4_not_linear",
    ),
    Case(
        "both kinds of attention",
        HYBRID,
        compressed(group(INT4), ignore=["re:.*linear_attn.*", "re:.*self_attn.*"]),
        f"{TENSORS} W4A16 (int) in the MLPs",
        "s4_mlps",
    ),
    Case(
        "nvfp4-pack-quantized",
        EXPERTS,
        compressed(group(NVFP4, inputs=NVFP4), ignore=["lm_head", "re:.*mlp.gate$"]),
        f"{TENSORS} W4A4 (float), nvfp4",
        "f4e2m1fn_group16",
    ),
    Case(
        "NVFP4 of the experts",
        KIMI,
        compressed(group(NVFP4), ignore=KIMI_IGNORE),
        f"{TENSORS} W4A16 (float), nvfp4 in the experts",
        "f4e2m1fn_group16_experts",
    ),
    Case(
        "mxfp8",
        DENSE,
        compressed(group(FP8 | {"strategy": "group", "group_size": 32})),
        f"{TENSORS} W8A16 (float), mxfp8",
        None,
        "f8e4m3fn_layers",
    ),
    Case(
        "experts of 4 bits, attention of 8",  # the form of lightseekorg/tokenspeed pull request 1321
        KIMI,
        compressed(
            group(FP8_BLOCK, r"re:.*self_attn\..*", r"re:.*shared_experts\..*"),
            group(INT4, r"re:.*mlp\.experts\.\d+\..*", inputs=OF_TOKENS),
        ),
        f"{TENSORS} W8A16 (float) with scales of 128 x 128 blocks in attention and the MLPs, {TENSORS} "
        "W4A8 (int) in the experts",
        None,
        "s4_experts",
    ),
    Case(
        "experts of a class",
        EXPERTS,
        compressed(group(INT4, "Qwen3MoeExperts")),
        f"{TENSORS} W4A16 (int) in the experts",
        "s4_experts",
    ),
    Case("no groups", DENSE, {"quant_method": TENSORS, "config_groups": []}, TENSORS, None),
    Case(
        "3 bits",
        DENSE,
        compressed(group({"num_bits": 3, "type": "int"})),
        f"{TENSORS} W3A16 (int)",
        None,
        "s4",
    ),
    Case(
        "the vision tower alone",
        DENSE,
        compressed(group(INT4, "re:.*visual.*")),
        f"{TENSORS}, in none of its layers",
        "bf16",
    ),
]
OF_4_BITS = [
    Case("awq", DENSE, {"quant_method": "awq", "w_bit": 4}, "awq of 4 bits", "s4"),
    Case(
        "awq of 64 inputs",
        DENSE,
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
        "awq of 4 bits with scales of 64 inputs",
        "s4_group64",
    ),
    Case(
        "awq of a multimodal model with experts",
        EXPERTS,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["visual", "gate"],
        },
        "awq of 4 bits",
        "s4",
    ),
    Case(
        "awq that leaves out attention",
        EXPERTS,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": [*names(48, "self_attn"), *names(48, "mlp.gate")],
        },
        "awq of 4 bits in the experts",
        "s4_experts",
    ),
    Case(
        "awq of 48 inputs",
        DENSE,
        {"quant_method": "awq", "bits": 4, "group_size": 48},
        "awq of 4 bits with scales of 48 inputs",
        None,
        "s4_group64",
    ),
    Case("gptq", DENSE, {"quant_method": "gptq", "bits": 4}, "gptq of 4 bits", "s4"),
    Case(
        "gptq of channels",
        DENSE,
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        "gptq of 4 bits with a scale a channel",
        "s4_channel",
    ),
    Case(
        "gptq of 8 bits", DENSE, {"quant_method": "gptq", "bits": 8}, "gptq of 8 bits", "s8_layers"
    ),
    Case(
        "gptq of 3 bits", DENSE, {"quant_method": "gptq", "bits": 3}, "gptq of 3 bits", None, "s4"
    ),
    Case(
        "gptq of 5 bits",
        DENSE,
        {"quant_method": "gptq", "bits": 5},
        "gptq of 5 bits",
        None,
        "s8_layers",
    ),
    Case(
        "dynamic of GPTQModel",
        EXPERTS,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "dynamic": {
                "-:.*attn.*": {},
                r"-:.*mlp\.gate\b": {},
                r"+:.*layers\.0\..*": {"bits": 8},
            },
        },
        "gptq of 4 bits in the experts",
        "s4_experts",
    ),
    Case(
        "gptq with other bits in attention",
        EXPERTS,
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*self_attn.*": {"bits": 8}}},
        "gptq of 8 bits in attention, gptq of 4 bits in the experts",
        None,
        "s4_experts",
    ),
    Case(
        "modules in a block",
        DENSE,
        {
            "quant_method": "gptq",
            "bits": 4,
            "modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]],
        },
        "gptq of 4 bits in the MLPs",
        "s4_mlps",
    ),
    Case(
        "bitsandbytes of 8 bits",
        DENSE,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None},
        "bitsandbytes of 8 bits",
        "s8_layers",
    ),
    Case(
        "bnb-4bit of unsloth",
        DENSE,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head", "multi_modal_projector", "vision_tower"],
        },
        "bitsandbytes nf4",
        None,
        "s4_group64",
    ),
    Case(
        "auto-round",
        HYBRID,
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {
                "model.visual.merger.norm": {"bits": 16, "data_type": "float"},
                **{
                    name: {"bits": 16, "data_type": "float"}
                    for name in names(
                        64, "linear_attn.in_proj_a", prefix="model.language_model.layers."
                    )
                },
            },
        },
        "auto-round of 4 bits",
        "s4",
    ),
    Case(
        "auto-round that leaves out attention",
        EXPERTS,
        {
            "quant_method": "intel/auto-round",
            "bits": 4,
            "group_size": 64,
            "extra_config": {".*self_attn.*": {"bits": 16}, ".*mlp.gate$": {"bits": 16}},
        },
        "auto-round of 4 bits with scales of 64 inputs in the experts",
        "s4_group64_experts",
    ),
    Case(
        "auto-round of mxfp4",
        DENSE,
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"},
        "auto-round of 4 bits (mx_fp)",
        "f4e2m1fn",
    ),
    Case(
        "auto-round of nvfp4",
        DENSE,
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp"},
        "auto-round of 4 bits (nv_fp)",
        "f4e2m1fn_group16",
    ),
    Case(
        "attention and experts, a set that no format quantizes alone",
        HYBRID_EXPERTS,
        {
            "quant_method": "awq",
            "bits": 4,
            "modules_to_not_convert": ["linear_attn", "mlp.shared_expert"],
        },
        "awq of 4 bits in attention and the experts",
        None,
        "s4_experts",
    ),
    Case("unnamed", DENSE, {}, "an unnamed quantization", None),
    Case("unknown", DENSE, {"quant_method": "new"}, "new", None),
    Case("mlx, without a reader", DENSE, {"bits": 4, "group_size": 64}, "mlx", None, "s4"),
    Case(
        "of 8 bits, without a reader",
        DENSE,
        {"quant_method": "new", "bits": 8},
        "new",
        None,
        "s8_layers",
    ),
    Case("quark, without a reader", DENSE, {"quant_method": "quark"}, "quark", None, "f4e2m1fn"),
    Case("aqlm, of about 2 bits", DENSE, {"quant_method": "aqlm"}, "aqlm", None),
]
OF_MODELOPT = [
    Case(
        "Llama-3.1-8B-Instruct-FP8, the quantization of hf_quant_config.json",
        "meta-llama/Llama-3.1-8B",
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        "modelopt FP8",
        "f8e4m3fn_layers",
        cache="fp8",
    ),
    Case(
        "Qwen3-32B-FP8-Static-PerTensor",  # aiconfigurator@095f58a model_configs
        DENSE,
        {
            "config_groups": {"group_0": {"weights": FIXED, "input_activations": FIXED}},
            "ignore": ["lm_head"],
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
            "producer": {"name": "modelopt", "version": "0.31.0"},
        },
        "modelopt FP8",
        "f8e4m3fn_layers",
        cache="fp8",
    ),
    Case(
        "DeepSeek-V3.1-NVFP4",  # same, shortened
        DEEPSEEK,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": [
                "lm_head",
                *names(
                    61,
                    *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),
                    *("self_attn.q_a_proj", "self_attn.q_b_proj"),
                ),
                "model.layers.61*",
            ],
        },
        "modelopt NVFP4 in the MLPs",
        "f4e2m1fn_group16_mlps",
    ),
    Case(
        "GLM-5.1-NVFP4",  # same, shortened
        GLM_5,
        {
            "quant_method": "modelopt",
            "config_groups": {"group_0": group(NVFP4)},
            "ignore": [
                *("lm_head", "model.layers.0*", "model.layers.1.*"),
                *names(78, "mlp.shared_experts*", "self_attn*"),
            ],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        "modelopt NVFP4 in the experts",
        "f4e2m1fn_group16_experts",
        cache="fp8",
    ),
    Case(
        "Qwen3.5-122B-A10B-NVFP4",  # same, shortened
        HYBRID_EXPERTS,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": names(
                48,
                *("linear_attn*", "self_attn*", "mlp.shared_expert*"),
                prefix="model.language_model.layers.",
            ),
        },
        "modelopt NVFP4 in the experts",
        "f4e2m1fn_group16_experts",
    ),
    Case(
        "Qwen3.6-27B-NVFP4",  # same, shortened
        HYBRID,
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                **{
                    name: {"quant_algo": "FP8"}
                    for name in names(
                        64,
                        *(
                            f"linear_attn.{name}"
                            for name in ("in_proj_qkv", "in_proj_z", "out_proj")
                        ),
                        *(f"self_attn.{name}_proj" for name in "qkvo"),
                        prefix="model.language_model.layers.",
                    )
                },
                **{
                    name: {"quant_algo": "W4A16_NVFP4", "group_size": 16}
                    for name in names(
                        64,
                        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
                        prefix="model.language_model.layers.",
                    )
                },
            },
        },
        "modelopt FP8 in attention and linear attention, modelopt W4A16_NVFP4 in the MLPs",
        None,
        "f4e2m1fn_group16_mlps",
    ),
    Case(
        "the same in its config.json",  # same, shortened
        HYBRID,
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": {
                "group_0": group(FIXED, "re:.*_attn.*"),
                "group_1": group(NVFP4, "re:.*mlp.*"),
            },
            "ignore": ["lm_head"],
        },
        "modelopt W8A16 (float) in attention and linear attention, modelopt W4A16 (float), nvfp4 in the MLPs",
        None,
        "f4e2m1fn_group16_mlps",
    ),
    Case(
        "awq of ModelOpt",
        DENSE,
        {"quant_algo": "W4A16_AWQ", "group_size": 128},
        "modelopt W4A16_AWQ",
        "s4",
    ),
    Case("blocks", DENSE, {"quant_algo": "FP8_PB_WO"}, "modelopt FP8_PB_WO", "f8e4m3fn_block128"),
    Case("mxfp8", DENSE, {"quant_algo": "MXFP8"}, "modelopt MXFP8", None, "f8e4m3fn_layers"),
]
OF_OTHERS = []
CASES = [*FP8_AND_BLOCKS, *OF_COMPRESSED_TENSORS, *OF_4_BITS, *OF_MODELOPT, *OF_OTHERS]


def checkpoint(name: str, config: dict[str, Any], **keys: Any) -> Model:
    """The model of the catalog with this quantization."""
    base = {key: value for key, value in catalog()[name].config.items() if key != "expert_dtype"}
    quantized = {**base, "quantization_config": config, **keys}
    return model_from_config(quantized, name=name, source="config.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model.split('/')[1]}: {case.name}")
def test_a_quantization_config_names_the_weight_dtype(case: Case) -> None:
    model = checkpoint(case.model, case.config)
    got = (model.stored_as, model.stored_dtype, model.nearest_dtype, model.stored_cache)
    assert got == (case.text, case.weight_dtype, case.nearest, case.cache)


def test_experts_of_deepseek_v4_are_in_mxfp4() -> None:
    """A key beside the quantization says so."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = checkpoint(V4, blocks, expert_dtype="fp4")
    assert model.stored_dtype == "f8e4m3fn_block128_f4e2m1fn_experts"
    assert checkpoint(V4, blocks).stored_dtype == "f8e4m3fn_block128"


def test_the_quantization_of_a_text_part_counts() -> None:
    """Kimi-K2.5 has it in `text_config`."""
    text = {**catalog()[KIMI].config, "quantization_config": compressed(group(INT4_32))}
    outer = {"model_type": "kimi_k25", "text_config": text}
    model = model_from_config(outer, name="outer", source="config.json")
    assert model.stored_dtype == "s4_group32"


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'re:\*lm_head' is not a regular expression.*Correct"):
        checkpoint(DENSE, compressed(group(INT4), ignore=["re:*lm_head"]))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_plain_checkpoint_has_its_dtype(key: str) -> None:
    assert stored_format(ConfigReader({key: "float16"}, "x"), {}) == StoredFormat(
        text="float16", weight_dtype="f16"
    )
    for text, nearest in (("float64", "f32"), ("float128", "f32"), ("float8_e4m3fn", "f8e4m3fn")):
        assert stored_format(ConfigReader({key: text}, "x"), {}) == StoredFormat(
            text=text, nearest=nearest
        )


def test_a_config_may_state_no_format() -> None:
    assert stored_format(ConfigReader({}, "x"), {}) is None


@pytest.mark.parametrize("text", [r"(\w+\.?)+!", ".*a.*b.*c.*d.*e", "a?a?a?a?a?a?b"])
def test_expressions_that_may_match_for_hours_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="may take too long to match"):
        ModulePatterns([f"re:{text}"])


@pytest.mark.parametrize(
    "text", [r".*mlp\.(gate|up)_proj$", r"(?:model\.)?layers\.\d+\.mlp\.experts\.\d+\..*_proj"]
)
def test_expressions_of_checkpoints_are_read(text: str) -> None:
    names = [f"layers.3.mlp.{name}" for name in ("gate_proj", "experts.0.gate_proj", "gate")]
    assert sum(name in ModulePatterns([f"re:{text}"]) for name in names) == 1


def test_a_group_that_is_no_number_has_no_equal() -> None:
    model = checkpoint(DENSE, {"quant_method": "gptq", "bits": 4, "group_size": [1]})
    assert model.stored_dtype is None


def test_nvfp4_has_an_8_bit_scale_for_16_values() -> None:
    """4.5 bits in the matrices of layers; the rest of nvidia's checkpoints is in bf16."""
    model = checkpoint(DENSE, compressed(group(NVFP4), ignore=["lm_head"]))
    narrow, wide = (
        device_weight_bytes(model, Plan(), dtype) for dtype in (model.default_weight_dtype, "bf16")
    )
    matrices = model.n_layers * (1024 * (2048 + 1024 + 1024 + 2048) + 3 * 1024 * 3072)
    assert wide - narrow == matrices * (2 - 4.5 / 8)
