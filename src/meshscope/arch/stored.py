"""A Model as plain values, for manifests, and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshscope.arch.model import (
    Activation,
    Attention,
    AttentionKind,
    Family,
    GroupedAttention,
    GroupScore,
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
    moe = model.pop("moe")
    del model["n_layers"]
    return Model(
        family=Family(model.pop("family")),
        attention=_attention(model.pop("attention")),
        layers=tuple(_layer(name) for name in model.pop("layers")),
        moe=None if moe is None else _moe(moe),
        **model,
    )


def _layer(name: str) -> Layer:
    attention, _, mlp = name.partition("/")
    return Layer(attention=AttentionKind(attention), mlp=MlpKind(mlp))


def _attention(values: Mapping[str, Any]) -> Attention:
    attention = dict(values)
    rope = dict(attention.pop("rope"))
    rope["rope_type"] = RopeType(rope["rope_type"])
    if "kv_rank" not in attention:
        return GroupedAttention(**attention, rope=Rope(**rope))
    indexer = attention.pop("indexer")
    return LatentAttention(
        **attention,
        rope=Rope(**rope),
        indexer=None if indexer is None else Indexer(**indexer),
    )


def _moe(values: Mapping[str, Any]) -> MixtureOfExperts:
    moe = dict(values)
    return MixtureOfExperts(
        scoring=Scoring(moe.pop("scoring")),
        group_score=GroupScore(moe.pop("group_score")),
        activation=Activation(moe.pop("activation")),
        **moe,
    )
