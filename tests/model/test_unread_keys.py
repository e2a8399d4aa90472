"""Keys of configs that families do not read: refused, named or harmless; and the family that an unknown one is like."""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import stored, table
from tests.model.test_config import PUBLISHED_CONFIGS

from meshscope.errors import SpecError
from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config
from meshscope.model.families import Family
from meshscope.model.model import Model

DENSE = stored(Path(__file__).with_suffix(".yaml"))["dense"]


def _read(config: dict[str, Any]) -> Model:
    return model_from_config(config, name="small", source="small.json")


@table
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


@table
def test_the_quantization_of_mlx_is_read(changes: dict[str, Any]) -> None:
    """mlx_lm writes it under both names (`quantize_model` and `save_config` of mlx_lm/utils.py)."""
    model = _read(DENSE | changes)
    assert (model.stored_as, model.nearest_dtype, model.unread_keys) == ("mlx", "s8_layers", ())


@table
def test_a_key_that_changes_nothing_is_not_named(changes: dict[str, Any]) -> None:
    assert _read(DENSE | changes).unread_keys == ()


def test_a_key_that_is_not_known_is_named_with_its_value() -> None:
    """Only whole numbers are sizes and counts; rotary embeddings and quantization have tables of their own."""
    changes = {
        "my_strange_key": "on",
        "my_logit_scale": 5,
        "my_switch": True,
        "my_base": 500.5,
        "residual_multiplier": 0.2,
        "other": {"deep": "x"},
        "rope_scaling": {"type": "linear", "facto": 2.0},
        "quantization_config": {"quant_method": "fp8", "odd": 8},
    }
    assert _read(DENSE | changes).unread_keys == (
        *("my_strange_key='on'", "my_logit_scale=5", "my_switch=True", "my_base=500.5"),
        *("residual_multiplier=0.2", "other.deep='x'"),
        *("rope_scaling.facto=2.0", "quantization_config.odd=8"),
    )


@table
def test_an_unknown_family_is_read_as_another_only_if_nothing_is_lost(config, advice) -> None:
    with pytest.raises(SpecError, match=r"is not supported. .*Supported: llama, ") as caught:
        _read({key: value for key, value in (DENSE | config).items() if value is not None})
    assert advice in str(caught.value)


def test_a_mixture_is_never_like_a_dense_family() -> None:
    config = json.loads((PUBLISHED_CONFIGS / "deepseek-ai--deepseek-moe-16b-base.json").read_text())
    with pytest.raises(SpecError, match="'deepseek' reads all keys of its config"):
        _read(config | {"model_type": "own_moe", "architectures": None})


@table
def test_families_with_the_layers_of_another_are_read(model_type: str, family: Family) -> None:
    assert _read(DENSE | {"model_type": model_type}).family is family


@table
def test_architectures_name_the_family_if_model_type_does_not(changes: dict[str, Any]) -> None:
    assert _read(DENSE | {"head_dim": 16} | changes).family == "qwen3"


@table
def test_the_text_part_is_found_in_other_objects(config: dict[str, Any]) -> None:
    model = _read(config)
    assert (model.family, model.hidden, model.text_part_of) == ("llama", 64, "omni")


def test_the_model_type_of_the_whole_counts_if_the_text_part_has_none() -> None:
    text = {key: value for key, value in DENSE.items() if key != "model_type"}
    assert _read({"model_type": "qwen2_vl", "text_config": text}).family == "qwen2"
    with pytest.raises(SpecError, match="model family 'kimi_k3' is not supported"):
        _read({"model_type": "kimi_k3", "text_config": text})
    with pytest.raises(SpecError, match="the config has no 'model_type'"):
        _read(text)


def test_a_tower_beside_the_keys_of_the_text_is_a_part_that_is_not_counted() -> None:
    config = DENSE | {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 8}}
    assert _read(config).text_part_of == "qwen2_5_vl"
    assert _read(DENSE | {"vision_config": None}).text_part_of is None


def test_a_mixture_cut_to_its_dense_layers_is_dense() -> None:
    """People shorten num_hidden_layers to try a model: the keys of its experts are known all the same."""
    config = catalog()["deepseek-ai/DeepSeek-V3"].config | {"num_hidden_layers": 2}
    assert config["first_k_dense_replace"] == 3
    assert model_from_config(config, name="cut", source="test").moe is None


def test_the_group_size_beside_quantized_layers_is_read() -> None:
    """As DeepSeek-V4-Flash-NVFP4 has it: for layers that name none."""
    layers = {"model.layers.0.mlp": {"quant_algo": "W4A16"}}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "group_size": 32}
    model = _read(DENSE | {"quantization_config": {**quantization, "quantized_layers": layers}})
    assert model.unread_keys == ()
    assert "scales of 32 inputs" in str(model.stored_as)


def test_a_model_type_of_another_architecture_than_the_class_is_said() -> None:
    changes = {"model_type": "rwkv", "architectures": ["LlamaForCausalLM"]}
    assert _read(DENSE | changes).unread_keys == ("model_type='rwkv'",)
