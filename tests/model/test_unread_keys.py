"""Keys of configs that families do not read: refused, named or harmless; and the family that an unknown one is like."""

from typing import Any

import pytest
from tests.model.test_config import LLAMA, PUBLISHED_CONFIGS

from meshscope.errors import SpecError
from meshscope.model.config import model_from_config, read_model
from meshscope.model.families import Family
from meshscope.model.model import Model

DENSE = LLAMA | {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
}
FP8 = {"quant_method": "fp8"}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "group_size": 128,
    "strategy": "group",
    "observer": "minmax",
}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "output_activations": None}}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}


def _read(config: dict[str, Any]) -> Model:
    return model_from_config(config, name="small", source="small.json")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        *(({key: 8}, "experts") for key in ("num_experts", "num_local_experts", "moe_num_experts")),
        ({"n_routed_experts": "8"}, "experts"),
        ({"shared_expert_intermediate_size": 8}, "experts"),
        ({"mamba_d_state": 8}, "state space layers"),
        ({"ssm_state_size": 8}, "state space layers"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"engram_layer_ids": [0]}, "tables of embeddings"),
        ({"block_configs": [{"attention": {"no_op": True}}]}, "kinds of layers"),
        ({"layer_types": ["linear_attention"] * 2}, "windows or kinds of layers"),
        ({"layer_types": ["full_attention"]}, "windows or kinds of layers"),  # for two layers
        ({"sliding_window": 128}, "windows or kinds of layers"),
        ({"index_topk": 8}, "sparse attention"),
        ({"hc_mult": 4}, "parallel residual streams"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"parallel_attn": True}, "parallel attention"),
        ({"use_bias": True}, "biases"),
        ({"num_layers": 3}, "layers"),  # of 2
        ({"settings": {"num_experts": 8}}, "experts"),
        ({"settings": [{"kv_lora_rank": 8}]}, "latent attention"),
        ({"model_type": "gemma2", "hidden_act": "gelu", "num_experts": 8}, "experts"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "n_shared_experts": 2, **MIXTURE},
            "experts",
        ),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "windows or kinds"),
        ({"text_config": DENSE, "num_experts": 8}, "experts"),
        ({"text_config": DENSE | {"num_experts": 8}}, "experts"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "num_experts": 8}}, "experts"),
        ({"rope_parameters": {"full_attention": {"kv_lora_rank": 8}}}, "latent attention"),
        ({"text_config": DENSE | {"rope_scaling": {"sliding_window": 8}}}, "windows"),
        ({"quantization_config": FP8 | {"modules_to_skip": ["lm_head"]}}, "quantized weights"),
        ({"quantization_config": FP8 | {"weight_bits": 4}}, "quantized weights"),
        ({"text_config": DENSE | {"quantization_config": FP8 | {"w_bits": 4}}}, "quantized"),
        ({"quantization_config": INT4 | {"config_groups": GROUPS, "num_bits": 4}}, "quantized"),
        ({"compression_config": FP8 | {"block_size": [64, 64]}}, "quantized weights"),
    ],
    ids=str,
)
def test_a_key_that_changes_the_model_and_is_not_read_is_refused(changes, part) -> None:
    with pytest.raises(SpecError) as caught:
        _read(DENSE | changes)
    message = str(caught.value)
    assert message.startswith("small.json: ")
    assert f"({part}" in message
    assert "does not read it, and weights, caches or collectives would be wrong" in message
    assert "Correct the key or model_type, or set to null what the model does not have." in message


@pytest.mark.parametrize("key", ["heda_dim", "head_dims", "head_dm", "Head_dim", "head-dim"])
def test_a_misspelled_key_is_refused_with_the_one_that_is_missing(key: str) -> None:
    complaint = rf"{key}=32 \(.*'head_dim', which is missing\): family 'llama' does not read it"
    with pytest.raises(SpecError, match=complaint):
        _read(DENSE | {key: 32})
    assert _read(DENSE | {"head_dim": 32, key: None}).attention.head_dim == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": {"bits": 8, "group_size": 64}},
        {"quantization": {"bits": 8}, "quantization_config": {"bits": 8}},
    ],
)
def test_the_quantization_of_mlx_is_read(changes: dict[str, Any]) -> None:
    """mlx_lm writes it under both names (`quantize_model` and `save_config` of mlx_lm/utils.py)."""
    model = _read(DENSE | changes)
    assert (model.stored_as, model.nearest_dtype, model.unread_keys) == ("mlx", "s8_layers", ())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": None, "num_local_experts": 0, "moe_layers": [], "use_bias": False},
        {"layer_types": ["full_attention"] * 2},
        {"sliding_window": 128, "use_sliding_window": False},
        {"sliding_window": 4096},  # the whole context
        {"model_type": "qwen2", "sliding_window": 128},  # use_sliding_window is false by default
        {"num_layers": 2, "d_model": 64},
        {"attention_dropout": 0.1, "initializer_range": 0.02, "output_hidden_states": True},
        {"bos_token_id": 1, "id2label": {"0": "no"}, "auto_map": {"AutoModel": "x"}},
        {"vision_config": {"hidden_size": 8, "num_experts": 8}, "image_token_index": 7},
        {"residual_multiplier": 1.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [16, 24, 24]}},
        {"quantization_config": FP8 | {"activation_scheme": "dynamic", "fmt": "e4m3"}},
        {"quantization_config": INT4 | {"config_groups": GROUPS, "global_compression_ratio": 1.5}},
        {"quantization_config": {"quant_method": "new_tool", "w_bits": 3}},  # its format is unknown
    ],
    ids=str,
)
def test_a_key_that_changes_nothing_is_not_named(changes: dict[str, Any]) -> None:
    assert _read(DENSE | changes).unread_keys == ()


def test_a_key_that_is_not_known_is_named_with_its_value() -> None:
    changes = {
        "my_strange_key": 5,
        "residual_multiplier": 0.2,
        "other": {"deep": "x"},
        "rope_scaling": {"type": "linear", "facto": 2.0},
        "quantization_config": FP8 | {"odd": "y"},
    }
    assert _read(DENSE | changes).unread_keys == (
        "my_strange_key=5",
        "residual_multiplier=0.2",
        "other.deep='x'",
        "rope_scaling.facto=2.0",
        "quantization_config.odd='y'",
    )


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"model_type": "yi"}, "'llama' reads all keys of its config: if its layers are the same"),
        (
            {"model_type": "x", "num_local_experts": 8, "num_experts_per_tok": 2},
            "'mixtral' reads all keys of its config",
        ),
        ({"model_type": "olmo2"}, "'llama', the nearest, has other norms of queries and keys."),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6},
            "'llama', the nearest, has no experts (moe_num_experts, moe_k).",
        ),
        (
            {"model_type": "cohere2", "sliding_window": 128, "layer_types": ["sliding_attention"]},
            "'llama', the nearest, has no windows or kinds of layers (sliding_window, layer_types).",
        ),
        (
            {"model_type": "mamba", "state_size": 16, "num_attention_heads": None},
            "it has state space layers (state_size).",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True, "hidden_size": None},
            "it has an encoder (is_encoder_decoder).",
        ),
        (
            {"model_type": "falcon", "parallel_attn": True, "rms_norm_eps": None},
            "'llama', the nearest, has no parallel attention (parallel_attn).",
        ),
        ({"model_type": "bert", "hidden_act": "gelu"}, "it has another MLP (hidden_act)."),
        (
            {"model_type": "stablelm", "rms_norm_eps": None},
            "'llama', the nearest, has other norms (the config has no rms_norm_eps).",
        ),
        ({"model_type": "mamba"}, "'llama', the nearest, has no state space layers."),
        ({"model_type": "t5"}, "'llama', the nearest, has no encoder."),
        ({"model_type": "own", "architectures": ["BertModel"]}, "has no encoder."),
        ({"model_type": "gpt2"}, "'llama', the nearest, has other norms, MLPs and positions."),
        ({"model_type": "falcon"}, "has attention and MLP in another order"),
        ({"model_type": "git", "architectures": ["Grok1ForCausalLM"]}, "family 'git' (Grok1For"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_an_unknown_family_is_read_as_another_only_if_nothing_is_lost(config, advice) -> None:
    with pytest.raises(SpecError, match=r"is not supported. .*Supported: llama, ") as caught:
        _read({key: value for key, value in (DENSE | config).items() if value is not None})
    assert advice in str(caught.value)


def test_a_mixture_is_never_like_a_dense_family() -> None:
    """deepseek-moe-16b-base, whose family is not supported."""
    with pytest.raises(SpecError, match="'llama', the nearest, has no experts"):
        read_model(str(PUBLISHED_CONFIGS / "deepseek-ai--deepseek-moe-16b-base.json"))


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("seed_oss", Family.QWEN2),
        ("granite", Family.LLAMA),
        ("solar", Family.LLAMA),
        ("mimo", Family.QWEN2),
    ],
)
def test_families_with_the_layers_of_another_are_read(model_type: str, family: Family) -> None:
    assert _read(DENSE | {"model_type": model_type}).family is family


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "git", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": None, "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "own", "architectures": ["Qwen3Model"]},
    ],
    ids=str,
)
def test_architectures_name_the_family_if_model_type_does_not(changes: dict[str, Any]) -> None:
    assert _read(DENSE | {"head_dim": 16} | changes).family is Family.QWEN3


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "omni", "thinker_config": {"text_config": DENSE}},
        {"model_type": "omni", "llm_config": DENSE},
        {"model_type": "omni", "text_config": {**DENSE, "model_type": "llama"}},
    ],
    ids=str,
)
def test_the_text_part_is_found_in_other_objects(config: dict[str, Any]) -> None:
    model = _read(config)
    assert (model.family, model.hidden, model.text_part_of) == (Family.LLAMA, 64, "omni")


def test_the_model_type_of_the_whole_counts_if_the_text_part_has_none() -> None:
    text = {key: value for key, value in DENSE.items() if key != "model_type"}
    assert _read({"model_type": "qwen2_vl", "text_config": text}).family is Family.QWEN2
    with pytest.raises(SpecError, match="model family 'minimax_m3_vl' is not supported"):
        _read({"model_type": "minimax_m3_vl", "text_config": text})
    with pytest.raises(SpecError, match="the config has no 'model_type'"):
        _read(text)


def test_a_tower_beside_the_keys_of_the_text_is_a_part_that_is_not_counted() -> None:
    config = DENSE | {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 8}}
    assert _read(config).text_part_of == "qwen2_5_vl"
    assert _read(DENSE | {"vision_config": None}).text_part_of is None


def test_a_mixture_cut_to_its_dense_layers_is_dense() -> None:
    """People shorten num_hidden_layers to try a model: the keys of its experts are known all the same."""
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 3,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
    }
    assert model_from_config(config, name="cut", source="test").moe is None
