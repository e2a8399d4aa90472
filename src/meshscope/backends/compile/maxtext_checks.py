"""Checks that MaxText's programs can be compiled for an experiment."""

from meshscope.errors import PlanError, SpecError
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.maxtext_models import AXES, maxtext_model
from meshscope.units import format_dtype

DTYPE = "bf16"


def check_maxtext(experiment: Experiment) -> None:
    """Raises an error for a model, plan, dtype or chunk that MaxText's engine does not take."""
    plan, workload = experiment.plan, experiment.workload
    option = f"--frontend {experiment.program.frontend}"
    maxtext_model(experiment.model)
    used = [axis for axis in ("pp", "cp", "dp", "ep", "fsdp") if getattr(plan, axis) > 1]
    used += ["sp"] if plan.sp else []
    if used:
        raise PlanError(
            f"plan '{plan}': {option} maps tp to MaxText's axis {AXES['tp']}, and its engine prefills "
            f"one prompt on all devices; {used[0]} is not supported. Use tp={plan.n_devices}, or "
            "--frontend jax."
        )
    dtypes = {
        "--weight-dtype": workload.weight_dtype,
        "--cache-dtype": workload.cache_dtype,
        "--dtype": workload.activation_dtype,
    }
    for name, dtype in dtypes.items():
        if dtype != DTYPE:
            raise SpecError(
                f"{name} {format_dtype(dtype)}: {option} compiles MaxText with {DTYPE}. Use {DTYPE}, or --frontend jax."
            )
    chunk = experiment.prefill_chunks
    if chunk.n_tokens != workload.prompt:
        raise SpecError(
            f"--prefill-chunk {workload.prefill_chunk or 'off'}: MaxText's engine prefills one whole prompt "
            f"at a time. Use {workload.prompt}, or omit the option."
        )
