"""An experiment: model, plan, slice, workload and program, checked for consistency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.hardware.topology import Topology
from meshscope.model.layers import MlpKind, ShallowLayers, shallow_layers
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.model import Model
from meshscope.plans.caches import CacheLayout, ContextForm, local_tokens, why_no_ring
from meshscope.plans.checks import check_order, check_parts
from meshscope.plans.chunks import (
    DEFAULT_CHUNK,
    PhaseProgram,
    PrefillChunks,
    check_chunks,
    prefill_chunks,
    with_auto_chunk,
)
from meshscope.plans.dispatch import Dispatch, DispatchForm, dispatch_of, routed_tokens
from meshscope.plans.experiment_record import (
    DispatchRecord,
    ExperimentRecord,
    LayerForm,
    phase_dispatch,
    record_from_dict,
)
from meshscope.plans.kernel_choice import KernelChoices, kernel_choices
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine, Loop, Partitioner, Program
from meshscope.plans.stages import default_microbatches
from meshscope.plans.workload import SequenceLengths, Workload
from meshscope.serialize import FormatError, picked
from meshscope.units import DTYPE_BITS

DEFAULT_CAPACITY_FACTOR = 2.0  # GShard (arXiv 2006.16668): 2 N / E slots per expert for N tokens

# Compiling an unrolled layer of a 32B model takes one to two seconds; scanned layers compile once.
# The collectives are the same, so `--loop auto` unrolls only models that compile in seconds, and
# times deeper ones by a shallow program (`Experiment.shallow_layers`).
MAX_UNROLLED_LAYERS = 8
# On GPUs a loop over layers copies each weight out of its stack: 9.6 instead of 3.4 ms for a decode step
# of Qwen3-8B, by the walk of both programs. Its 36 layers compile in 28 s on two cores.
MAX_UNROLLED_LAYERS_GPU = 64
_LAYOUTS = {layout.value: layout for layout in CacheLayout}


@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps what it derives
class Experiment:
    """A consistent experiment, as built by `experiment_of`."""

    model: Model
    plan: Plan
    topology: Topology
    workload: Workload
    program: Program
    engine: Engine = Engine.MESHSCOPE
    device_order: tuple[int, ...] | None = None  # device at each mesh position; None: 0, 1, 2, ...

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan over the devices of the slice; its groups contain device ids."""
        return Mesh(axes=self.plan.mesh.axes, order=self.device_order)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Prefill, and decode if the request has more than one output token."""
        if self.is_part_of_decode:
            return (Phase.DECODE,)
        has_decode = self.workload.n_decode_steps > 0
        return (Phase.PREFILL, Phase.DECODE) if has_decode else (Phase.PREFILL,)

    @property
    def is_part_of_decode(self) -> bool:
        """Whether this is not a request but a step that verifies a draft or runs a draft head."""
        return self.workload.decode_tokens > 1 or self.model.draft_head is not None

    @property
    def is_scanned(self) -> bool:
        """Whether the layers are compiled as a loop; a trace has no loops, and engines write none."""
        loop, is_gpu = self.program.loop, self.topology.chip.kind is ChipKind.GPU
        limit = MAX_UNROLLED_LAYERS_GPU if is_gpu else MAX_UNROLLED_LAYERS
        is_deep = loop is Loop.AUTO and self.model.n_layers > limit
        return self.program.frontend.is_own and (loop is Loop.SCAN or is_deep)

    @property
    def shallow_layers(self) -> ShallowLayers | None:
        """The layers of the unrolled program that gives a compiled step its time; None if the compiled program does."""
        is_chosen = self.is_scanned and self.program.loop is Loop.AUTO
        # Layers after tables of n-grams are unlike others.
        is_cut = self.plan.pp > 1 or self.model.engram is not None
        return shallow_layers(self.model.layers) if is_chosen and not is_cut else None

    def unrolled(self, layers: ShallowLayers) -> "Experiment":
        """The experiment with these layers of the model, unrolled."""
        kinds = tuple(self.model.layers[layer] for layer in layers.layers)
        program = replace(self.program, loop=Loop.UNROLL)
        return replace(self, model=replace(self.model, layers=kinds), program=program)

    @property
    def has_explicit_layers(self) -> bool:
        """Whether a TorchXLA program writes all collectives of its layers itself, in a manual region.

        The partitioner makes collective matmuls under sp, gathers weights where it likes under fsdp, and gathers what
        the router chooses. Compressed attention has annotations only.
        """
        is_manual = self.program.partitioner is Partitioner.MANUAL
        is_one = self.plan.n_devices == 1
        return (
            is_manual and not is_one and self.model.attention.mechanism is not Mechanism.COMPRESSED
        )

    @cached_property
    def dispatch_form(self) -> DispatchForm:
        """The dispatch form: as requested, else the default of partitioner and target."""
        if self.program.dispatch is not DispatchForm.AUTO:
            return self.program.dispatch
        is_auto = self.program.partitioner is Partitioner.AUTO
        is_annotated = is_auto and not self.program.frontend.is_traced
        return DispatchForm.ONE_HOT if is_annotated else self._natural_form

    @property
    def _natural_form(self) -> DispatchForm:
        """Ragged if XLA supports it (GPU and TPU, except large v5e slices; not torch_xla), else capacity."""
        chip, n_chips = self.topology.chip, self.topology.n_chips
        max_chips = compiler_facts(chip.name).max_ragged_all_to_all_chips
        is_large = max_chips is not None and n_chips > max_chips
        is_unsupported = is_large or chip.kind is ChipKind.CPU or self.program.frontend.is_traced
        return DispatchForm.CAPACITY if is_unsupported else DispatchForm.RAGGED

    @property
    def capacity_factor(self) -> float | None:
        """Buffer capacity over the mean load; None for buffers that fit any routing."""
        is_capacity = self.dispatch_form is DispatchForm.CAPACITY
        is_fallback = is_capacity and self.program.dispatch is DispatchForm.AUTO
        # On a TPU without ragged all-to-all, buffers for any routing would take most of the memory.
        is_tight = is_fallback and self.topology.chip.kind is ChipKind.TPU
        return self.program.capacity_factor or (DEFAULT_CAPACITY_FACTOR if is_tight else None)

    def dispatch(self, phase: Phase) -> Dispatch | None:
        """The dispatch of one MoE layer, in a pipeline of one micro-batch; None if no rows are exchanged."""
        if self.model.moe is None:
            return None
        plan, frontend = self.plan, self.program.frontend
        # With the auto partitioner, where the compiler chooses the exchange, the manual partitioner's.
        is_explicit = frontend.is_traced or self.program.partitioner is Partitioner.MANUAL
        # The tokens of a tp group; in torch_xla, experts in parallel with an MLP see the tokens of all cp devices.
        n_tokens = self.n_positions(phase)
        is_beside = frontend.is_traced and any(
            layer.mlp is MlpKind.DENSE_AND_MOE for layer in self.model.layers
        )
        if frontend.is_own or (frontend.is_traced and (plan.pp > 1 or not is_beside)):
            n_tokens = local_tokens(plan, phase, n_tokens)
        n_tokens *= self.n_sequences(phase) // self.n_microbatches(phase)
        return dispatch_of(
            self.model.moe,
            plan,
            n_tokens=routed_tokens(plan, n_tokens, self.dispatch_form),
            form=self.dispatch_form if is_explicit else self._natural_form,
            capacity_factor=self.capacity_factor if is_explicit else None,
            has_expert_slots=frontend.is_traced,
        )

    @property
    def cache_layout(self) -> CacheLayout:
        """Whose cache arrays a device has: a serving engine's on TPU, or our programs'."""
        if (layout := _LAYOUTS.get(self.program.frontend.value)) is not None:
            return layout
        is_tpu = self.topology.chip.kind is ChipKind.TPU
        return CacheLayout.VLLM_TPU if self.engine is Engine.VLLM and is_tpu else CacheLayout.OWN

    @property
    def context_form(self) -> ContextForm:
        """The form of context parallelism: as requested, else a ring if supported."""
        if self.program.context is not ContextForm.AUTO:
            return self.program.context
        is_ring = why_no_ring(self.model, self.plan, self.topology) is None
        return ContextForm.RING if is_ring else ContextForm.ALLGATHER

    @cached_property
    def prefill_chunks(self) -> PrefillChunks:
        """The chunks of a device's prefill; in a pipeline, one chunk of several micro-batches."""
        chunk, prompt = self.workload.prefill_chunk, self.workload.prompt
        n_sequences = self.workload.batch // self.plan.data_size
        return prefill_chunks(chunk, n_sequences=n_sequences, prompt=prompt)

    def programs(self, phase: Phase) -> tuple[PhaseProgram, ...]:
        """The programs of a phase: one, or one for each chunk of a prompt; the last has its name."""
        starts = self.prefill_chunks.starts if phase is Phase.PREFILL else (0,)
        names = (*(f"{phase}_at{start}" for start in starts[:-1]), phase.value)
        parts = zip(names, starts, strict=True)
        return tuple(PhaseProgram(name=name, phase=phase, start=start) for name, start in parts)

    def n_chunks(self, phase: Phase) -> int:
        """Executions of programs in one step: the chunks of prefill; 1 in decode."""
        return self.prefill_chunks.count if phase is Phase.PREFILL else 1

    def n_sequences(self, phase: Phase) -> int:
        """Sequences of a device in one chunk of prefill, or in a decode step."""
        if phase is Phase.PREFILL:
            return self.prefill_chunks.n_sequences
        return self.workload.batch // self.plan.data_size

    def n_positions(self, phase: Phase) -> int:
        """New positions of a sequence in one chunk of prefill, or in a decode step."""
        is_prefill = phase is Phase.PREFILL
        return self.prefill_chunks.n_positions if is_prefill else self.workload.decode_tokens

    def n_rows(self, phase: Phase) -> int:
        """Rows of a device's residual stream: sequences in a chunk of prefill, single tokens in decode."""
        n_tokens = 1 if phase is Phase.PREFILL else self.workload.decode_tokens
        return self.n_sequences(phase) * n_tokens

    @property
    def by_token(self) -> "Experiment":
        """The experiment with each token of a decode step as a separate sequence."""
        batch = self.workload.batch * self.workload.decode_tokens
        return replace(self, workload=replace(self.workload, batch=batch, decode_tokens=1))

    def with_auto_chunk(self, *, limit: int = DEFAULT_CHUNK) -> "Experiment":
        """The experiment with the longest prefill chunk up to `limit` tokens, if prefill can run in chunks."""
        parts = (self.model, self.plan, replace(self.workload, prefill_chunk=None))
        workload = with_auto_chunk(*parts, self.program, self.engine, limit=limit)
        return replace(self, workload=workload)

    def n_microbatches(self, phase: Phase) -> int:
        """Micro-batches per step of meshscope's pipeline; 1 without one, and in decode, whose tokens depend on each other."""
        has_pipeline = self.plan.pp > 1 and self.engine is Engine.MESHSCOPE
        if phase is Phase.DECODE or not has_pipeline:
            return 1
        local_batch = self.workload.batch // self.plan.data_size
        return self.program.microbatches or default_microbatches(local_batch, self.plan.pp)

    @cached_property
    def kernels(self) -> KernelChoices:
        """The parts of the program that use kernels, and why others do not."""
        return kernel_choices(self)

    def sequence_lengths(self, phase: Phase) -> SequenceLengths:
        """The sequences of one device in one chunk of prefill, or in decode at the mean context."""
        workload, is_prefill = self.workload, phase is Phase.PREFILL
        return SequenceLengths(
            n_sequences=max(1, self.n_sequences(phase) // self.n_microbatches(phase)),
            n_queries=local_tokens(self.plan, phase, self.n_positions(phase)),
            n_keys=workload.prompt if is_prefill else workload.mean_context,
        )

    @property
    def record(self) -> ExperimentRecord:
        """The experiment with its derived values, as stored in a run."""
        is_auto, skew = self.program.partitioner is Partitioner.AUTO, self.workload.routing_skew
        row_bytes = self.model.hidden * DTYPE_BITS[self.workload.activation_dtype] // 8
        facts: dict[str, Any] = {
            phase.value: phase_dispatch(of_phase, row_bytes=row_bytes, skew=skew)
            for phase in self.phases
            if (of_phase := self.dispatch(phase)) is not None
        }
        dispatch = DispatchRecord(routing_skew=skew, **facts) if facts else None
        if self.program.frontend.is_own and is_auto and self.model.moe is not None:
            dispatch = DispatchRecord(form=self.dispatch_form, by="compiler")
        return ExperimentRecord(
            model=self.model,
            plan=self.plan,
            mesh=dict(self.plan.mesh.axes),
            topology=self.topology,
            n_devices=self.topology.n_devices,
            n_chips=self.topology.n_chips,
            workload=self.workload,
            program=self.program,
            layers_are=LayerForm.SCANNED if self.is_scanned else LayerForm.UNROLLED,
            microbatches={phase: self.n_microbatches(phase) for phase in self.phases},
            prefill_chunks=self.prefill_chunks,
            kernels={} if self.program.frontend.is_served else self.kernels.as_dict(),
            context=self.context_form if self.plan.cp > 1 else None,
            engine=self.engine,
            dispatch=dispatch,
            device_order=self.device_order,
        )

    def as_dict(self) -> dict[str, Any]:
        """The experiment as plain values, for worker processes."""
        return self.record.as_dict()


def experiment_from_dict(values: Mapping[str, Any]) -> Experiment:
    """The experiment that `Experiment.as_dict` wrote; SpecError if a value is missing or of the wrong form."""
    try:
        record = record_from_dict(values)
    except FormatError as error:
        raise SpecError(
            f"the stored experiment is damaged: {error}. Rerun the experiment."
        ) from error
    return experiment_of_record(record)


def experiment_of_record(record: ExperimentRecord) -> Experiment:
    """The experiment of a stored run; SpecError if the run does not know all of it."""
    parts: dict[str, Any] = {"model": record.architecture}
    parts |= picked(record, "plan", "topology", "workload", "program", "engine")
    missing = ", ".join(name for name, part in parts.items() if part is None)
    if missing:
        raise SpecError(f"the stored experiment lacks {missing}. Rerun the experiment.")
    return Experiment(**parts, device_order=record.device_order)


def first_layers(model: Model, n_layers: int) -> Model:
    """The model of --layers: only its first layers; SpecError for a number that it does not have."""
    if not 1 <= n_layers <= model.n_layers:
        raise SpecError(
            f"--layers {n_layers} is invalid: {model.name} has {model.n_layers} layers. "
            f"Use 1 to {model.n_layers}."
        )
    return model.first(n_layers)


def experiment_of(  # noqa: PLR0913  the five types, the engine and the order of devices
    *,
    model: Model,
    plan: Plan,
    topology: Topology,
    workload: Workload,
    program: Program | None = None,
    engine: Engine = Engine.MESHSCOPE,
    n_layers: int | None = None,
    device_order: Sequence[int] | None = None,
) -> Experiment:
    """Build and check an experiment; fills the plan to the slice and truncates the model."""
    order = None if device_order is None else tuple(device_order)
    experiment = Experiment(
        model=model if n_layers is None else first_layers(model, n_layers),
        plan=plan.filled(topology.n_devices),
        topology=topology,
        workload=workload,
        program=program or Program(),
        engine=engine,
        device_order=None if order == tuple(range(topology.n_devices)) else order,
    )
    check_parts(experiment)
    check_chunks(experiment.model, experiment.plan, workload, experiment.program, engine)
    check_order(experiment)
    return experiment
