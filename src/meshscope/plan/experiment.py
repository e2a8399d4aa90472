"""One experiment: a model, a plan, a slice, a workload and a program, checked against each other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import prod
from typing import Any

from meshscope.arch.model import CompressedAttention, Model
from meshscope.arch.stored import model_as_dict, model_from_dict
from meshscope.errors import PlanError, SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plan.context import ContextForm, local_tokens
from meshscope.plan.dispatch import (
    Dispatch,
    DispatchForm,
    dispatch_of,
    exchange_axes,
    routed_tokens,
)
from meshscope.plan.kernels import KernelChoices, Kernels, kernel_choices
from meshscope.plan.mesh import Groups
from meshscope.plan.plan import AXES, Plan, check_batch, check_model, parse_plan
from meshscope.plan.stages import default_microbatches
from meshscope.plan.weights import layer_weights, mesh_axes_of, outer_weights
from meshscope.plan.workload import Workload
from meshscope.table.kinds import Phase
from meshscope.units import DTYPE_BITS


class Frontend(StrEnum):
    """Who writes the program."""

    JAX = "jax"
    TORCHXLA = "torchxla"


class Partitioner(StrEnum):
    """Who inserts the collectives: we (`manual`), or the compiler from annotations (`auto`)."""

    MANUAL = "manual"
    AUTO = "auto"


class Loop(StrEnum):
    """How layers are written: one after the other, or one body in a loop."""

    AUTO = "auto"
    UNROLL = "unroll"
    SCAN = "scan"


class Engine(StrEnum):
    """Whose conventions the prediction follows: our programs, or vLLM's as the paper measured them."""

    MESHSCOPE = "meshscope"
    VLLM = "vllm"


# The axes that each engine's predictions, and the programs, have today.
SUPPORTED: dict[Engine, tuple[str, ...]] = {
    Engine.MESHSCOPE: ("tp", "sp", "dp", "fsdp", "ep", "pp", "cp"),
    Engine.VLLM: ("tp", "pp"),
}


# Chips of the largest slice for which the compiler takes a ragged all-to-all, where there is one: from
# v5e:4x8 on it is refused for "limited ICI routing" (libtpu 0.0.42.1, compiled here).
MAX_RAGGED_CHIPS = {"v5e": 16}
DEFAULT_CAPACITY_FACTOR = (
    2.0  # as in GShard (arXiv 2006.16668), where 2 N / E slots hold N tokens' rows
)

# The forms of dispatch that each partitioner's programs are written in.
DISPATCH_FORMS: dict[Partitioner, tuple[DispatchForm, ...]] = {
    Partitioner.MANUAL: (DispatchForm.RAGGED, DispatchForm.CAPACITY),
    Partitioner.AUTO: (
        DispatchForm.ONE_HOT,
        DispatchForm.ONE_HOT_PINNED,
        DispatchForm.GATHERED,
    ),
}


# Unrolled, a layer of a 32B model costs the compiler one to two seconds; scanned layers cost it
# once. Both count alike, so `--loop auto` unrolls only as many as compile in seconds.
MAX_UNROLLED_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Which of the programs of a model is meant.

    `microbatches` is how many follow each other through a pipeline in prefill, on one device's share
    of the batch; None is the largest number up to the number of stages that divides it.
    """

    frontend: Frontend = Frontend.JAX
    partitioner: Partitioner = Partitioner.MANUAL
    loop: Loop = Loop.AUTO
    dispatch: DispatchForm = DispatchForm.AUTO
    capacity_factor: float | None = None
    context: ContextForm = ContextForm.AUTO
    microbatches: int | None = None
    kernels: Kernels = Kernels.AUTO

    def __post_init__(self) -> None:
        """A capacity is at least what balanced routing needs; there is at least one micro-batch."""
        if self.capacity_factor is not None and not self.capacity_factor >= 1:
            raise SpecError(
                f"capacity_factor={self.capacity_factor} leaves no room for balanced routing. "
                "Use 1 or more, or leave it out: then there is room for every routing."
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise SpecError(f"microbatches={self.microbatches} must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What a user asks for; a built one is consistent (see `experiment_of`)."""

    model: Model
    plan: Plan
    topology: Topology
    workload: Workload
    program: Program
    engine: Engine = Engine.MESHSCOPE

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Prefill, and decode when the request makes more than one token."""
        has_decode = self.workload.n_decode_steps > 0
        return (Phase.PREFILL, Phase.DECODE) if has_decode else (Phase.PREFILL,)

    @property
    def is_scanned(self) -> bool:
        """Whether the layers are one loop body."""
        if self.program.frontend is Frontend.TORCHXLA:
            return False  # a trace has no loops
        match self.program.loop:
            case Loop.SCAN:
                return True
            case Loop.UNROLL:
                return False
            case Loop.AUTO:
                return self.model.n_layers > MAX_UNROLLED_LAYERS

    @property
    def dispatch_form(self) -> DispatchForm:
        """How rows travel to their experts: as asked, or without loss where the target can."""
        if self.program.dispatch is not DispatchForm.AUTO:
            return self.program.dispatch
        is_torchxla = self.program.frontend is Frontend.TORCHXLA
        if self.program.partitioner is Partitioner.AUTO and not is_torchxla:
            return DispatchForm.ONE_HOT
        return self._natural_form

    @property
    def _natural_form(self) -> DispatchForm:
        """Ragged where XLA has it: on GPU, and on TPU but for large slices of v5e.

        torch_xla has no ragged exchange.
        """
        if self.program.frontend is Frontend.TORCHXLA:
            return DispatchForm.CAPACITY
        chip, n_chips = self.topology.chip, self.topology.n_chips
        is_large = n_chips > MAX_RAGGED_CHIPS.get(chip.name, n_chips)
        lacks_it = is_large or chip.kind is ChipKind.CPU
        return DispatchForm.CAPACITY if lacks_it else DispatchForm.RAGGED

    @property
    def capacity_factor(self) -> float | None:
        """Room over the mean; None for room for every routing.

        Where a TPU slice has no ragged exchange, room for every routing would be most of its
        memory, so that a fixed factor is taken.
        """
        if self.program.capacity_factor is not None:
            return self.program.capacity_factor
        is_forced = self.dispatch_form is DispatchForm.CAPACITY is not self.program.dispatch
        is_tpu = self.topology.chip.kind is ChipKind.TPU
        return DEFAULT_CAPACITY_FACTOR if is_forced and is_tpu else None

    def dispatch(self, phase: Phase) -> Dispatch | None:
        """The exchange of rows in a layer of experts; None without experts, or where no row travels.

        In a pipeline, that of one micro-batch.
        For JAX's auto partitioner, whose exchange is the compiler's: what it would be by hand.
        """
        if self.model.moe is None:
            return None
        is_torchxla = self.program.frontend is Frontend.TORCHXLA
        is_ours = is_torchxla or self.program.partitioner is Partitioner.MANUAL
        return dispatch_of(
            self.model.moe,
            self.plan,
            n_tokens=routed_tokens(self.plan, self._held_tokens(phase)),
            form=self.dispatch_form if is_ours else self._natural_form,
            capacity_factor=self.capacity_factor if is_ours else None,
            has_expert_slots=is_torchxla,
        )

    @property
    def context_form(self) -> ContextForm:
        """How the keys of other blocks come to queries: as asked, or around a ring where there is one."""
        if self.program.context is not ContextForm.AUTO:
            return self.program.context
        is_ring = why_no_ring(self.model, self.plan, self.topology) is None
        return ContextForm.RING if is_ring else ContextForm.ALLGATHER

    def n_microbatches(self, phase: Phase) -> int:
        """How many micro-batches one step of the phase sends through our pipeline; 1 without one.

        A decode step is one micro-batch: its tokens need the step before.
        """
        has_pipeline = self.plan.pp > 1 and self.engine is Engine.MESHSCOPE
        if phase is Phase.DECODE or not has_pipeline:
            return 1
        local_batch = self.workload.batch // self.plan.data_size
        return self.program.microbatches or default_microbatches(local_batch, self.plan.pp)

    @property
    def kernels(self) -> KernelChoices:
        """Which parts of the program are computed by kernels, and why others are not."""
        return kernel_choices(
            self.program.kernels,
            chip=self.topology.chip.kind,
            model=self.model,
            plan=self.plan,
            workload=self.workload,
            form=self.dispatch_form,
            has_kernels=self.program.frontend is Frontend.JAX,
        )

    def _held_tokens(self, phase: Phase) -> int:
        """Tokens of a step, or of one of its micro-batches, that a tp group holds together."""
        n_tokens = self.workload.prompt if phase is Phase.PREFILL else 1
        if self.program.frontend is Frontend.JAX:  # torch_xla's experts see the tokens of all of cp
            n_tokens = local_tokens(self.plan, phase, n_tokens)
        n_sequences = self.workload.batch // self.plan.data_size // self.n_microbatches(phase)
        return n_sequences * n_tokens

    def _dispatch_as_dict(self) -> dict[str, Any] | None:
        """What travels to experts in one layer of each phase, and under which skew of the routing."""
        is_auto = self.program.partitioner is Partitioner.AUTO
        is_jax = self.program.frontend is Frontend.JAX
        if is_jax and is_auto and self.model.moe is not None:
            return {"form": self.dispatch_form.value, "by": "compiler"}
        found = {phase.value: self.dispatch(phase) for phase in self.phases}
        row_bytes = self.model.hidden * DTYPE_BITS[self.workload.activation_dtype] // 8
        skew = self.workload.routing_skew
        facts = {
            phase: dispatch.as_dict(row_bytes=row_bytes, skew=skew)
            for phase, dispatch in found.items()
            if dispatch is not None
        }
        return {"routing_skew": skew, **facts} if facts else None

    def crosses_slices(self, groups: Groups) -> bool | None:
        """Whether a group spans slices, over DCN; None on a single slice."""
        return self.topology.crosses_slices(groups)

    def as_dict(self) -> dict[str, Any]:
        """The experiment as plain values, for manifest.json and --json."""
        return {
            "model": model_as_dict(self.model),
            "plan": str(self.plan),
            "mesh": dict(self.plan.mesh.axes),
            "topology": self.topology.name,
            "n_devices": self.topology.n_devices,
            "n_chips": self.topology.n_chips,
            "workload": asdict(self.workload),
            "program": asdict(self.program),
            "layers_are": "scanned" if self.is_scanned else "unrolled",
            "microbatches": {p.value: self.n_microbatches(p) for p in self.phases},
            "kernels": self.kernels.as_dict(),
            "context": self.context_form.value if self.plan.cp > 1 else None,
            "engine": self.engine.value,
            "dispatch": self._dispatch_as_dict(),
        }


def experiment_from_dict(values: Mapping[str, Any]) -> Experiment:
    """The experiment that `Experiment.as_dict` wrote; SpecError when a value is missing or foreign."""
    try:
        program = dict(values["program"])
        return Experiment(
            model=model_from_dict(values["model"]),
            plan=parse_plan(values["plan"]),
            topology=parse_topology(values["topology"]),
            workload=Workload(**values["workload"]),
            program=Program(
                frontend=Frontend(program.pop("frontend")),
                partitioner=Partitioner(program.pop("partitioner")),
                loop=Loop(program.pop("loop")),
                dispatch=DispatchForm(program.pop("dispatch")),
                context=ContextForm(program.pop("context", ContextForm.AUTO)),
                kernels=Kernels(program.pop("kernels", Kernels.AUTO)),
                **program,
            ),
            engine=Engine(values["engine"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"the stored experiment is not understood: {error!r}. Make the run again."
        ) from error


def experiment_of(  # noqa: PLR0913  the five types and the engine
    *,
    model: Model,
    plan: Plan,
    topology: Topology,
    workload: Workload,
    program: Program | None = None,
    engine: Engine = Engine.MESHSCOPE,
    n_layers: int | None = None,
) -> Experiment:
    """The checked experiment: plan filled to the slice, model cut to `n_layers`."""
    if n_layers is not None:
        if not 1 <= n_layers <= model.n_layers:
            raise SpecError(
                f"--layers {n_layers}: {model.name} has {model.n_layers} layers. Use 1 to {model.n_layers}."
            )
        model = model.first(n_layers)
    plan = plan.filled(topology.n_devices)
    if model.max_position is not None and workload.context > model.max_position:
        raise SpecError(
            f"prompt={workload.prompt} and output={workload.output} need {workload.context} positions; "
            f"{model.name} has max_position_embeddings={model.max_position}. Shorten one of them."
        )
    program = program or Program()
    _check_supported(plan, engine)
    if program.frontend is Frontend.TORCHXLA:
        _check_torchxla(program, plan)
    _check_context(plan, program)
    check_batch(plan, workload)
    check_model(plan, model)
    _check_weights(plan, model)
    _check_pipeline(plan, workload, program, engine)
    _check_dispatch(program, topology)
    _check_ring(model, plan, program, topology)
    experiment = Experiment(
        model=model,
        plan=plan,
        topology=topology,
        workload=workload,
        program=program,
        engine=engine,
    )
    _check_kernels(experiment)
    return experiment


def _check_torchxla(program: Program, plan: Plan) -> None:
    """SpecError when the program is asked for what a trace of transformers' modules does not have."""
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


def _check_kernels(experiment: Experiment) -> None:
    """SpecError when kernels are asked for and one cannot be used."""
    refused = experiment.kernels.refused
    if experiment.program.kernels is Kernels.ON and refused:
        whys = "; ".join(f"{part}, because {why}" for part, why in refused.items())
        raise SpecError(
            f"--kernels on: no kernel can be used for {whys} ({experiment.model.name}, plan "
            f"'{experiment.plan}', {experiment.topology.name}). Use --kernels auto or off."
        )


def _check_weights(plan: Plan, model: Model) -> None:
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


def _check_context(plan: Plan, program: Program) -> None:
    """PlanError when cp meets what it is not written for: the auto partitioner."""
    if plan.cp > 1 and program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"plan '{plan}': cp={plan.cp} needs partial softmaxes merged over devices, which "
            "--partitioner auto does not make of annotations. Use --partitioner manual."
        )


def _check_pipeline(plan: Plan, workload: Workload, program: Program, engine: Engine) -> None:
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


def why_no_ring(model: Model, plan: Plan, topology: Topology) -> str | None:
    """Why blocks of keys cannot travel around a ring; None where they can.

    On CPU, a permute waits for all devices of the program, and takes any permute for its own: those
    of stages that take different branches are mixed up.
    """
    if isinstance(model.attention, CompressedAttention):
        return "compressed entries are gathered, as many as a query may see"
    if plan.pp > 1 and topology.chip.kind is ChipKind.CPU:
        return "on CPU devices, XLA takes the permutes of a ring for the hand-over between stages"
    return None


def _check_ring(model: Model, plan: Plan, program: Program, topology: Topology) -> None:
    """SpecError when a ring is asked for where there is none."""
    why = why_no_ring(model, plan, topology)
    if plan.cp > 1 and program.context is ContextForm.RING and why is not None:
        raise SpecError(
            f"plan '{plan}' of {model.name} has no --context {ContextForm.RING}: {why}. "
            f"Use --context {ContextForm.ALLGATHER}, or leave it out."
        )


def _check_dispatch(program: Program, topology: Topology) -> None:
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


def _check_supported(plan: Plan, engine: Engine) -> None:
    """PlanError when the plan uses an axis that the engine does not have."""
    used = [axis for axis in AXES if getattr(plan, axis) != 1] + ["sp"] * plan.sp
    for axis in used:
        if axis not in SUPPORTED[engine]:
            others = [f", or --engine {e} for {axis}" for e in Engine if axis in SUPPORTED[e]]
            raise PlanError(
                f"plan '{plan}': --engine {engine} does not have {axis} yet. "
                f"Use {', '.join(SUPPORTED[engine])}{''.join(others)}."
            )
