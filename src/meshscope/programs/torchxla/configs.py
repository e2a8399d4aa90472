"""Converts a Model into a transformers config, the inverse of `model/config.py`, and says what has a program."""

from typing import Any, assert_never

from meshscope.errors import PlanError, SpecError
from meshscope.model.families import EXPERT_KEYS, Family, MlpRule
from meshscope.model.layers import AttentionKind, MlpKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.compressed import compressed_of
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.mechanisms.latent import latent_of
from meshscope.model.mechanisms.mixture import GroupScore, MixtureOfExperts
from meshscope.model.model import Model
from meshscope.model.reader import Rope, RopeType
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner

# Families with a program. The partitioner cannot split modules of the others: fused matrices, linear attention,
# indexers, parallel experts, or several sizes of heads.
TRACED = (
    *(
        Family.LLAMA,
        Family.MISTRAL,
        Family.MINISTRAL,
        Family.MINISTRAL3,
        Family.GEMMA2,
        Family.GEMMA3,
    ),
    *(
        Family.QWEN2,
        Family.QWEN3,
        Family.MIXTRAL,
        Family.QWEN3_MOE,
        Family.GLM4_MOE,
        Family.GPT_OSS,
    ),
    *(Family.DEEPSEEK_V2, Family.DEEPSEEK_V3, Family.DEEPSEEK_V4),
)
HAS_ATTENTION_BIAS = {
    *(Family.LLAMA, Family.QWEN3, Family.QWEN3_MOE, Family.GLM4_MOE, Family.GPT_OSS)
}
# Names that transformers gives to the layers' kinds of attention, in `layer_types` and in masks.
LAYER_TYPES = {
    AttentionKind.FULL: "full_attention",
    AttentionKind.SLIDING: "sliding_attention",
    AttentionKind.COMPRESSED_SPARSE: "compressed_sparse_attention",
    AttentionKind.HEAVILY_COMPRESSED: "heavily_compressed_attention",
}


def hugging_face_config(model: Model) -> dict[str, Any]:
    """The config with the key names of transformers 5, including `model_type`.

    A model truncated to fewer layers keeps the kinds of its layers, so lists are explicit.
    SpecError if this front end does not support a part of the model.
    """
    if model.family not in TRACED:
        raise SpecError(
            f"{model.name}: --frontend torchxla has no program for the family {model.family}: the partitioner "
            f"cannot split modules that transformers has for it. Use --frontend jax, or a model of {', '.join(TRACED)}."
        )
    sizes = {"max_position_embeddings": model.max_position, "intermediate_size": model.ffn}
    attention = {Mechanism.LATENT: _latent, Mechanism.COMPRESSED: _compressed}
    return {
        "model_type": model.family.value,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.n_layers,
        "vocab_size": model.vocab,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.has_tied_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_known(sizes),
        **attention.get(model.attention.mechanism, _grouped)(model),
        **(_no_experts(model) if model.moe is None else _experts(model, model.moe)),
    }


def _known(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in keys.items() if value is not None}


def _layer_types(model: Model) -> list[str]:
    return [LAYER_TYPES[layer.attention] for layer in model.layers]


def _grouped(model: Model) -> dict[str, Any]:
    attention, family = grouped_of(model.attention), model.family
    ropes: dict[str, Any] = _rope(attention.rope)
    if attention.sliding_rope is not None:
        of_kinds = {
            kind: attention.rope_of(kind) for kind in (AttentionKind.FULL, AttentionKind.SLIDING)
        }
        ropes = {LAYER_TYPES[kind]: _rope(rope) for kind, rope in of_kinds.items() if rope}
    if family is Family.MINISTRAL3 and attention.temperature is not None:
        ropes["llama_4_scaling_beta"] = attention.temperature.strength
    config: dict[str, Any] = {
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "rope_parameters": ropes,
    }
    if family in HAS_ATTENTION_BIAS:
        config["attention_bias"] = attention.has_qkv_bias
    if family.traits.has_window or family is Family.MIXTRAL:
        config["sliding_window"] = attention.window
    if family.traits.has_window:
        config["layer_types"] = _layer_types(model)
    match family:
        case Family.GEMMA2 | Family.GEMMA3:
            config |= {
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": round(attention.score_scale**-2),
                "attn_logit_softcapping": attention.softcap,
                "final_logit_softcapping": model.logit_softcap,
            }
        case Family.GLM4_MOE:
            config["use_qk_norm"] = attention.has_qk_norm
        case Family.LLAMA:
            config["mlp_bias"] = model.has_mlp_bias
        case _:
            pass
    return config


def _latent(model: Model) -> dict[str, Any]:
    attention = latent_of(model.attention)
    config: dict[str, Any] = {
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": attention.has_bias,
        "rope_parameters": _rope(attention.rope),
    }
    if model.family is Family.DEEPSEEK_V3:
        config["rope_interleave"] = attention.rope.is_interleaved
    return config


def _compressed(model: Model) -> dict[str, Any]:
    attention = compressed_of(model.attention)
    if attention.rope.rope_type is not RopeType.DEFAULT:
        raise SpecError(
            f"{model.name}: --frontend torchxla scales the angles of layers with entries only, but the config "
            f"has {attention.rope.rope_type} in others. Use --frontend jax."
        )
    hyper = model.hyper
    assert hyper is not None
    return {
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": 1,
        "head_dim": attention.head_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "rope_theta": attention.rope.theta,
        "compress_rope_theta": attention.compressed_rope.theta,
        "rope_parameters": _rope(attention.compressed_rope),
        "q_lora_rank": attention.q_rank,
        "sliding_window": attention.window,
        "compress_rates": {
            LAYER_TYPES[AttentionKind.COMPRESSED_SPARSE]: attention.sparse_rate,
            LAYER_TYPES[AttentionKind.HEAVILY_COMPRESSED]: attention.heavy_rate,
        },
        "o_groups": attention.n_groups,
        "o_lora_rank": attention.group_rank,
        "index_n_heads": attention.indexer.n_heads,
        "index_head_dim": attention.indexer.head_dim,
        "index_topk": attention.indexer.top_k,
        "layer_types": _layer_types(model),
        "mlp_layer_types": [layer.mlp.value for layer in model.layers],
        "hc_mult": hyper.n_streams,
        "hc_sinkhorn_iters": hyper.n_iterations,
        "hc_eps": hyper.eps,
    }


def _rope(rope: Rope) -> dict[str, Any]:
    """Only the keys that the scaling type reads; transformers warns about others."""
    parameters: dict[str, Any] = {"rope_type": rope.rope_type.value, "rope_theta": rope.theta}
    if rope.rotary_frac != 1.0:
        parameters["partial_rotary_factor"] = rope.rotary_frac
    match rope.rope_type:
        case RopeType.DEFAULT:
            pass
        case RopeType.LINEAR:
            parameters["factor"] = rope.factor
        case RopeType.LLAMA3:
            parameters |= {
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_position,
            }
        case RopeType.YARN:
            parameters |= _known(
                {
                    "factor": rope.factor,
                    "beta_fast": rope.beta_fast,
                    "beta_slow": rope.beta_slow,
                    "original_max_position_embeddings": rope.original_max_position,
                    "truncate": None if rope.is_truncated else False,
                    "mscale": rope.mscale,
                    "mscale_all_dim": rope.mscale_all_dim,
                    "attention_factor": rope.attention_factor,
                }
            )
        case RopeType.LONGROPE | RopeType.PROPORTIONAL:
            raise SpecError(
                f"angles scaled by {rope.rope_type} are not supported by --frontend torchxla. Use --frontend jax."
            )
        case _:
            assert_never(rope.rope_type)
    return parameters


def _experts(model: Model, moe: MixtureOfExperts) -> dict[str, Any]:
    row, keys = model.family.traits, EXPERT_KEYS[model.family.traits.experts or ""]
    config: dict[str, Any] = {
        keys.n_experts[-1]: moe.n_experts,
        keys.n_active: moe.n_active,
        keys.ffn: moe.ffn,
    }
    if keys.normalized is not None:
        config["norm_topk_prob"] = moe.is_normalized
    if keys.limit is not None:
        config["swiglu_limit"] = moe.activation_limit
    match row.mlps:
        case MlpRule.STEP:
            dense = [i for i, layer in enumerate(model.layers) if layer.mlp is MlpKind.DENSE]
            return config | {"mlp_only_layers": dense}
        case MlpRule.HASHED:
            config |= {"n_shared_experts": 1, "scoring_func": moe.scoring.value}
            return config | {"routed_scaling_factor": moe.scale}
        case MlpRule.FIRST_DENSE:
            return config | _deepseek_experts(model, moe)
        case _:
            return config


def _no_experts(model: Model) -> dict[str, Any]:
    """Keys that keep MoE classes from building experts if all layers are dense."""
    match model.family.traits.mlps:
        case MlpRule.STEP:
            return {"mlp_only_layers": list(range(model.n_layers))}
        case MlpRule.FIRST_DENSE:
            return {"first_k_dense_replace": model.n_layers}
        case _:
            return {}


def _deepseek_experts(model: Model, moe: MixtureOfExperts) -> dict[str, Any]:
    kinds = [layer.mlp for layer in model.layers]
    n_dense = kinds.count(MlpKind.DENSE)
    if kinds[:n_dense] != [MlpKind.DENSE] * n_dense:
        raise SpecError(
            f"{model.name}: --frontend torchxla supports dense layers only before layers with experts. "
            "Use --frontend jax."
        )
    assert moe.shared_ffn is not None
    config: dict[str, Any] = {
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": n_dense,
    }
    groups = {"n_group": moe.n_groups, "topk_group": moe.n_active_groups}
    if model.family is not Family.DEEPSEEK_V2:
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
