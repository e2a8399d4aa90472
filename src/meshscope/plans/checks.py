"""Every refusal of an experiment: the condition, and an error with the value, the rule and the remedy."""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from meshscope.errors import PlanError, SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.model.arrays import CACHED_WEIGHTS, Weight, mesh_axes_of
from meshscope.model.layers import AttentionKind
from meshscope.model.model import Model
from meshscope.model.quantization import (
    FP8_BLOCKS,
    Coverage,
    Quantization,
    activation_dtype_of,
    has_program,
    is_four_bit,
    quantization_of,
    values_dtype,
)
from meshscope.plans.caches import ContextForm, why_no_ring
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.plan import Plan, Tables
from meshscope.plans.program import Engine, Loop, Partitioner
from meshscope.plans.stages import cut_entries
from meshscope.plans.weights import layer_weights, outer_weights
from meshscope.plans.workload import ACTIVATION_DTYPES, Workload
from meshscope.units import format_dtype

if TYPE_CHECKING:
    from meshscope.plans.experiment import Experiment

# Axes supported by each engine.
SUPPORTED: dict[Engine, tuple[str, ...]] = {
    Engine.MESHSCOPE: ("tp", "sp", "dp", "fsdp", "ep", "pp", "cp"),
    Engine.VLLM: ("tp", "pp"),
}

# Dispatch forms implemented by the programs of each partitioner.
DISPATCH_FORMS: dict[Partitioner, tuple[DispatchForm, ...]] = {
    Partitioner.MANUAL: (
        *(DispatchForm.RAGGED, DispatchForm.CAPACITY),
        *(DispatchForm.FUSED, DispatchForm.ALLGATHER),
    ),
    Partitioner.AUTO: (DispatchForm.ONE_HOT,),
}


def check_parts(experiment: "Experiment") -> None:
    """Raise the first refusal: PlanError or SpecError."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    _check_few_axes(experiment)
    _check_program(experiment)
    check_batch(plan, workload)
    check_model(plan, model)
    check_weights(plan, model)
    _check_format(experiment)
    _check_pipeline(experiment)
    _check_dispatch(experiment)


def _check_few_axes(experiment: "Experiment") -> None:
    """Raise PlanError or SpecError for what models with few axes do not have."""
    model, plan, program = experiment.model, experiment.plan, experiment.program
    workload = experiment.workload
    if model.why_explicit is None:
        return
    check_axes(plan, model, workload.prompt)
    options = {
        f"--engine {experiment.engine}": experiment.engine is not Engine.MESHSCOPE,
        f"--frontend {program.frontend}": not program.frontend.is_own,
        f"--partitioner {program.partitioner}": program.partitioner is not Partitioner.MANUAL,
    }
    for option in (option for option, is_set in options.items() if is_set):
        raise SpecError(
            f"{option} is not supported for {model.name}, whose {model.why_explicit}. Drop the option."
        )
    if (
        model.attention.why_few_axes
        and workload.cache_dtype != workload.activation_dtype
        and has_fixed_cache(model, plan.tp)
    ):
        raise SpecError(
            f"--cache-dtype {format_dtype(workload.cache_dtype)}: {model.name} fixes the format of every array of its "
            "cache. Drop the option."
        )


def has_fixed_cache(model: Model, tp: int = 1) -> bool:
    """Whether the model fixes the format of every array of its cache."""
    kinds = dict.fromkeys(model.layers)
    arrays = (model.attention_of(layer).cache(layer.attention, tp) for layer in kinds)
    return all(array.dtype for of_layer in arrays for array in of_layer)


def check_axes(plan: Plan, model: Model, prompt: int) -> None:
    """Raise PlanError for a split of prompts that models with shared entries do not have."""
    why_few, n = model.attention.why_few_axes, plan.cp * model.attention.joint_positions
    if why_few is None or plan.cp == 1:
        return
    if plan.pp > 1:
        raise PlanError(
            f"plan '{plan}': cp with pp is not supported for {model.name}, whose {why_few}. Use one of them."
        )
    if prompt % n:
        raise PlanError(
            f"plan '{plan}': each block of cp must be whole entries of {model.name}, but {n} does not divide "
            f"prompt={prompt}. Use --prompt {-(-prompt // n) * n}."
        )


def check_order(experiment: "Experiment") -> None:
    """Raise SpecError for an order of devices that an experiment cannot have."""
    order, topology, program = experiment.device_order, experiment.topology, experiment.program
    if order is not None and not program.frontend.is_own:
        raise SpecError(
            f"--device-order: --frontend {program.frontend} orders the devices itself. Drop the option, or "
            "use --frontend jax."
        )
    if order is not None and sorted(order) != list(range(topology.n_devices)):
        raise SpecError(
            f"the device order must have each of the {topology.n_devices} devices of {topology.name} once."
        )
    if order is not None and not topology.keeps_slices(order):
        raise SpecError(
            f"the device order mixes the slices of {topology.name}, which is not supported. Give 'slices' "
            "to the outermost axes of the mesh."
        )


def _check_program(experiment: "Experiment") -> None:
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    program, engine = experiment.program, experiment.engine
    if model.max_position is not None and workload.context > model.max_position:
        raise SpecError(
            f"prompt={workload.prompt} and output={workload.output} need {workload.context} positions; "
            f"{model.name} has max_position_embeddings={model.max_position}. Shorten one of them, or name a config.json "
            "with a larger max_position_embeddings and the rope_scaling that its model card gives."
        )
    for axis in plan.axes:
        if axis not in SUPPORTED[engine]:
            others = [f", or --engine {e} for {axis}" for e in Engine if axis in SUPPORTED[e]]
            raise PlanError(
                f"plan '{plan}': --engine {engine} does not support {axis}. "
                f"Use {', '.join(SUPPORTED[engine])}{''.join(others)}."
            )
    if program.frontend.is_traced:
        _check_trace(experiment)
    if plan.cp > 1 and program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': cp={plan.cp} merges partial softmaxes across devices, which annotations for "
            "--partitioner auto cannot express. Use --partitioner manual."
        )
    if plan.pp > 1 and (engine is not Engine.MESHSCOPE or program.frontend.is_served):
        needs = {
            "take the positions that the indexer of an earlier layer chose": model.has(
                AttentionKind.SHARED
            ),
            "read the keys and values of earlier layers": any(x.shares_cache for x in model.layers),
            "have per-layer embeddings": model.layer_inputs is not None,
        }
        for needed in (what for what, is_needed in needs.items() if is_needed):
            raise PlanError(
                f"plan '{plan}': pp={plan.pp} is not supported for {model.name}, whose layers {needed}: only stages of "
                "--engine meshscope send them, with --frontend jax. Use these, or tp, dp, fsdp, ep or cp."
            )


def _check_trace(experiment: "Experiment") -> None:
    program, workload = experiment.program, experiment.workload
    unsupported = {
        "--loop scan": program.loop is Loop.SCAN,
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
    for what, dtype in {"weight": workload.weight_dtype, "cache": workload.cache_dtype}.items():
        has_scales = what == "weight" and dtype == FP8_BLOCKS
        if dtype not in ACTIVATION_DTYPES and not has_scales:
            none = f"no quantized weights but in {format_dtype(FP8_BLOCKS)}"
            raise SpecError(
                f"--{what}-dtype {format_dtype(dtype)}: --frontend torchxla traces the modules of transformers, which have "
                f"{none if what == 'weight' else 'no quantized cache'}. Use --{what}-dtype bf16 or --frontend jax."
            )


def check_batch(plan: Plan, workload: Workload) -> None:
    """Raise PlanError unless the data axis divides the batch, and cp (times tp under sp) the prompt."""
    if workload.batch % plan.data_size:
        raise PlanError(
            f"plan '{plan}': {plan.data_axis}={plan.data_size} does not divide batch={workload.batch}. "
            f"Use a multiple, e.g. --batch {-(-workload.batch // plan.data_size) * plan.data_size}."
        )
    axis_sizes = {"cp": plan.cp, "tp": plan.tp if plan.sp else 1}
    axis_sizes = {axis: size for axis, size in axis_sizes.items() if size != 1}
    n_shards = prod(axis_sizes.values())
    if workload.prompt % n_shards:
        options = " and ".join({"cp": "cp", "tp": "sp"}[axis] for axis in axis_sizes)
        sizes = " x ".join(f"{axis}={size}" for axis, size in axis_sizes.items())
        raise PlanError(
            f"plan '{plan}': {options} split{'s' if len(axis_sizes) == 1 else ''} the prompt, but {sizes} does not "
            f"divide prompt={workload.prompt}. "
            f"Use a multiple, e.g. --prompt {-(-workload.prompt // n_shards) * n_shards}."
        )


def check_model(plan: Plan, model: Model) -> None:
    """Raise PlanError unless every axis divides the model dimension it splits."""
    moe = model.moe
    if plan.tables is not Tables.ALL and model.engram is None:
        raise PlanError(
            f"plan '{plan}': tables={plan.tables} places tables of n-grams, which {model.name} lacks. Drop it."
        )
    if plan.pp > model.n_layers:
        raise PlanError(
            f"plan '{plan}': pp={plan.pp} exceeds n_layers={model.n_layers} of {model.name}. "
            f"Use pp<={model.n_layers}."
        )
    if (at := cut_entries(model, plan.pp)) is not None:
        sizes = [n for n in range(1, model.n_layers + 1) if cut_entries(model, n) is None]
        raise PlanError(
            f"plan '{plan}': pp={plan.pp} would start a stage of {model.name} with layer {at}, which reads entries of a "
            f"layer before it. Use pp={' or '.join(map(str, sizes))}."
        )
    split: list[tuple[str, str, int | None]] = [
        *(("tp", name, size) for name, size in model.attention.tp_sizes.items()),
        ("tp", "ffn", model.ffn),
    ]
    if moe is not None:
        width = None if "tp" in plan.expert_axes else moe.ffn
        split += [("tp", "shared_ffn", moe.shared_ffn), ("tp", "expert ffn", width)]
    _check_divides(plan, model, split)
    for n_kv_heads in model.attention.replicated_heads:
        if n_kv_heads % plan.tp and plan.tp % n_kv_heads:
            raise PlanError(
                f"plan '{plan}' cannot split {model.name}: tp={plan.tp} neither divides nor is a multiple "
                f"of n_kv_heads={n_kv_heads}. Use a divisor, or a multiple (KV heads are replicated)."
            )
    if plan.sp and (model.n_replayed or 0) % plan.tp:
        raise PlanError(
            f"plan '{plan}': sp splits the last {model.n_replayed} tokens of a prompt, which alone pass through all layers "
            f"of {model.name}, but tp={plan.tp} does not divide them. Use a tp that divides them, or drop sp."
        )
    if plan.ep > 1 and moe is None:
        raise PlanError(
            f"plan '{plan}': ep={plan.ep} shards experts, but {model.name} has none. Drop ep."
        )
    n_experts = None if moe is None else moe.n_experts
    _check_divides(plan, model, [("ep", "n_experts", n_experts), ("fsdp", "hidden", model.hidden)])


def _check_divides(plan: Plan, model: Model, split: list[tuple[str, str, int | None]]) -> None:
    for axis, name, size in split:
        if size is not None and size % getattr(plan, axis):
            article = "an" if axis[0] in "ef" else "a"
            raise PlanError(
                f"plan '{plan}' cannot split {model.name}: {axis}={getattr(plan, axis)} does not divide {name}={size}. "
                f"Use {article} {axis} that divides it."
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


def _check_format(experiment: "Experiment") -> None:
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    program, dtype = experiment.program, workload.weight_dtype
    moe, skew, quantization = model.moe, workload.routing_skew, quantization_of(dtype)
    if moe is None and quantization is not None and quantization.coverage is Coverage.EXPERTS:
        raise SpecError(
            f"--weight-dtype {format_dtype(dtype)} quantizes experts, and {model.name} has none. "
            f"Use {format_dtype(values_dtype(dtype))} for all matrices."
        )
    if moe is not None and plan.ep > 1 and skew > moe.most_skew(plan.ep):
        raise SpecError(
            f"--routing-skew {skew:g} is impossible: with plan '{plan}', a device has "
            f"{moe.n_experts // plan.ep} of the {moe.n_experts} experts of {model.name}, and a token "
            f"chooses {moe.n_active}, so that a device gets at most {moe.most_skew(plan.ep):g} "
            f"times the mean. Use 1 to {moe.most_skew(plan.ep):g}."
        )
    is_narrow = activation_dtype_of(dtype) is not None
    if is_narrow and program.dispatch is DispatchForm.FUSED:
        raise SpecError(
            f"--weight-dtype {format_dtype(dtype)}: the kernel of --dispatch {DispatchForm.FUSED} is timed with "
            f"16-bit activations. Use --weight-dtype {format_dtype(values_dtype(dtype))}, or another dispatch."
        )
    if is_narrow and program.partitioner is Partitioner.AUTO:
        raise SpecError(
            f"--weight-dtype {format_dtype(dtype)}: each device scales its own part of the activations, "
            "which annotations for --partitioner auto cannot express. Use --partitioner manual."
        )
    cut = cut_block(plan.of_weights, model, dtype)
    if cut is not None:
        weight, axes, n_channels, block = cut
        whole = "ep for whole experts, " if weight.startswith("experts") else ""
        other = "bf16" if program.frontend.is_traced else "fp8, with a scale for each channel"
        raise PlanError(
            f"plan '{plan}' cannot split {model.name} in {format_dtype(dtype)}: {axes} leaves "
            f"{n_channels} channels of {weight} on a device, no multiple of the {block} that "
            f"share a scale. Use {whole}a smaller {axes}, or --weight-dtype {other}."
        )


def _quantized(model: Model, plan: Plan, dtype: str) -> Iterator[tuple[Weight, Quantization]]:
    """The weights of all kinds of layers that have scales if they are stored in `dtype`."""
    if quantization_of(dtype) is None:
        return
    for layer in dict.fromkeys(model.layers):
        for weight in layer_weights(model, plan, layer):
            quantization = weight.quantization(dtype)
            if quantization is not None:
                yield weight, quantization


@lru_cache(maxsize=CACHED_WEIGHTS)
def cut_block(plan: Plan, model: Model, weight_dtype: str) -> tuple[str, str, int, int] | None:
    """The first weight whose scaled blocks the plan splits: its name, the axes, the channels per device and per block."""
    for weight, of_weight in _quantized(model, plan, weight_dtype):
        block = of_weight.square_block
        cut = None if block is None else weight.cut_blocks(plan, block)
        if block is not None and cut is not None:
            return weight.name, *cut, block
    return None


def cut_weight(model: Model, plan: Plan, weight_dtype: str) -> str | None:
    """The name of the first weight whose groups of inputs the plan cuts; None if it cuts none."""
    axes = dict(plan.mesh.axes)
    for weight, quantization in _quantized(model, plan, weight_dtype):
        scale = weight.scale(weight_dtype)
        if scale is None or not quantization.has_groups:
            continue
        for dim, n_inputs, n_groups in zip(scale.dims, weight.shape, scale.shape, strict=True):
            n_parts = prod(axes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
            if n_inputs % n_groups or n_groups % n_parts:
                return weight.name
    return None


def has_program_format(
    model: Model, plan: Plan, weight_dtype: str, partitioner: Partitioner
) -> bool:
    """Whether programs of the model under the plan can have weights of this dtype; predictions know others, too."""
    is_lacking = is_four_bit(weight_dtype) and partitioner is Partitioner.AUTO
    is_lacking |= not has_program(weight_dtype)
    if weight_dtype == (model.stored_dtype or model.nearest_dtype):
        special = {one for layer in model.layers for one in layer.formats}
        is_lacking |= any(
            "experts" in module for module, _ in special
        )  # their kernel reads one format
        is_lacking |= not all(has_program(dtype) and not is_four_bit(dtype) for _, dtype in special)
    return not is_lacking and cut_weight(model, plan, weight_dtype) is None


def check_program_format(experiment: "Experiment") -> None:
    """Raise SpecError if programs cannot be built with the weight dtype, PlanError if the plan cuts groups."""
    model, plan, dtype = experiment.model, experiment.plan, experiment.workload.weight_dtype
    if not has_program(dtype):
        raise SpecError(
            f"--weight-dtype {format_dtype(dtype)}: programs have no groups of 16 with 8-bit scales; only "
            "'predict' and 'plan' count their bytes. Use mxfp4, which has a scale for 32 weights."
        )
    if is_four_bit(dtype) and experiment.program.partitioner is Partitioner.AUTO:
        raise SpecError(
            f"--weight-dtype {format_dtype(dtype)}: programs with 4-bit weights have the manual partitioner, not "
            "--partitioner auto. Use int8, or --partitioner manual."
        )
    name = cut_weight(model, plan, dtype)
    if name is not None:
        whole = "ep for whole experts, " if name.startswith("experts") else ""
        raise PlanError(
            f"plan '{plan}' splits groups of {name} of {model.name} that share a scale in {format_dtype(dtype)}. "
            f"Use a smaller tp or fsdp, {whole}smaller groups, or --weight-dtype bf16."
        )


def _check_pipeline(experiment: "Experiment") -> None:
    plan, program = experiment.plan, experiment.program
    n, has_pipeline = program.microbatches, plan.pp > 1 and experiment.engine is Engine.MESHSCOPE
    if n is not None and not has_pipeline:
        raise PlanError(
            f"plan '{plan}': --microbatches {n} applies only to pipelines of --engine "
            f"{Engine.MESHSCOPE}. Drop it, or use a plan with pp=N."
        )
    if has_pipeline and program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': --partitioner auto does not support pp, because annotations cannot express "
            "stages. Use --partitioner manual, or a plan without pp."
        )
    local_batch = experiment.workload.batch // plan.data_size
    if n is not None and local_batch % n:
        raise PlanError(
            f"plan '{plan}': --microbatches {n} does not divide the {local_batch} sequences per "
            f"device. Use a divisor of {local_batch}, or drop it."
        )


def _check_dispatch(experiment: "Experiment") -> None:
    plan, topology, program = experiment.plan, experiment.topology, experiment.program
    model, form, chip = experiment.model, program.dispatch, topology.chip
    forms = (DispatchForm.AUTO, *DISPATCH_FORMS[program.partitioner])
    if form not in forms and not program.frontend.is_traced:
        raise SpecError(
            f"--dispatch {form} is not supported by --partitioner {program.partitioner}. "
            f"Use {' or '.join(forms[1:])}, or drop it."
        )
    if form is DispatchForm.RAGGED and chip.kind is ChipKind.CPU:
        raise SpecError(
            "--dispatch ragged: XLA has no ragged all-to-all on CPU. Use --dispatch capacity, which "
            "drops no tokens unless --capacity-factor is set."
        )
    n_devices, is_fused = plan.data_size * plan.tp, form is DispatchForm.FUSED and model.moe
    if is_fused and compiler_facts(chip.name).fused_expert_cycles is None:
        raise SpecError(
            f"--dispatch fused: the time of the kernel on {chip.name} is not known. Use another chip or form."
        )
    if is_fused and (plan.ep != n_devices or plan.pp * plan.cp > 1):
        raise PlanError(
            f"plan '{plan}': the kernel of --dispatch fused splits experts over all devices, and needs "
            f"ep={n_devices} without pp and cp. Change the plan, or drop --dispatch fused."
        )
    reason = why_no_ring(model, plan, topology)
    if plan.cp > 1 and program.context is ContextForm.RING and reason is not None:
        raise SpecError(
            f"plan '{plan}' of {model.name} does not support --context {ContextForm.RING}: {reason}. "
            f"Use --context {ContextForm.ALLGATHER}, or drop it."
        )
