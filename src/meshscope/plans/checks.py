"""Consistency checks between plan, program, model, workload and slice.

Each check raises PlanError or SpecError with the value, the rule and the remedy.
"""

from dataclasses import dataclass
from math import prod

from meshscope.errors import PlanError, SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.hardware.topology import Topology
from meshscope.model.arrays import mesh_axes_of
from meshscope.model.model import Model
from meshscope.model.quantization import (
    Coverage,
    activation_dtype_of,
    quantization_of,
    values_dtype,
)
from meshscope.plans.caches import ContextForm, why_no_ring
from meshscope.plans.dispatch import DispatchForm, most_skew
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.plan import AXES, Plan
from meshscope.plans.program import Engine, Frontend, Loop, Partitioner, Program
from meshscope.plans.weights import layer_weights, outer_weights
from meshscope.plans.workload import ACTIVATION_DTYPES, Workload
from meshscope.units import format_dtype

# Axes supported by each engine.
SUPPORTED: dict[Engine, tuple[str, ...]] = {
    Engine.MESHSCOPE: ("tp", "sp", "dp", "fsdp", "ep", "pp", "cp"),
    Engine.VLLM: ("tp", "pp"),
}

# Dispatch forms implemented by the programs of each partitioner.
DISPATCH_FORMS: dict[Partitioner, tuple[DispatchForm, ...]] = {
    Partitioner.MANUAL: (DispatchForm.RAGGED, DispatchForm.CAPACITY, DispatchForm.FUSED),
    Partitioner.AUTO: (
        DispatchForm.ONE_HOT,
        DispatchForm.ONE_HOT_PINNED,
        DispatchForm.GATHERED,
    ),
}


def check_frontend(program: Program, workload: Workload) -> None:
    """Raise SpecError for options and dtypes that a trace of the modules of transformers does not have."""
    if not program.frontend.is_traced:
        return
    unsupported = {
        "--loop scan": program.loop is Loop.SCAN,
        "--kernels on": program.kernels is Kernels.ON,
        f"--dispatch {program.dispatch}": program.dispatch
        not in {DispatchForm.AUTO, DispatchForm.CAPACITY},
    }
    options = [option for option, is_set in unsupported.items() if is_set]
    if options:
        raise SpecError(
            f"--frontend torchxla does not support {' or '.join(options)}: it traces the modules of "
            "transformers layer by layer, and experts exchange a fixed number of rows. "
            "Drop the option, or use --frontend jax."
        )
    dtypes = {"weight": workload.weight_dtype, "cache": workload.cache_dtype}
    for what, dtype in dtypes.items():
        if dtype not in ACTIVATION_DTYPES:
            raise SpecError(
                f"--{what}-dtype {format_dtype(dtype)}: --frontend torchxla traces the modules of transformers, which have "
                f"no quantized {what}{'s' * (what == 'weight')}. Use --{what}-dtype bf16 or --frontend jax."
            )


def check_weights(plan: Plan, model: Model) -> None:
    """Raise PlanError unless every axis divides the weight dimensions it splits."""
    sizes = dict(plan.mesh.axes)
    kinds = dict.fromkeys(model.layers)
    weights = [w for layer in kinds for w in layer_weights(model, plan, layer)]
    for weight in (*outer_weights(model, plan), *weights):
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            n_parts = prod(sizes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
            if size % n_parts:
                axes = " and ".join(mesh_axes_of(dim, plan))
                raise PlanError(
                    f"plan '{plan}' cannot split {model.name}: {axes} splits {weight.name} "
                    f"{list(weight.shape)} {n_parts} ways, but {n_parts} does not divide {size}. "
                    f"Use a smaller {axes}."
                )


def check_blocks(plan: Plan, model: Model, workload: Workload) -> None:
    """Raise PlanError if the plan splits blocks of a weight that share a scale."""
    cut = cut_block(plan, model, workload.weight_dtype)
    if cut is not None:
        whole = "ep for whole experts, " if cut.weight.startswith("experts") else ""
        raise PlanError(
            f"plan '{plan}' cannot split {model.name} in {format_dtype(workload.weight_dtype)}: {cut.axes} leaves "
            f"{cut.n_channels} channels of {cut.weight} on a device, no multiple of the {cut.block} that "
            f"share a scale. Use {whole}a smaller {cut.axes}, or --weight-dtype f8e4m3fn, with a scale for each channel."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlock:
    """A weight of which the axes leave a device parts of blocks."""

    weight: str
    axes: str
    n_channels: int
    block: int


def cut_block(plan: Plan, model: Model, weight_dtype: str) -> CutBlock | None:
    """The first weight whose blocks that share a scale the plan splits; None if there is none."""
    quantization = quantization_of(weight_dtype)
    if quantization is None or quantization.square_block is None:
        return None
    for layer in dict.fromkeys(model.layers):
        for weight in layer_weights(model, plan, layer):
            of_weight = weight.quantization(weight_dtype)
            block = None if of_weight is None else of_weight.square_block
            cut = None if block is None else weight.cut_blocks(plan, block)
            if block is not None and cut is not None:
                axes, n_channels = cut
                return CutBlock(weight=weight.name, axes=axes, n_channels=n_channels, block=block)
    return None


def check_routing_skew(plan: Plan, model: Model, workload: Workload) -> None:
    """Raise SpecError for a load that no routing can give a device."""
    skew = workload.routing_skew
    if model.moe is None or plan.ep == 1 or skew <= most_skew(model.moe, plan):
        return
    raise SpecError(
        f"--routing-skew {skew:g} is impossible: with plan '{plan}', a device has "
        f"{model.moe.n_experts // plan.ep} of the {model.moe.n_experts} experts of {model.name}, and a token "
        f"chooses {model.moe.n_active}, so that a device gets at most {float(most_skew(model.moe, plan)):g} "
        f"times the mean. Use 1 to {float(most_skew(model.moe, plan)):g}."
    )


def check_quantization(model: Model, workload: Workload) -> None:
    """Raise SpecError for a format that the layers of the model do not define."""
    quantization = quantization_of(workload.weight_dtype)
    is_of_experts = quantization is not None and quantization.coverage is Coverage.EXPERTS
    if is_of_experts and model.moe is None:
        dtype = workload.weight_dtype
        raise SpecError(
            f"--weight-dtype {format_dtype(dtype)} quantizes experts, and {model.name} has none. "
            f"Use {format_dtype(values_dtype(dtype))} for all matrices."
        )


def check_narrow_program(workload: Workload, program: Program) -> None:
    """Raise SpecError for 8-bit activations with the auto partitioner or a fused kernel of experts."""
    is_narrow = activation_dtype_of(workload.weight_dtype) is not None
    if is_narrow and program.dispatch is DispatchForm.FUSED:
        raise SpecError(
            f"--weight-dtype {format_dtype(workload.weight_dtype)}: the kernel of --dispatch {DispatchForm.FUSED} is timed with "
            f"16-bit activations. Use --weight-dtype {format_dtype(values_dtype(workload.weight_dtype))}, or another dispatch."
        )
    if is_narrow and program.partitioner is Partitioner.AUTO:
        raise SpecError(
            f"--weight-dtype {format_dtype(workload.weight_dtype)}: each device scales its own part of the activations, "
            "which annotations for --partitioner auto cannot express. Use --partitioner manual."
        )


def check_context(plan: Plan, program: Program) -> None:
    """Raise PlanError for cp with the auto partitioner."""
    if plan.cp > 1 and program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': cp={plan.cp} merges partial softmaxes across devices, which annotations for "
            "--partitioner auto cannot express. Use --partitioner manual."
        )


def check_shared_layers(plan: Plan, model: Model, frontend: Frontend, engine: Engine) -> None:
    """Raise PlanError for pp if layers need more than the output of the layer before, but in meshscope's programs."""
    if plan.pp == 1 or (engine is Engine.MESHSCOPE and not frontend.is_served):
        return
    if model.has_shared_indexers:
        needed = "take the positions that the indexer of an earlier layer chose"
    elif model.shares_caches:
        needed = "read the keys and values of earlier layers"
    elif model.layer_inputs is not None:
        needed = "have embeddings of their own"
    else:
        return
    raise PlanError(
        f"plan '{plan}': pp={plan.pp} is not supported for {model.name}, whose layers {needed}: only stages of "
        "--engine meshscope send them, with --frontend jax or torchxla. Use these, or tp, dp, fsdp, ep or cp."
    )


def check_pipeline(plan: Plan, workload: Workload, program: Program, engine: Engine) -> None:
    """Raise PlanError unless pp is supported and the micro-batches divide the batch."""
    n = program.microbatches
    if n is not None and (plan.pp == 1 or engine is not Engine.MESHSCOPE):
        raise PlanError(
            f"plan '{plan}': --microbatches {n} applies only to pipelines of --engine "
            f"{Engine.MESHSCOPE}. Drop it, or use a plan with pp=N."
        )
    if plan.pp == 1 or engine is not Engine.MESHSCOPE:
        return
    if program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': --partitioner auto does not support pp, because annotations cannot express "
            "stages. Use --partitioner manual, or a plan without pp."
        )
    local_batch = workload.batch // plan.data_size
    if n is not None and local_batch % n:
        raise PlanError(
            f"plan '{plan}': --microbatches {n} does not divide the {local_batch} sequences per "
            f"device. Use a divisor of {local_batch}, or drop it."
        )


def check_ring(model: Model, plan: Plan, program: Program, topology: Topology) -> None:
    """Raise SpecError if `--context ring` is requested but not supported."""
    reason = why_no_ring(model, plan, topology)
    if plan.cp > 1 and program.context is ContextForm.RING and reason is not None:
        raise SpecError(
            f"plan '{plan}' of {model.name} does not support --context {ContextForm.RING}: {reason}. "
            f"Use --context {ContextForm.ALLGATHER}, or drop it."
        )


def check_dispatch(program: Program, topology: Topology) -> None:
    """Raise SpecError unless partitioner and target support the dispatch form."""
    if program.frontend.is_traced:
        return
    forms = DISPATCH_FORMS[program.partitioner]
    if program.dispatch not in (DispatchForm.AUTO, *forms):
        raise SpecError(
            f"--dispatch {program.dispatch} is not supported by --partitioner {program.partitioner}. "
            f"Use {' or '.join(forms)}, or drop it."
        )
    if program.dispatch is DispatchForm.RAGGED and topology.chip.kind is ChipKind.CPU:
        raise SpecError(
            "--dispatch ragged: XLA has no ragged all-to-all on CPU. Use --dispatch capacity, which "
            "drops no tokens unless --capacity-factor is set."
        )


def check_fused(plan: Plan, topology: Topology) -> None:
    """Raise an error unless a fused kernel of experts fits the plan and its time on the chip is known."""
    chip = topology.chip.name
    if compiler_facts(chip).fused_expert_cycles.value is None:
        raise SpecError(
            f"--dispatch fused: the time of the kernel on {chip} is not known. Use another chip or form."
        )
    n_devices = plan.data_size * plan.tp
    if plan.ep != n_devices or plan.pp * plan.cp > 1:
        raise PlanError(
            f"plan '{plan}': the kernel of --dispatch fused splits experts over all devices, and needs "
            f"ep={n_devices} without pp and cp. Change the plan, or drop --dispatch fused."
        )


def check_axes(plan: Plan, engine: Engine) -> None:
    """Raise PlanError if the plan uses an axis that the engine does not support."""
    used = [axis for axis in AXES if getattr(plan, axis) != 1] + ["sp"] * plan.sp
    for axis in used:
        if axis not in SUPPORTED[engine]:
            others = [f", or --engine {e} for {axis}" for e in Engine if axis in SUPPORTED[e]]
            raise PlanError(
                f"plan '{plan}': --engine {engine} does not support {axis}. "
                f"Use {', '.join(SUPPORTED[engine])}{''.join(others)}."
            )
