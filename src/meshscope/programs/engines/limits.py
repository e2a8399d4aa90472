"""What each serving engine's model code supports: every refusal, by engine."""

from collections.abc import Callable, Iterator, Mapping

from meshscope.errors import MeshscopeError, PlanError, SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.engines.engine_config import (
    ARCHITECTURES,
    CACHE_DTYPES,
    QUANTIZATION,
    maxtext_model,
    unknown_family,
)
from meshscope.units import format_dtype

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
    yield from _other_axes(experiment, f"{option} takes tp, dp, ep, sp", ("tp", "dp", "ep", "sp"))
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
    is_wide = experiment.workload.weight_dtype == BF16
    if plan.sp and (plan.dp > 1 or model.moe is not None or not is_wide):
        yield PlanError(
            f"plan '{plan}': {option} takes sp with tp alone, for dense models in bf16. "
            "Omit sp, or use --frontend jax."
        )
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
    for axis in _axes(experiment, ("tp",)):
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


def _axes(experiment: Experiment, known: tuple[str, ...]) -> Iterator[str]:
    plan = experiment.plan
    sizes = {"pp": plan.pp, "fsdp": plan.fsdp, "cp": plan.cp, "dp": plan.dp, "ep": plan.ep}
    for axis in [axis for axis, size in sizes.items() if size > 1] + ["sp"] * plan.sp:
        if axis not in known:
            yield axis


def _other_axes(
    experiment: Experiment, rule: str, known: tuple[str, ...]
) -> Iterator[MeshscopeError]:
    for axis in _axes(experiment, known):
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
