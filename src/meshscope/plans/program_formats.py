"""Formats of weights that programs have under a plan; predictions know the bytes under others, too."""

from math import prod

from meshscope.errors import PlanError, SpecError
from meshscope.model.arrays import Weight, mesh_axes_of
from meshscope.model.model import Model
from meshscope.model.quantization import has_program, is_four_bit
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Partitioner
from meshscope.plans.weights import layer_weights
from meshscope.units import format_dtype


def has_program_format(
    model: Model, plan: Plan, weight_dtype: str, partitioner: Partitioner
) -> bool:
    """Whether programs of the model under the plan can have weights of this dtype."""
    is_lacking = _lacks_partitioner(weight_dtype, partitioner) or not has_program(weight_dtype)
    return not is_lacking and cut_weight(model, plan, weight_dtype) is None


def _lacks_partitioner(weight_dtype: str, partitioner: Partitioner) -> bool:
    return is_four_bit(weight_dtype) and partitioner is Partitioner.AUTO


def check_program_format(experiment: Experiment) -> None:
    """Raise SpecError if programs cannot be built with the weight dtype, PlanError if the plan cuts groups."""
    model, plan = experiment.model, experiment.plan
    weight_dtype = experiment.workload.weight_dtype
    if not has_program(weight_dtype):
        raise SpecError(
            f"--weight-dtype {format_dtype(weight_dtype)}: programs have no groups of 16 with 8-bit scales; only "
            "'predict' and 'plan' count their bytes. Use mxfp4, which has a scale for 32 weights."
        )
    if _lacks_partitioner(weight_dtype, experiment.program.partitioner):
        raise SpecError(
            f"--weight-dtype {format_dtype(weight_dtype)}: programs with 4-bit weights have the manual partitioner, not "
            "--partitioner auto. Use int8, or --partitioner manual."
        )
    name = cut_weight(model, plan, weight_dtype)
    if name is not None:
        whole = "ep for whole experts, " if name.startswith("experts") else ""
        raise PlanError(
            f"plan '{plan}' splits groups of {name} of {model.name} that share a scale in {format_dtype(weight_dtype)}. "
            f"Use a smaller tp or fsdp, {whole}smaller groups, or --weight-dtype bf16."
        )


def cut_weight(model: Model, plan: Plan, weight_dtype: str) -> str | None:
    """The name of the first weight whose groups of inputs the plan cuts; None if it cuts none."""
    for layer in dict.fromkeys(model.layers):
        for weight in layer_weights(model, plan, layer):
            quantization, scale = weight.quantization(weight_dtype), weight.scale(weight_dtype)
            has_groups = quantization is not None and quantization.has_groups
            if has_groups and scale is not None and _is_cut(weight, scale, plan):
                return weight.name
    return None


def _is_cut(weight: Weight, scale: Weight, plan: Plan) -> bool:
    """Whether a device would have parts of groups, or groups differ in size."""
    axes = dict(plan.mesh.axes)
    for dim, n_inputs, n_groups in zip(scale.dims, weight.shape, scale.shape, strict=True):
        n_parts = prod(axes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
        if n_inputs % n_groups or n_groups % n_parts:
            return True
    return False
