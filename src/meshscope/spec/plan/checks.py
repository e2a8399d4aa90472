"""What a plan, a program, a model and a slice must agree on before there is an experiment.

Each check raises PlanError or SpecError with what does not fit, by which number, and the remedy.
"""

from math import prod

from meshscope.errors import PlanError, SpecError
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.model import Model
from meshscope.spec.plan.context_form import ContextForm, why_no_ring
from meshscope.spec.plan.dispatch import DispatchForm, exchange_axes
from meshscope.spec.plan.kernel_choice import Kernels
from meshscope.spec.plan.plan import AXES, Plan
from meshscope.spec.plan.weights import layer_weights, mesh_axes_of, outer_weights
from meshscope.spec.program import Engine, Frontend, Loop, Partitioner, Program
from meshscope.spec.workload import Workload

# The axes that each engine's predictions, and the programs, have today.
SUPPORTED: dict[Engine, tuple[str, ...]] = {
    Engine.MESHSCOPE: ("tp", "sp", "dp", "fsdp", "ep", "pp", "cp"),
    Engine.VLLM: ("tp", "pp"),
}


# The forms of dispatch that each partitioner's programs are written in.
DISPATCH_FORMS: dict[Partitioner, tuple[DispatchForm, ...]] = {
    Partitioner.MANUAL: (DispatchForm.RAGGED, DispatchForm.CAPACITY),
    Partitioner.AUTO: (
        DispatchForm.ONE_HOT,
        DispatchForm.ONE_HOT_PINNED,
        DispatchForm.GATHERED,
    ),
}


def check_frontend(program: Program, plan: Plan) -> None:
    """An error when torch_xla is asked for what a trace of transformers' modules does not have."""
    if plan.pp > 1 and plan.cp > 1:
        raise PlanError(
            f"plan '{plan}': --frontend torchxla has no pp with cp: its stages and its ring would be one "
            "manual region inside the other. Leave one out, or use --frontend jax."
        )
    if plan.pp > 1 and "tp" in exchange_axes(plan):
        raise PlanError(
            f"plan '{plan}': in a stage, --frontend torchxla exchanges rows over {plan.data_axis} alone, and "
            f"ep={plan.ep} lies over tp, too. Use ep={plan.data_size} or ep={plan.tp}, or --frontend jax."
        )
    lacking = {
        "--loop scan": program.loop is Loop.SCAN,
        "--kernels on": program.kernels is Kernels.ON,
        f"--dispatch {program.dispatch}": program.dispatch
        not in {DispatchForm.AUTO, DispatchForm.CAPACITY},
    }
    asked = [option for option, is_asked in lacking.items() if is_asked]
    if asked:
        raise SpecError(
            f"--frontend torchxla has no {' and no '.join(asked)}: it traces transformers' own modules, layer "
            "by layer, and experts exchange a fixed number of rows. Leave the option out, or use "
            "--frontend jax."
        )


def check_weights(plan: Plan, model: Model) -> None:
    """PlanError when an axis does not divide the dimension of a weight that it splits."""
    sizes = dict(plan.mesh.axes)
    kinds = dict.fromkeys(model.layers)
    weights = [w for layer in kinds for w in layer_weights(model, plan, layer)]
    for weight in (*outer_weights(model, plan), *weights):
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            n_parts = prod(sizes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
            if size % n_parts:
                axes = " and ".join(mesh_axes_of(dim, plan))
                raise PlanError(
                    f"plan '{plan}' cannot split {model.name}: {weight.name} {list(weight.shape)} is "
                    f"split {n_parts} ways over {axes}, and {size} is not divisible by {n_parts}. "
                    f"Use a smaller {axes}."
                )


def check_context(plan: Plan, program: Program) -> None:
    """PlanError when cp meets what it is not written for: the auto partitioner."""
    if plan.cp > 1 and program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': cp={plan.cp} needs partial softmaxes merged over devices, which "
            "--partitioner auto does not make of annotations. Use --partitioner manual."
        )


def check_pipeline(plan: Plan, workload: Workload, program: Program, engine: Engine) -> None:
    """PlanError when the program has no pipeline, or its micro-batches do not divide the batch."""
    n = program.microbatches
    if n is not None and (plan.pp == 1 or engine is not Engine.MESHSCOPE):
        raise PlanError(
            f"plan '{plan}': --microbatches {n} follow each other through the stages of a pipeline of "
            f"--engine {Engine.MESHSCOPE}. Leave it out, or use it with pp=N."
        )
    if plan.pp == 1 or engine is not Engine.MESHSCOPE:
        return
    if program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': --partitioner auto has no pipeline; stages take turns, which annotations "
            "cannot say. Use --partitioner manual, or a plan without pp."
        )
    local_batch = workload.batch // plan.data_size
    if n is not None and local_batch % n:
        raise PlanError(
            f"plan '{plan}': --microbatches {n} does not divide the {local_batch} sequences of a "
            f"device. Use a divisor of {local_batch}, or leave it out."
        )


def check_ring(model: Model, plan: Plan, program: Program, topology: Topology) -> None:
    """SpecError when a ring is asked for where there is none."""
    why = why_no_ring(model, plan, topology)
    if plan.cp > 1 and program.context is ContextForm.RING and why is not None:
        raise SpecError(
            f"plan '{plan}' of {model.name} has no --context {ContextForm.RING}: {why}. "
            f"Use --context {ContextForm.ALLGATHER}, or leave it out."
        )


def check_dispatch(program: Program, topology: Topology) -> None:
    """SpecError when the partitioner or the target does not have this form of dispatch."""
    if program.frontend is Frontend.TORCHXLA:
        return
    forms = DISPATCH_FORMS[program.partitioner]
    if program.dispatch not in (DispatchForm.AUTO, *forms):
        raise SpecError(
            f"--dispatch {program.dispatch} is not a form of the {program.partitioner} partitioner. "
            f"Use {' or '.join(forms)}, or leave it out."
        )
    if program.dispatch is DispatchForm.RAGGED and topology.chip.kind is ChipKind.CPU:
        raise SpecError(
            "--dispatch ragged: XLA has no ragged all-to-all on CPU devices. "
            "Use --dispatch capacity, which drops nothing either unless --capacity-factor says so."
        )


def check_axes(plan: Plan, engine: Engine) -> None:
    """PlanError when the plan uses an axis that the engine does not have."""
    used = [axis for axis in AXES if getattr(plan, axis) != 1] + ["sp"] * plan.sp
    for axis in used:
        if axis not in SUPPORTED[engine]:
            others = [f", or --engine {e} for {axis}" for e in Engine if axis in SUPPORTED[e]]
            raise PlanError(
                f"plan '{plan}': --engine {engine} does not have {axis} yet. "
                f"Use {', '.join(SUPPORTED[engine])}{''.join(others)}."
            )
