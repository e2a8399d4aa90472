"""DeepSeek-V4 configs: layers by list, ratio or default; new and older keys."""

from dataclasses import replace
from typing import Any

import pytest

from meshscope.errors import SpecError
from meshscope.model.config import model_from_config, read_model
from meshscope.model.layers import AttentionKind, repeats_of
from meshscope.model.mechanisms.compressed import CompressedAttention
from meshscope.model.mechanisms.streams import HyperConnections
from meshscope.model.model import Model
from meshscope.model.reader import Rope, RopeType
from meshscope.plans.experiment_record import model_as_dict, model_from_dict

LEAST: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "head_dim": 128,
    "q_lora_rank": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "vocab_size": 100,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}


def _model(**changes: Any) -> Model:
    return model_from_config(LEAST | changes, name="small", source="small.json")


def _attention(**changes: Any) -> CompressedAttention:
    attention = _model(**changes).attention
    assert isinstance(attention, CompressedAttention)
    return attention


def test_default_layers_are_those_of_transformers() -> None:
    """Heavily compressed layers first, then both kinds alternate; hash routing in the first three."""
    assert [layer.name for layer in _model().layers] == [
        "heavily_compressed/hash_moe",
        "heavily_compressed/hash_moe",
        "heavily_compressed/hash_moe",
        "compressed_sparse/moe",
        "heavily_compressed/moe",
    ]


def test_ratios_beyond_the_last_layer_are_ignored() -> None:
    kinds = [layer.attention for layer in _model(compress_ratios=[0, 4, 128, 4, 0, 0]).layers]
    assert kinds == [
        AttentionKind.SLIDING,
        AttentionKind.COMPRESSED_SPARSE,
        AttentionKind.HEAVILY_COMPRESSED,
        AttentionKind.COMPRESSED_SPARSE,
        AttentionKind.SLIDING,
    ]


def test_layer_types_take_precedence_over_ratios() -> None:
    names = ["sliding_attention"] * 5
    layers = _model(layer_types=names, compress_ratios=[4] * 5, num_hash_layers=0).layers
    assert {layer.name for layer in layers} == {"sliding/moe"}


@pytest.mark.parametrize(
    "keys",
    [
        {"compress_rate_csa": 2, "compress_rate_hca": 16},
        {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 16}},
    ],
)
def test_rates_are_read_under_both_names(keys: dict[str, Any]) -> None:
    attention = _attention(**keys)
    assert (attention.sparse_rate, attention.heavy_rate) == (2, 16)


@pytest.mark.parametrize(
    ("keys", "rope_dim"),
    [({}, 16), ({"qk_rope_head_dim": 32}, 32), ({"partial_rotary_factor": 0.5}, 64)],
)
def test_rotated_fraction_of_a_head(keys: dict[str, Any], rope_dim: int) -> None:
    assert _attention(**keys).rope_dim == rope_dim


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": YARN},
        {
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10_000.0},
                "compress": YARN | {"rope_theta": 160_000.0, "attention_factor": 1.0},
            }
        },
    ],
)
def test_scaling_applies_to_compressed_layers_only(keys: dict[str, Any]) -> None:
    """YaRN of a flat config does not scale cosine and sine; a nested config sets the factor."""
    attention = _attention(**keys)
    assert attention.rope == Rope(theta=10_000.0, is_interleaved=True)
    assert attention.compressed_rope == Rope(
        theta=160_000.0,
        rope_type=RopeType.YARN,
        factor=16.0,
        original_max_position=64,
        attention_factor=1.0,
        is_interleaved=True,
    )


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 must be 1.*Correct"),
        ({"compress_ratios": [4, 4]}, "'compress_ratios' must be 0, 4 or 128 for each of 5 layers"),
        ({"compress_ratios": [4, 4, 4, 4, 1]}, "'compress_ratios' must be 0, 4 or 128"),
        ({"mlp_layer_types": ["dense"] * 5}, "'mlp_layer_types' must list one of hash_moe, moe"),
        ({"scoring_func": "exp"}, "scoring_func='exp' is not supported. Supported: softmax"),
        ({"o_groups": 3}, "num_attention_heads=16 is not a multiple of o_groups=3"),
        ({"qk_rope_head_dim": 127}, "qk_rope_head_dim=127 must be even and at most 128"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported.*Set it to false"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        _model(**keys)


def test_a_model_is_stored_and_read_back() -> None:
    model = _model(compress_ratios=[0, 4, 128, 4, 0], rope_scaling=YARN, hc_mult=2)
    assert model.hyper == HyperConnections(n_streams=2, n_iterations=20, eps=1e-6)
    assert model_from_dict(model_as_dict(model)) == model


@pytest.mark.parametrize("name", ["DeepSeek-V4", "deepseek-ai/deepseek-v4-flash"])
def test_aliases_of_a_model(name: str) -> None:
    flash, base = read_model(name), read_model("deepseek-ai/DeepSeek-V4-Flash-Base")
    assert replace(flash, name=base.name, source=base.source) == base


def test_the_published_layers_repeat_in_three_loops() -> None:
    """Two window-only layers, one more with hash routing, then two alternating kinds."""
    repeats = repeats_of(read_model("DeepSeek-V4").layers)
    assert [(len(repeat.body), repeat.times) for repeat in repeats] == [(1, 2), (1, 1), (2, 20)]


@pytest.mark.slow
def test_transformers_reads_the_same_layers_and_rotations() -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    for keys in ({}, {"compress_ratios": [0, 4, 128, 4, 0, 0], "num_hash_layers": 1}):
        model = _model(**keys)
        given = LEAST | keys
        given = {key: value for key, value in given.items() if key != "model_type"}
        config = transformers.AutoConfig.for_model("deepseek_v4", **given)
        names = {"sliding": "sliding_attention"}
        kinds = [
            names.get(layer.attention, f"{layer.attention}_attention") for layer in model.layers
        ]
        assert kinds == config.layer_types
        assert [layer.mlp.value for layer in model.layers] == config.mlp_layer_types
        assert isinstance(model.attention, CompressedAttention)
        assert model.attention.rope_dim == config.qk_rope_head_dim
        thetas = [model.attention.rope.theta, model.attention.compressed_rope.theta]
        assert thetas == [config.rope_parameters[key]["rope_theta"] for key in ("main", "compress")]
