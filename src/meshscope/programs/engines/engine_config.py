"""What each engine takes: the configuration of an experiment, by Hugging Face's, vLLM's or MaxText's keys, and refusals."""

import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from meshscope.errors import MeshscopeError, PlanError, SpecError
from meshscope.files import own_table
from meshscope.hardware.chips import ChipKind
from meshscope.model.families import TRAITS, MlpRule
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.latent import latent_of
from meshscope.model.model import Model
from meshscope.model.quantization import FP8_BLOCKS
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.units import format_dtype

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


MAXTEXT: Mapping[str, Any] = own_table("programs/maxtext_models.toml")
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


BF16 = "bf16"
TENSOR_PARALLEL_ONLY = ("0.0.2",)  # releases of SGLang-JAX


def check_engine(experiment: Experiment) -> None:
    """Raises the first refusal of the experiment by its engine, if there is one."""
    topology = experiment.topology
    if topology.chip.kind is not ChipKind.TPU or topology.n_slices > 1:
        raise SpecError(
            f"'{topology.name}': --frontend {experiment.program.frontend} compiles for one TPU slice, e.g. "
            "v6e-8. Use --frontend jax."
        )
    option = f"--frontend {experiment.program.frontend}"
    for error in REFUSALS[experiment.program.frontend](experiment, option):
        raise error


def _vllm(experiment: Experiment, option: str) -> Iterator[MeshscopeError]:
    model, workload = experiment.model, experiment.workload
    dtype = workload.weight_dtype
    is_quantized, weights = dtype in QUANTIZATION, f"--weight-dtype {format_dtype(dtype)}"
    if model.family not in ARCHITECTURES:
        yield unknown_family(model, option)
    yield from _other_axes(experiment, f"{option} takes tp, dp, ep", ("tp", "dp", "ep"))
    yield from _vllm_layout(experiment, option)
    if workload.activation_dtype != BF16:
        yield SpecError(
            f"{option} computes activations in bf16, not {workload.activation_dtype}. Omit the dtype, or "
            "use --frontend jax."
        )
    if dtype != BF16 and not is_quantized:
        known = ", ".join(map(format_dtype, (BF16, *QUANTIZATION)))
        yield SpecError(
            f"{weights}: {option} has weights in {known}. Use one of these, or --frontend jax."
        )
    if model.attention.mechanism is Mechanism.LATENT and not is_quantized:
        yield SpecError(
            f"{weights}: the engine's loader splits latent projections of fp8 checkpoints only. Omit the "
            f"dtype, which {model.name} stores in fp8."
        )
    if is_quantized and model.family.traits.experts == "gpt_oss":
        yield SpecError(
            f"{weights}: {option} compiles {model.name} with bf16 weights. "
            "Use --dtype bf16, or --frontend jax."
        )
    if workload.cache_dtype not in CACHE_DTYPES:
        yield SpecError(
            f"{option} has no cache of {format_dtype(workload.cache_dtype)}. "
            f"Use {' or '.join(map(format_dtype, CACHE_DTYPES))}."
        )


def _vllm_layout(experiment: Experiment, option: str) -> Iterator[MeshscopeError]:
    """The engine lays out experts by its own rules."""
    plan, model, n = experiment.plan, experiment.model, experiment.plan.n_devices
    match model.family.traits.experts:
        case "deepseek_v3":
            rule = "runs latent attention data-parallel on the devices that share the experts"
            needed = f"dp={n},ep={n}"
        case "gpt_oss":
            rule = "splits attention over tp and gives each device of tp some of the experts"
            needed = f"tp={n},ep={n}"
        case _ if model.moe is not None:
            rule, needed = "splits each expert over tp", f"tp={n}"
        case _:
            rule, needed = "", str(plan)
    if str(plan) != needed and n > 1:
        yield PlanError(f"plan '{plan}': {option} {rule}. Use {needed} for {model.name}.")


def _sglang(experiment: Experiment, option: str) -> Iterator[MeshscopeError]:
    """The engine itself refuses more, with its own messages."""
    plan, attention = experiment.plan, experiment.model.attention
    is_grouped = attention.mechanism is Mechanism.GROUPED
    if not is_grouped or attention.window_of(AttentionKind.SLIDING) is not None:
        yield SpecError(
            f"{experiment.model.name}: {option} builds caches of whole keys and values only. Use "
            "--frontend jax."
        )
    yield from _other_axes(experiment, f"{option} takes tp, dp, ep", ("tp", "dp", "ep"))
    version = experiment.program.engine_version
    if max(plan.dp, plan.ep) > 1 and version in TENSOR_PARALLEL_ONLY:
        yield PlanError(
            f"plan '{plan}': servers of {option} {version} run tp alone. Use tp={plan.n_devices}, or "
            "a newer release."
        )
    yield from _bf16_only(experiment, option)


def _maxtext(experiment: Experiment, option: str) -> Iterator[MeshscopeError]:
    maxtext_model(experiment.model)
    plan = experiment.plan
    for axis in (axis for axis in plan.axes if axis != "tp"):
        yield PlanError(
            f"plan '{plan}': {option} maps tp to MaxText's axis tensor, and its engine prefills "
            f"one prompt on all devices; {axis} is not supported. Use tp={plan.n_devices}, or --frontend jax."
        )
    yield from _bf16_only(experiment, option)
    workload = experiment.workload
    if experiment.prefill_chunks.n_tokens != workload.prompt:
        yield SpecError(
            f"--prefill-chunk {workload.prefill_chunk or 'off'}: MaxText's engine prefills one whole prompt "
            f"at a time. Use {workload.prompt}, or omit the option."
        )


def _other_axes(
    experiment: Experiment, rule: str, known: tuple[str, ...]
) -> Iterator[MeshscopeError]:
    for axis in (axis for axis in experiment.plan.axes if axis not in known):
        yield PlanError(f"plan '{experiment.plan}': {rule}, not {axis}. Use --frontend jax for it.")


def _bf16_only(experiment: Experiment, option: str) -> Iterator[MeshscopeError]:
    workload = experiment.workload
    dtypes = {
        "--dtype": workload.activation_dtype,
        "--weight-dtype": workload.weight_dtype,
        "--cache-dtype": workload.cache_dtype,
    }
    for name, dtype in dtypes.items():
        if dtype != BF16:
            yield SpecError(
                f"{name} {format_dtype(dtype)}: {option} compiles {BF16} only. Use {BF16}, or --frontend jax."
            )


REFUSALS: Mapping[Frontend, Callable[[Experiment, str], Iterator[MeshscopeError]]] = {
    Frontend.VLLM_TPU: _vllm,
    Frontend.SGLANG_JAX: _sglang,
    Frontend.MAXTEXT: _maxtext,
}
