"""Checks that SGLang-JAX's programs can be compiled for an experiment."""

from meshscope.errors import PlanError, SpecError
from meshscope.model.model import GroupedAttention
from meshscope.plans.experiment import Experiment
from meshscope.units import format_dtype

AXES = ("tp", "dp", "ep")
DTYPE = "bf16"
TENSOR_PARALLEL_ONLY = ("0.0.2",)


def check_sglang(experiment: Experiment) -> None:
    """Raises an error for a model, plan or dtype that the front end does not offer.

    The engine itself refuses others, with its own message.
    """
    plan, model = experiment.plan, experiment.model
    option = f"--frontend {experiment.program.frontend}"
    attention = model.attention
    if not isinstance(attention, GroupedAttention) or attention.window is not None:
        raise SpecError(
            f"{model.name}: {option} builds caches of whole keys and values only. Use --frontend jax."
        )
    used = [axis for axis in ("pp", "fsdp", "cp") if getattr(plan, axis) > 1]
    used += ["sp"] if plan.sp else []
    if used:
        raise PlanError(
            f"plan '{plan}': {option} takes {', '.join(AXES)}, not {used[0]}. Use --frontend jax for it."
        )
    version = experiment.program.engine_version
    if max(plan.dp, plan.ep) > 1 and version in TENSOR_PARALLEL_ONLY:
        raise PlanError(
            f"plan '{plan}': servers of {option} {version} run tp alone. Use tp={plan.n_devices}, or "
            "a newer release."
        )
    _check_dtypes(experiment, option)


def _check_dtypes(experiment: Experiment, option: str) -> None:
    workload = experiment.workload
    dtypes = {
        "--dtype": workload.activation_dtype,
        "--weight-dtype": workload.weight_dtype,
        "--cache-dtype": workload.cache_dtype,
    }
    for name, dtype in dtypes.items():
        if dtype != DTYPE:
            raise SpecError(
                f"{name} {format_dtype(dtype)}: {option} compiles {DTYPE} only. Use --dtype {DTYPE}, or --frontend jax."
            )
