"""A Model as plain values, for manifests, and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshscope.spec.model.model import (
    Activation,
    Attention,
    AttentionKind,
    CompressedAttention,
    Family,
    GroupedAttention,
    GroupScore,
    HyperConnections,
    Indexer,
    LatentAttention,
    Layer,
    MixtureOfExperts,
    MlpKind,
    Model,
    Rope,
    RopeType,
    Scoring,
)


def model_as_dict(model: Model) -> dict[str, Any]:
    """The model as plain values; a layer is the name of its kind, e.g. `full/moe`."""
    layers = [layer.name for layer in model.layers]
    return asdict(model) | {"n_layers": model.n_layers, "layers": layers}


def model_from_dict(values: Mapping[str, Any]) -> Model:
    """The model; KeyError, TypeError or ValueError where a value is missing or foreign."""
    model = dict(values)
    moe, hyper = model.pop("moe"), model.pop("hyper")
    del model["n_layers"]
    return Model(
        family=Family(model.pop("family")),
        attention=_attention(model.pop("attention")),
        layers=tuple(_layer(name) for name in model.pop("layers")),
        moe=None if moe is None else _moe(moe),
        hyper=None if hyper is None else HyperConnections(**hyper),
        **model,
    )


def _layer(name: str) -> Layer:
    attention, _, mlp = name.partition("/")
    return Layer(attention=AttentionKind(attention), mlp=MlpKind(mlp))


def _attention(values: Mapping[str, Any]) -> Attention:
    attention = dict(values)
    rope = _rope(attention.pop("rope"))
    if "compressed_rope" in attention:
        return CompressedAttention(
            rope=rope,
            compressed_rope=_rope(attention.pop("compressed_rope")),
            indexer=Indexer(**attention.pop("indexer")),
            **attention,
        )
    if "kv_rank" not in attention:
        return GroupedAttention(**attention, rope=rope)
    indexer = attention.pop("indexer")
    return LatentAttention(
        **attention,
        rope=rope,
        indexer=None if indexer is None else Indexer(**indexer),
    )


def _rope(values: Mapping[str, Any]) -> Rope:
    rope = dict(values)
    return Rope(rope_type=RopeType(rope.pop("rope_type")), **rope)


def _moe(values: Mapping[str, Any]) -> MixtureOfExperts:
    moe = dict(values)
    return MixtureOfExperts(
        scoring=Scoring(moe.pop("scoring")),
        group_score=GroupScore(moe.pop("group_score")),
        activation=Activation(moe.pop("activation")),
        **moe,
    )
