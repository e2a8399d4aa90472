"""Converts a Model into a transformers config, the inverse of `model/config.py`, and says what has a program."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from meshscope.errors import PlanError, SpecError
from meshscope.files import own_table
from meshscope.model.families import EXPERT_KEYS, Family, MlpRule
from meshscope.model.layers import AttentionKind, MlpKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.compressed import compressed_of
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.mechanisms.mixture import GroupScore
from meshscope.model.model import Model
from meshscope.model.reader import Rope, RopeType
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner

KEYS: Mapping[str, Mapping[str, str]] = own_table("programs/config_keys.toml")
# Names that transformers gives to the layers' kinds of attention, in `layer_types` and in masks.
LAYER_TYPES = {
    AttentionKind.FULL: "full_attention",
    AttentionKind.SLIDING: "sliding_attention",
    AttentionKind.COMPRESSED_SPARSE: "compressed_sparse_attention",
    AttentionKind.HEAVILY_COMPRESSED: "heavily_compressed_attention",
}


# What each scaling of angles reads: fields of `Rope` and, but for one, keys of transformers.
SCALED_BY: dict[RopeType, tuple[str, ...]] = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    RopeType.YARN: (
        *("factor", "beta_fast", "beta_slow", "original_max_position"),
        *("mscale", "mscale_all_dim", "attention_factor"),
    ),
}


def hugging_face_config(model: Model) -> dict[str, Any]:
    """The config with the key names of transformers 5, including `model_type`.

    A model truncated to fewer layers keeps the kinds of its layers, so lists are explicit.
    SpecError if this front end does not support a part of the model.
    """
    if not model.family.traits.is_traced:
        traced = ", ".join(family for family in Family if family.traits.is_traced)
        raise SpecError(
            f"{model.name}: --frontend torchxla has no program for the family {model.family}: the partitioner "
            f"cannot split modules that transformers has for it. Use --frontend jax, or a model of {traced}."
        )
    mechanism = model.attention.mechanism
    of_attention = {
        Mechanism.LATENT: lambda _: {"rope_parameters": _rope(model.attention.rope)},
        Mechanism.COMPRESSED: _compressed,
    }
    return {
        "model_type": model.family.value,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_known(_fields(model, "model")),
        **_fields(model, mechanism.name.lower()),
        **_fields(model, model.family.value),
        **of_attention.get(mechanism, _grouped)(model),
        **_experts(model),
    }


def _fields(model: Model, part: str) -> dict[str, Any]:
    return {key: attrgetter(field)(model) for key, field in KEYS.get(part, {}).items()}


def _known(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in keys.items() if value is not None}


def _grouped(model: Model) -> dict[str, Any]:
    attention, row = grouped_of(model.attention), model.family.traits
    ropes: dict[str, Any] = _rope(attention.rope)
    if attention.sliding_rope is not None:
        of_kinds = {
            kind: attention.rope_of(kind) for kind in (AttentionKind.FULL, AttentionKind.SLIDING)
        }
        ropes = {LAYER_TYPES[kind]: _rope(rope) for kind, rope in of_kinds.items() if rope}
    if row.variant == "ministral3" and attention.temperature is not None:
        ropes["llama_4_scaling_beta"] = attention.temperature.strength
    config: dict[str, Any] = {"rope_parameters": ropes}
    if row.has_window:
        kinds = [LAYER_TYPES[layer.attention] for layer in model.layers]
        config |= {"sliding_window": attention.window, "layer_types": kinds}
    if row.variant in {"gemma2", "gemma3"}:
        scale = round(attention.score_scale**-2)
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scale}
    return config


def _compressed(model: Model) -> dict[str, Any]:
    attention = compressed_of(model.attention)
    if attention.rope.rope_type is not RopeType.DEFAULT:
        raise SpecError(
            f"{model.name}: --frontend torchxla scales the angles of layers with entries only, but the config "
            f"has {attention.rope.rope_type} in others. Use --frontend jax."
        )
    return {
        "num_key_value_heads": 1,
        "rope_parameters": _rope(attention.compressed_rope),
        "compress_rates": {
            LAYER_TYPES[AttentionKind.COMPRESSED_SPARSE]: attention.sparse_rate,
            LAYER_TYPES[AttentionKind.HEAVILY_COMPRESSED]: attention.heavy_rate,
        },
        "layer_types": [LAYER_TYPES[layer.attention] for layer in model.layers],
        "mlp_layer_types": [layer.mlp.value for layer in model.layers],
    }


def _rope(rope: Rope) -> dict[str, Any]:
    """Only the keys that the scaling type reads; transformers warns about others."""
    if rope.rope_type not in SCALED_BY:
        raise SpecError(
            f"angles scaled by {rope.rope_type} are not supported by --frontend torchxla. Use --frontend jax."
        )
    parameters: dict[str, Any] = {"rope_type": rope.rope_type.value, "rope_theta": rope.theta}
    if rope.rotary_frac != 1.0:
        parameters["partial_rotary_factor"] = rope.rotary_frac
    if rope.rope_type is RopeType.YARN and not rope.is_truncated:
        parameters["truncate"] = False
    scaled = {name: getattr(rope, name) for name in SCALED_BY[rope.rope_type]}
    if "original_max_position" in scaled:
        scaled["original_max_position_embeddings"] = scaled.pop("original_max_position")
    return parameters | _known(scaled)


def _experts(model: Model) -> dict[str, Any]:
    """The keys of experts; without any, those that keep classes with experts from building them."""
    row, moe = model.family.traits, model.moe
    config: dict[str, Any] = {}
    if moe is not None:
        keys = EXPERT_KEYS[row.experts or ""]
        config = {
            keys.n_experts[-1]: moe.n_experts,
            keys.n_active: moe.n_active,
            keys.ffn: moe.ffn,
        }
        if keys.normalized is not None:
            config["norm_topk_prob"] = moe.is_normalized
        if keys.limit is not None:
            config["swiglu_limit"] = moe.activation_limit
        if row.mlps is MlpRule.HASHED:
            config |= {"n_shared_experts": 1, "scoring_func": moe.scoring.value}
            config |= {"routed_scaling_factor": moe.scale}
    if row.mlps is MlpRule.STEP:
        dense = [i for i, layer in enumerate(model.layers) if layer.mlp is MlpKind.DENSE]
        config["mlp_only_layers"] = dense
    if row.mlps is MlpRule.FIRST_DENSE:
        config |= _deepseek_experts(model)
    return config


def _deepseek_experts(model: Model) -> dict[str, Any]:
    moe, kinds = model.moe, [layer.mlp for layer in model.layers]
    n_dense = kinds.count(MlpKind.DENSE)
    if kinds[:n_dense] != [MlpKind.DENSE] * n_dense:
        raise SpecError(
            f"{model.name}: --frontend torchxla supports dense layers only before layers with experts. "
            "Use --frontend jax."
        )
    if moe is None:
        return {"first_k_dense_replace": n_dense}
    assert moe.shared_ffn is not None
    config: dict[str, Any] = {
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": n_dense,
    }
    groups = {"n_group": moe.n_groups, "topk_group": moe.n_active_groups}
    if model.family.traits.experts != "deepseek_v2":
        return config | groups
    assert moe.group_score is GroupScore.MAX
    if moe.n_groups == 1:
        return config | {"topk_method": "greedy"}
    return config | groups | {"topk_method": "group_limited_greedy"}


def check_traceable(experiment: Experiment) -> None:
    """SpecError or PlanError for parts of the model and plans that this front end has no program for."""
    hugging_face_config(experiment.model)
    model, plan = experiment.model, experiment.plan
    if model.attention.mechanism is not Mechanism.COMPRESSED:
        return
    if axes := [axis for axis in ("pp", "cp") if getattr(plan, axis) > 1]:
        raise PlanError(
            f"plan '{plan}': {model.name} has compressed attention, for which --frontend torchxla has no program with "
            f"{' or '.join(axes)}. Use --frontend jax, or a plan without pp and cp."
        )
    if experiment.program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"--partitioner auto: --frontend torchxla replaces the attention of {model.name}, whose indexer "
            "scatters positions one by one. Use --partitioner manual, or --frontend jax."
        )
