"""Reads attention, layers, experts and hyper-connections of a DeepSeek-V4 config.

Defaults and older keys are those of transformers' DeepseekV4Config.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshscope.errors import SpecError
from meshscope.model.model import (
    Activation,
    AttentionKind,
    CompressedAttention,
    HyperConnections,
    Indexer,
    Layer,
    MixtureOfExperts,
    MlpKind,
    Rope,
    RopeType,
    Scoring,
)
from meshscope.model.reader import ConfigReader, read_rope

ROTATED_SHARE = 64 / 512  # rotated fraction of a head if the config has neither fraction nor width
COMPRESSED_THETA = 160_000.0
N_HASH_LAYERS = 3
KINDS = {
    "sliding_attention": AttentionKind.SLIDING,
    "compressed_sparse_attention": AttentionKind.COMPRESSED_SPARSE,
    "heavily_compressed_attention": AttentionKind.HEAVILY_COMPRESSED,
}
KIND_OF_RATIO = {
    0: AttentionKind.SLIDING,
    4: AttentionKind.COMPRESSED_SPARSE,
    128: AttentionKind.HEAVILY_COMPRESSED,
}
MLP_KINDS = {"hash_moe": MlpKind.HASH_MOE, "moe": MlpKind.MOE}


def compressed_attention(reader: ConfigReader) -> CompressedAttention:
    """The attention parameters of all layers; a layer's kind selects the parts it uses."""
    if reader.integer("num_key_value_heads", 1) != 1:
        raise SpecError(
            f"{reader.source}: num_key_value_heads={reader.integer('num_key_value_heads')} must be 1: "
            "all heads of deepseek_v4 share one key. Correct the config."
        )
    head_dim = reader.integer("head_dim")
    rope, compressed_rope = _ropes(reader)
    return CompressedAttention(
        n_heads=reader.integer("num_attention_heads"),
        q_rank=reader.integer("q_lora_rank"),
        head_dim=head_dim,
        rope_dim=_rope_dim(reader, head_dim),
        window=reader.integer("sliding_window", 128),
        sparse_rate=_rate(reader, "compressed_sparse_attention", "compress_rate_csa", 4),
        heavy_rate=_rate(reader, "heavily_compressed_attention", "compress_rate_hca", 128),
        n_groups=reader.integer("o_groups", 8),
        group_rank=reader.integer("o_lora_rank", 1024),
        rope=rope,
        compressed_rope=compressed_rope,
        indexer=Indexer(
            n_heads=reader.integer("index_n_heads", 64),
            head_dim=reader.integer("index_head_dim", 128),
            top_k=reader.integer("index_topk", 512),
        ),
    )


def compressed_layers(reader: ConfigReader, n_layers: int) -> tuple[Layer, ...]:
    """The kind of each layer; lists in published configs may be longer than the model."""
    n_hash = reader.count("num_hash_layers", N_HASH_LAYERS)
    default = ["hash_moe"] * min(n_hash, n_layers) + ["moe"] * max(0, n_layers - n_hash)
    mlp = _first(reader, "mlp_layer_types", n_layers).names(
        "mlp_layer_types", n_layers, MLP_KINDS, default
    )
    attention = _attention_kinds(reader, n_layers)
    return tuple(
        Layer(attention=kind, mlp=MLP_KINDS[name])
        for kind, name in zip(attention, mlp, strict=True)
    )


def compressed_moe(reader: ConfigReader) -> MixtureOfExperts:
    """The experts; the shared expert is as wide as one routed expert, whatever the config counts."""
    scoring = reader.text("scoring_func", Scoring.SQRT_SOFTPLUS.value)
    if scoring not in set(Scoring):
        raise SpecError(
            f"{reader.source}: scoring_func={scoring!r} is not supported. Supported: {', '.join(Scoring)}."
        )
    if reader.boolean("mlp_bias", default=False):
        raise SpecError(
            f"{reader.source}: mlp_bias=true is not supported for deepseek_v4. Set it to false."
        )
    ffn = reader.integer("moe_intermediate_size")
    return MixtureOfExperts(
        n_experts=reader.integer("n_routed_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn,
        scoring=Scoring(scoring),
        is_normalized=True,
        scale=reader.number("routed_scaling_factor", 1.5),
        has_correction_bias=True,
        activation=Activation.LIMITED_SWIGLU,
        activation_limit=reader.number("swiglu_limit", 10.0),
    )


def hyper_connections(reader: ConfigReader) -> HyperConnections:
    """The parallel residual streams."""
    return HyperConnections(
        n_streams=reader.integer("hc_mult", 4),
        n_iterations=reader.integer("hc_sinkhorn_iters", 20),
        eps=reader.number("hc_eps", 1e-6),
    )


def _attention_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """From `layer_types`, else `compress_ratios`, else the default pattern.

    By default layers 0 to 2 are heavily compressed; then sparse and heavy layers alternate.
    """
    if reader.get("layer_types") is None and reader.get("compress_ratios"):
        ratios = reader.integers("compress_ratios")[:n_layers]
        if len(ratios) != n_layers or not KIND_OF_RATIO.keys() >= set(ratios):
            raise SpecError(
                f"{reader.source}: 'compress_ratios' must be 0, 4 or 128 for each of {n_layers} layers, "
                f"got {ratios}. Correct the config, or write 'layer_types'."
            )
        return [KIND_OF_RATIO[ratio] for ratio in ratios]
    _, sparse, heavy = KINDS
    default = [sparse if index > 2 and index % 2 else heavy for index in range(n_layers)]
    names = _first(reader, "layer_types", n_layers).names("layer_types", n_layers, KINDS, default)
    return [KINDS[name] for name in names]


def _first(reader: ConfigReader, key: str, n_layers: int) -> ConfigReader:
    """The config with this list truncated to the model's layers."""
    values = reader.get(key)
    if not isinstance(values, list):
        return reader
    return reader.over({**reader.config, key: values[:n_layers]})


def _rate(reader: ConfigReader, kind: str, older_key: str, default: int) -> int:
    """Positions per entry, from the separate key of older configs or from `compress_rates`."""
    rates = _mapping(reader, "compress_rates")
    return reader.integer(older_key, reader.over(rates).integer(kind, default))


def _rope_dim(reader: ConfigReader, head_dim: int) -> int:
    share = reader.optional_number("partial_rotary_factor")
    if share is None:
        width = reader.optional_integer("qk_rope_head_dim")
        share = ROTATED_SHARE if width is None else width / head_dim
    return int(head_dim * share)


def _ropes(reader: ConfigReader) -> tuple[Rope, Rope]:
    """Rotary embeddings of window-only layers and of compressed layers.

    The config nests them under `main` and `compress`, or is flat. In a flat config, scaling applies
    to compressed layers only, and their YaRN does not scale cosine and sine.
    """
    nested = _mapping(reader, "rope_parameters")
    if isinstance(nested.get("main"), Mapping) and isinstance(nested.get("compress"), Mapping):
        main, compressed = (_rope_of(reader, nested[key]) for key in ("main", "compress"))
        return main, compressed
    scaling = {**_mapping(reader, "rope_scaling"), **nested}
    scaling["rope_theta"] = reader.number("compress_rope_theta", COMPRESSED_THETA)
    compressed = _rope_of(reader, scaling)
    if compressed.rope_type is RopeType.YARN and compressed.attention_factor is None:
        compressed = replace(compressed, attention_factor=1.0)
    return _rope_of(reader, {}), compressed


def _rope_of(reader: ConfigReader, parameters: Mapping[str, Any]) -> Rope:
    whole = {**reader.config, "rope_scaling": None, "rope_parameters": parameters}
    return replace(read_rope(reader.over(whole)), is_interleaved=True)


def _mapping(reader: ConfigReader, key: str) -> Mapping[str, Any]:
    value = reader.get(key) or {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{reader.source}: '{key}' must be an object, got {value!r}.")
    return value
