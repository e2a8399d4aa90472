"""Checks that the model code of a serving engine can be compiled for an experiment."""

from meshscope.backends.compile.maxtext_checks import check_maxtext
from meshscope.backends.compile.sglang_checks import check_sglang
from meshscope.errors import PlanError, SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.model.model import Family, LatentAttention
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.engines.engine_config import ARCHITECTURES, CACHE_DTYPES, QUANTIZATION
from meshscope.programs.environments import installed_release
from meshscope.units import format_dtype

WITHOUT_LINEAR_METHODS = ("0.12.0",)  # of tpu-inference
AXES = ("tp", "dp", "ep", "sp")


def check_can_compile_engine(experiment: Experiment) -> None:
    """Raises an error if the engine's model code cannot be compiled here, or not for this plan."""
    program = experiment.program
    option = f"--frontend {program.frontend}"
    check_slice(experiment)
    if program.frontend is Frontend.SGLANG_JAX:
        check_sglang(experiment)
    elif program.frontend is Frontend.MAXTEXT:
        check_maxtext(experiment)
    else:
        _check_tpu_inference(experiment, option)
    installed_release(program.frontend, program.engine_version)


def check_slice(experiment: Experiment) -> None:
    """Raises SpecError unless the experiment's chips are one TPU slice."""
    topology = experiment.topology
    if topology.chip.kind is not ChipKind.TPU or topology.n_slices > 1:
        raise SpecError(
            f"'{topology.name}': --frontend {experiment.program.frontend} compiles for one TPU slice, e.g. "
            "v6e-8. Use --frontend jax."
        )


def _check_tpu_inference(experiment: Experiment, option: str) -> None:
    _check_model(experiment, option)
    _check_plan(experiment, option)
    _check_dtypes(experiment, option)
    _check_release(experiment, option)


def _check_model(experiment: Experiment, option: str) -> None:
    model = experiment.model
    if model.family not in ARCHITECTURES:
        raise SpecError(
            f"{model.name}: {option} gets no config of the family {model.family} "
            f"from meshscope. Use --frontend jax, or a model of {', '.join(ARCHITECTURES)}."
        )


def _check_plan(experiment: Experiment, option: str) -> None:
    plan, model = experiment.plan, experiment.model
    used = [axis for axis in ("pp", "fsdp", "cp") if getattr(plan, axis) > 1]
    if used:
        raise PlanError(
            f"plan '{plan}': {option} takes {', '.join(AXES)}, not {used[0]}. Use --frontend jax for it."
        )
    if plan.sp and (
        plan.dp > 1 or model.moe is not None or experiment.workload.weight_dtype != "bf16"
    ):
        raise PlanError(
            f"plan '{plan}': {option} takes sp with tp alone, for dense models in bf16. "
            "Omit sp, or use --frontend jax."
        )
    n_devices = plan.n_devices
    match model.family:
        case Family.DEEPSEEK_V3:
            rule = "runs latent attention data-parallel on the devices that share the experts"
            needed = f"dp={n_devices},ep={n_devices}"
        case Family.GPT_OSS:
            rule = "splits attention over tp and gives each device of tp some of the experts"
            needed = f"tp={n_devices},ep={n_devices}"
        case _ if model.moe is not None:
            rule = "splits each expert over tp"
            needed = f"tp={n_devices}"
        case _:
            return
    if str(plan) != needed and n_devices > 1:
        raise PlanError(f"plan '{plan}': {option} {rule}. Use {needed} for {model.name}.")


def _check_dtypes(experiment: Experiment, option: str) -> None:
    workload, model = experiment.workload, experiment.model
    known = ("bf16", *QUANTIZATION)
    weights = format_dtype(workload.weight_dtype)
    if workload.activation_dtype != "bf16":
        raise SpecError(
            f"{option} computes activations in bf16, not {workload.activation_dtype}. Omit the dtype, or "
            "use --frontend jax."
        )
    if workload.weight_dtype not in known:
        raise SpecError(
            f"--weight-dtype {weights}: {option} has weights in "
            f"{', '.join(map(format_dtype, known))}. "
            "Use one of these, or --frontend jax."
        )
    is_quantized = workload.weight_dtype in QUANTIZATION
    if isinstance(model.attention, LatentAttention) and not is_quantized:
        raise SpecError(
            f"--weight-dtype {weights}: the engine's loader splits latent projections of "
            f"fp8 checkpoints only. Omit the dtype, which {model.name} stores in fp8."
        )
    if is_quantized and model.family is Family.GPT_OSS:
        raise SpecError(
            f"--weight-dtype {weights}: {option} compiles {model.name} with bf16 weights. "
            "Use --dtype bf16, or --frontend jax."
        )
    if workload.cache_dtype not in CACHE_DTYPES:
        raise SpecError(
            f"{option} has no cache of {format_dtype(workload.cache_dtype)}. "
            f"Use {' or '.join(map(format_dtype, CACHE_DTYPES))}."
        )


def _check_release(experiment: Experiment, option: str) -> None:
    """Releases without the engine's own code for linear layers would ignore these options."""
    version = experiment.program.engine_version
    is_quantized = experiment.workload.weight_dtype in QUANTIZATION
    if version not in WITHOUT_LINEAR_METHODS or not (is_quantized or experiment.plan.sp):
        return
    dtype = format_dtype(experiment.workload.weight_dtype)
    value = f"--weight-dtype {dtype}" if is_quantized else "sp"
    raise SpecError(
        f"{value}: the JAX models of {option} {version} have bf16 weights and whole tokens only. Use "
        "--engine-version 0.24.0 or newer."
    )
