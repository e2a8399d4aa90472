"""The configuration of an engine for an experiment: Hugging Face's keys of the model, and vLLM's."""

from types import SimpleNamespace
from typing import Any

from meshscope.errors import SpecError
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import Family, Model

# `architectures` of the published configs.
ARCHITECTURES: dict[Family, str] = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Family.MIXTRAL: "MixtralForCausalLM",
}
CACHE_DTYPES = {"bf16": "auto", "f8e4m3fn": "fp8", "f8e5m2": "fp8_e5m2"}  # as vLLM names them


def architecture_config(model: Model) -> dict[str, Any]:
    """The model's config with the keys of transformers 4 and 5; SpecError for an unknown family."""
    if model.family not in ARCHITECTURES:
        raise SpecError(
            f"{model.name}: serving engines get no config of the family {model.family} from meshscope. "
            f"Use --frontend jax, or a model of {', '.join(ARCHITECTURES)}."
        )
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
    if model.family is Family.QWEN3_MOE:
        config["decoder_sparse_step"] = 1  # dense layers are in `mlp_only_layers`
    return config


def vllm_config(experiment: Experiment, dtype: Any) -> SimpleNamespace:
    """What the engine reads of its `VllmConfig`; the runner adds page size and sharding.

    `dtype` is that of the activations. `max_num_seqs` and `max_num_batched_tokens` are those of one
    data-parallel rank.
    """
    plan, workload, model = experiment.plan, experiment.workload, experiment.model
    hugging_face = SimpleNamespace(**architecture_config(model))
    hugging_face.get_text_config = lambda *_, **__: hugging_face
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hugging_face,
            hf_text_config=hugging_face,
            dtype=dtype,
            model=model.name,
            max_model_len=workload.context,
            quantization=None,
            runner_type="generate",
            use_mla=False,
            is_multimodal_model=False,
            uses_mrope=False,
            get_vocab_size=lambda: model.vocab,
            get_hidden_size=lambda: model.hidden,
            get_head_size=lambda: hugging_face.head_dim,
            get_total_num_kv_heads=lambda: hugging_face.num_key_value_heads,
            get_sliding_window=lambda: None,
        ),
        cache_config=SimpleNamespace(cache_dtype=CACHE_DTYPES[workload.cache_dtype]),
        parallel_config=_parallel_config(experiment),
        scheduler_config=SimpleNamespace(
            max_num_seqs=workload.batch // plan.data_size,
            max_num_batched_tokens=experiment.prefill_chunks.n_tokens,
        ),
        additional_config={},
        load_config=SimpleNamespace(load_format="auto"),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        speculative_config=None,
        lora_config=None,
        quant_config=None,
    )


def _parallel_config(experiment: Experiment) -> SimpleNamespace:
    plan = experiment.plan
    return SimpleNamespace(
        tensor_parallel_size=plan.tp,
        data_parallel_size=plan.dp,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
    )
