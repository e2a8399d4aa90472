"""The format of a checkpoint as its config states it."""

from typing import Any

import pytest

from meshscope.spec.model.stored_format import StoredFormat, stored_format

TENSORS = "compressed-tensors"
KIMI_K26_IGNORE = [  # of its config.json, from vLLM's tests of the quantization
    *("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"),
    *("re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"),
]


def compressed(**weights: Any) -> dict[str, Any]:
    """As RedHatAI's checkpoints state it: one group of linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    return {"quant_method": TENSORS, "config_groups": {"group_0": group}}


def token_wise(**weights: Any) -> dict[str, Any]:
    """As RedHatAI's W8A8 checkpoints state it: a scale for each token, computed in each step."""
    config = compressed(**weights)
    group = config["config_groups"]["group_0"]
    group["input_activations"] |= {"strategy": "token", "dynamic": True}
    return config


ATTENTION_OF_TWO = [
    f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"
]
CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"quant_method": "fp8"}, "fp8", "f8e4m3fn"),
    ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", "f8e4m3fn"),
    (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", *ATTENTION_OF_TWO]},
        "fbgemm_fp8 in the MLPs",
        "f8e4m3fn_mlps",
    ),
    (
        {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]},
        "fp8 in the MLPs",
        "f8e4m3fn_mlps",
    ),
    (
        {"quant_method": "fp8", "modules_to_not_convert": [ATTENTION_OF_TWO[0], 3]},
        "fp8",
        "f8e4m3fn",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8 with scales of 128 x 128 blocks",
        "f8e4m3fn_block128",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "fp8 with scales of 64 x 64 blocks",
        None,
    ),
    ({"quant_method": "mxfp4"}, "mxfp4 in the experts", "f4e2m1fn_experts"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq of 4 bits", "s4"),
    ({"quant_method": "awq", "w_bit": 4}, "awq of 4 bits", "s4"),
    ({"quant_method": "gptq", "bits": 4}, "gptq of 4 bits", "s4"),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        "gptq of 4 bits with scales of 32 inputs",
        "s4_group32",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        "gptq of 4 bits with a scale a channel",
        "s4_channel",
    ),
    (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
        "awq of 4 bits with scales of 64 inputs",
        "s4_group64",
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 48},
        "awq of 4 bits with scales of 48 inputs",
        None,
    ),
    ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits", "s8"),
    ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits", None),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes of 8 bits", "s8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", None),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt of fp8", "f8e4m3fn"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4", None),
    (compressed(type="float", num_bits=8), f"{TENSORS} W8A8 (float)", "f8e4m3fn"),
    (compressed(type="int", num_bits=8), f"{TENSORS} W8A8 (int)", "s8"),
    (token_wise(type="float", num_bits=8), f"{TENSORS} W8A8 (float)", "f8e4m3fn_w8a8"),
    (token_wise(type="int", num_bits=8), f"{TENSORS} W8A8 (int)", "s8_w8a8"),
    (token_wise(type="int", num_bits=4), f"{TENSORS} W4A8 (int)", "s4"),
    (compressed(type="int", num_bits=4), f"{TENSORS} W4A8 (int)", "s4"),
    (
        compressed(type="int", num_bits=4, strategy="group", group_size=32),
        f"{TENSORS} W4A8 (int) with scales of 32 inputs",
        "s4_group32",
    ),
    (
        compressed(type="int", num_bits=4, strategy="channel"),
        f"{TENSORS} W4A8 (int) with a scale a channel",
        "s4_channel",
    ),
    (
        compressed(type="int", num_bits=4, group_size=32) | {"ignore": KIMI_K26_IGNORE},
        f"{TENSORS} W4A8 (int) with scales of 32 inputs in the experts",
        "s4_group32_experts",
    ),
    (  # single layers, or attention alone
        compressed(type="int", num_bits=4)
        | {"ignore": ["re:.*layers.0.self_attn.*", "re:.*layers.0.*shared_experts.*"]},
        f"{TENSORS} W4A8 (int)",
        "s4",
    ),
    (
        compressed(type="int", num_bits=4) | {"ignore": ["lm_head", "re:.*self_attn.*", 7]},
        f"{TENSORS} W4A8 (int)",
        "s4",
    ),
    (
        compressed(type="float", num_bits=8) | {"ignore": KIMI_K26_IGNORE},
        f"{TENSORS} W8A8 (float) in the experts",
        "f8e4m3fn_experts",
    ),
    (compressed(type="float", num_bits=4, group_size=16), f"{TENSORS} W4A8 (float)", None),
    (compressed(type="float", num_bits=4, group_size=32), f"{TENSORS} W4A8 (float)", "f4e2m1fn"),
    (
        compressed(type="float", num_bits=4, group_size=32) | {"ignore": KIMI_K26_IGNORE},
        f"{TENSORS} W4A8 (float) in the experts",
        "f4e2m1fn_experts",
    ),
    (
        compressed(type="float", num_bits=8, strategy="block", block_structure=[128, 128]),
        f"{TENSORS} W8A8 (float)",
        "f8e4m3fn_block128",
    ),
    ({"quant_method": TENSORS, "config_groups": []}, TENSORS, None),
    ({}, "an unnamed quantization", None),
]


@pytest.mark.parametrize(("config", "text", "weight_dtype"), CASES, ids=str)
def test_a_quantization_config_names_the_weight_dtype(
    config: dict[str, Any], text: str, weight_dtype: str | None
) -> None:
    expected = StoredFormat(text=text, weight_dtype=weight_dtype)
    of_model = {"quantization_config": config, "torch_dtype": "bfloat16", "num_hidden_layers": 2}
    assert stored_format(of_model) == expected


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_plain_checkpoint_has_its_dtype(key: str) -> None:
    assert stored_format({key: "float16"}) == StoredFormat(text="float16", weight_dtype="f16")
    assert stored_format({key: "float64"}) == StoredFormat(text="float64")


def test_a_config_may_state_no_format() -> None:
    assert stored_format({}) is None
