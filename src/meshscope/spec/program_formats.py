"""Formats of weights that programs are built with; predictions know the bytes of others, too."""

from math import prod

from meshscope.errors import PlanError, SpecError
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import Model
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import Weight, layer_weights, mesh_axes_of
from meshscope.spec.program import Partitioner
from meshscope.spec.quantization import INT4_OF_GROUP, PROGRAM_DTYPES, check_program_dtype


def has_program_format(model: Model, weight_dtype: str, partitioner: Partitioner) -> bool:
    """Whether programs of the model can have weights of this dtype."""
    return weight_dtype in PROGRAM_DTYPES and _lack(model, weight_dtype, partitioner) is None


def _lack(model: Model, weight_dtype: str, partitioner: Partitioner) -> str | None:
    """What has no products with int4 weights; None if nothing is in the way."""
    if weight_dtype not in INT4_OF_GROUP.values():
        return None
    return "--partitioner auto" if partitioner is Partitioner.AUTO else model.wide_part


def check_program_format(experiment: Experiment) -> None:
    """Raise SpecError if programs cannot be built with the weight dtype, PlanError if the plan cuts groups."""
    model, plan = experiment.model, experiment.plan
    weight_dtype = experiment.workload.weight_dtype
    check_program_dtype(weight_dtype)
    lack = _lack(model, weight_dtype, experiment.program.partitioner)
    if lack is not None:
        raise SpecError(
            f"--weight-dtype {weight_dtype}: programs with int4 weights are built for dense models with grouped "
            f"attention and the manual partitioner, not for {lack} ({model.name}). Use int8, or predict."
        )
    if weight_dtype not in INT4_OF_GROUP.values():
        return
    for layer in dict.fromkeys(model.layers):
        for weight in layer_weights(model, plan, layer):
            scale = weight.scale(weight_dtype)
            if scale is not None and _is_cut(weight, scale, plan):
                raise PlanError(
                    f"plan '{plan}' splits groups of {weight.name} of {model.name} that share a scale in "
                    f"{weight_dtype}. Use a smaller tp or fsdp, or smaller groups."
                )


def _is_cut(weight: Weight, scale: Weight, plan: Plan) -> bool:
    """Whether a device would have parts of groups, or groups differ in size."""
    if len(scale.shape) != len(weight.shape):
        return False  # a scale for each channel
    axes = dict(plan.mesh.axes)
    for dim, n_inputs, n_groups in zip(scale.dims, weight.shape, scale.shape, strict=True):
        n_parts = prod(axes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
        if n_inputs % n_groups or n_groups % n_parts:
            return True
    return False
