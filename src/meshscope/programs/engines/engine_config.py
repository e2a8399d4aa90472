"""The configuration of an engine for an experiment: Hugging Face's keys of the model, vLLM's, MaxText's."""

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from meshscope.errors import SpecError
from meshscope.model.families import TRAITS, MlpRule
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.latent import latent_of
from meshscope.model.model import Model
from meshscope.model.quantization import FP8_BLOCKS
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.torchxla.configs import hugging_face_config

# `architectures` of the published configs, by family.
ARCHITECTURES = {key: row.engine_class for key, row in TRAITS.items() if row.engine_class}
# Checkpoints with quantized weights: `quantization_config` of their config.json, without the list of
# matrices that stay in bf16. The engine makes int8 weights from the fp8 blocks as it loads them.
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_FP8_BLOCKS = {**_FP8, "weight_block_size": [128, 128]}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "f8e4m3fn": _FP8,
    FP8_BLOCKS: _FP8_BLOCKS,
    "s8": _FP8_BLOCKS,
}
CACHE_DTYPES = {"bf16": "auto", "f8e4m3fn": "fp8", "f8e5m2": "fp8_e5m2"}  # as vLLM names them


def unknown_family(model: Model, engine: str) -> SpecError:
    """The error of a model whose config meshscope does not write for engines."""
    return SpecError(
        f"{model.name}: {engine} gets no config of the family {model.family} from meshscope. Use "
        f"--frontend jax, or a model of {', '.join(ARCHITECTURES)}."
    )


def architecture_config(model: Model) -> dict[str, Any]:
    """The model's config with the keys of transformers 4 and 5; SpecError for an unknown family."""
    if model.family not in ARCHITECTURES:
        raise unknown_family(model, "a serving engine")
    config = hugging_face_config(model)
    rope = config["rope_parameters"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    is_scaled = rope["rope_type"] != "default"
    config |= {
        "architectures": [ARCHITECTURES[model.family]],
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling | {"type": rope["rope_type"]} if is_scaled else None,
    }
    if model.family.traits.mlps is MlpRule.STEP:
        config["decoder_sparse_step"] = 1  # dense layers are in `mlp_only_layers`
    return config


def engine_variables_of(experiment: Experiment) -> dict[str, str]:
    """Environment variables that the engine's documentation asks for."""
    if experiment.program.frontend is Frontend.MAXTEXT:
        return {"DECOUPLE_GCLOUD": "TRUE"}  # no clients of Google Cloud
    if experiment.program.frontend is not Frontend.VLLM_TPU:
        return {}
    is_latent = experiment.model.attention.mechanism is Mechanism.LATENT
    # its meshes with axes for the attention's data and experts
    variables = {"NEW_MODEL_DESIGN": "1"} if is_latent else {}
    if experiment.workload.weight_dtype == "s8":
        variables |= {"REQUANTIZE_WEIGHT_DTYPE": "int8", "MOE_REQUANTIZE_WEIGHT_DTYPE": "int8"}
    return variables


def vllm_config(experiment: Experiment, dtype: Any) -> SimpleNamespace:
    """What the engine reads of its `VllmConfig`; the runner adds page size and sharding.

    `dtype` is the activations' dtype. `max_num_seqs` and `max_num_batched_tokens` are per data-parallel
    rank.
    """
    plan, workload, model = experiment.plan, experiment.workload, experiment.model
    # Attention is data-parallel over the devices that share the experts, which have their own axis.
    has_expert_axis = plan.ep > 1 and plan.ep == plan.dp
    strategy = {"enable_dp_attention": True, "expert_parallelism": plan.ep}
    hugging_face = SimpleNamespace(**architecture_config(model))
    quantization = QUANTIZATION.get(workload.weight_dtype)
    if quantization is not None:
        hugging_face.quantization_config = quantization
    is_latent = model.attention.mechanism is Mechanism.LATENT
    hugging_face.get_text_config = lambda *_, **__: hugging_face
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hugging_face,
            hf_text_config=hugging_face,
            dtype=dtype,
            model=model.name,
            max_model_len=workload.context,
            quantization=None if quantization is None else quantization["quant_method"],
            runner_type="generate",
            use_mla=is_latent,
            is_multimodal_model=False,
            uses_mrope=False,
            get_vocab_size=lambda: model.vocab,
            get_hidden_size=lambda: model.hidden,
            get_head_size=lambda: (
                latent_of(model.attention).latent_width if is_latent else hugging_face.head_dim
            ),
            get_total_num_kv_heads=lambda: hugging_face.num_key_value_heads,
            get_sliding_window=lambda: None,
        ),
        cache_config=SimpleNamespace(cache_dtype=CACHE_DTYPES[workload.cache_dtype]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=plan.tp,
            data_parallel_size=1 if has_expert_axis else plan.dp,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            enable_expert_parallel=plan.ep > 1,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=workload.batch // plan.data_size,
            max_num_batched_tokens=experiment.prefill_chunks.n_tokens,
        ),
        additional_config={"sharding": {"sharding_strategy": strategy}} if has_expert_axis else {},
        load_config=SimpleNamespace(load_format="auto"),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        speculative_config=None,
        lora_config=None,
        quant_config=None,
    )


MAXTEXT: Mapping[str, Any] = tomllib.loads(
    (files("meshscope.programs") / "maxtext_models.toml").read_text(encoding="utf-8")
)
MAXTEXT_MODELS: Mapping[str, str] = MAXTEXT["models"]
_TUNED = re.compile(r"(-v0\.1)?(-Instruct|-Base|-Chat|-chat|-it)?(-v0\.1|-2507)?$")


def maxtext_model(model: Model) -> str:
    """MaxText's name of the model; SpecError if it has none."""
    names = {name.lower(): value for name, value in MAXTEXT_MODELS.items()}
    name = _TUNED.sub("", model.name).lower()
    if name not in names:
        raise SpecError(
            f"{model.name}: MaxText has no configuration of this model that meshscope knows. Use "
            f"--frontend jax, or one of {', '.join(MAXTEXT_MODELS)}."
        )
    return names[name]


def sizes_of(model: Model) -> dict[str, int]:
    """The model's sizes by MaxText's names, for a comparison with its configuration."""
    attention = model.attention
    parts = {"model": model, "experts": model.moe, attention.mechanism.name.lower(): attention}
    return {
        name: size
        for part, names in MAXTEXT["sizes"].items()
        for name, field in names.items()
        if (size := getattr(parts.get(part), field, None)) is not None
    }
