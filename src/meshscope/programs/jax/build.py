"""Builds the jitted step of one phase, with the shapes and shardings of its arguments."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.model.arrays import CacheArray, Weight, stored_arrays
from meshscope.model.layers import Layer, repeats_of, unrolled
from meshscope.model.quantization import activation_dtype_of, experts_quantization
from meshscope.plans.caches import cache_slots, joined_narrow_heads, layer_cache
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.program import Partitioner
from meshscope.plans.stages import stage_runs, stage_slots
from meshscope.plans.weights import expert_weights, layer_weights, outer_weights
from meshscope.programs.jax.attention import PrefillKernel
from meshscope.programs.jax.collectives import (
    GspmdCollectives,
    ShardLayout,
    ShardMapCollectives,
    layout_of,
)
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.decoder import Decoder
from meshscope.programs.jax.grouped_matmul import GroupedKernel
from meshscope.programs.jax.mixture import AutoMixture, ManualMixture, Mixture
from meshscope.programs.jax.pipeline import PipelineProgram
from meshscope.programs.jax.residual import SINGLE_STREAM, HyperStreams, Residual

JAX_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "s8": jnp.int8,
    "s4": jnp.int4,
    "s32": jnp.int32,
    "u8": jnp.uint8,
    "f8e4m3fn": jnp.float8_e4m3fn,
    "f8e5m2": jnp.float8_e5m2,
}

# XLA for GPUs rewrites the dot of one row with a matrix below 10,000,000 elements as a multiply and a
# reduce with an intermediate array in memory: three passes over the matrix
# (IsMatrixMultiplicationTooSmallForRewriting; seen in JAX 0.11.2's program of Qwen3-8B's keys and
# values). Eight rows, the minimum of a tensor core, keep the dot.
GPU_MIN_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProgram:
    """The step function of one phase and its abstract arguments (weights, tokens, cache, position).

    If prefill runs in chunks, `step` runs one, and the last argument is the first local sequence of the
    chunk instead of a position.
    `is_stacked` is whether layers are stacked by kind, as in every pipeline.
    """

    phase: Phase
    step: Any
    arguments: tuple[Any, ...]
    is_stacked: bool
    is_pipeline: bool

    def lower(self) -> Any:
        """Lowers the program to StableHLO without allocating memory."""
        return self.step.lower(*self.arguments)

    def logits(self, out: Any) -> Any:
        """The logits [B, V] in the result of a step; in a pipeline, those of the last stage.

        A decode step with several tokens of each sequence has those of every token, [B*S, V].
        """
        return out[1][-1] if self.is_pipeline else out[1]


def device_mesh(experiment: Experiment, devices: list[Any]) -> Mesh:
    """The mesh over these devices of the slice, in the experiment's order, with Auto axis types."""
    mesh = experiment.mesh
    order = range(mesh.n_devices) if mesh.order is None else mesh.order
    grid = np.array([devices[device] for device in order]).reshape(mesh.sizes)
    return Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def build_program(
    experiment: Experiment, phase: Phase, devices: list[Any], *, chunk: int = -1
) -> BuiltProgram:
    """The program of one phase of an experiment over these devices; `chunk` is that of a cut prompt."""
    program = experiment.programs(phase)[chunk]
    mesh = device_mesh(experiment, devices)
    layout = layout_of(experiment.plan, experiment.workload, phase)
    is_pipeline = experiment.plan.pp > 1
    specs = ArgumentSpecs(
        experiment=experiment, layout=layout, is_stacked=experiment.is_scanned or is_pipeline
    )
    decoder = _decoder(experiment, phase, layout, mesh)
    step = _pipeline(experiment, decoder, layout).step if is_pipeline else decoder.step
    if experiment.n_chunks(phase) > 1:
        step = _chunk_step(decoder, program.start)
    if experiment.program.partitioner is Partitioner.MANUAL:
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs.inputs, out_specs=specs.outputs, check_vma=False
        )
    # The HLO names a program after its function.
    named = _named(step, program.name)
    in_shardings, out_shardings = (
        jax.tree.map(lambda s: NamedSharding(mesh, s), tree, is_leaf=_is_spec)
        for tree in (specs.inputs, specs.outputs)
    )
    _, tokens, cache, position = in_shardings
    if _has_auto_cache_layout(experiment, phase):
        cache = jax.tree.map(lambda sharding: Format(MemoryLayout.AUTO, sharding), cache)
        out_shardings = (*out_shardings[:2], cache)
    in_shardings = (_weight_formats(specs, mesh), tokens, cache, position)
    return BuiltProgram(
        phase=phase,
        step=jax.jit(
            named, donate_argnums=(2,), in_shardings=in_shardings, out_shardings=out_shardings
        ),
        arguments=_abstract(specs, mesh, phase),
        is_stacked=specs.is_stacked,
        is_pipeline=is_pipeline,
    )


def _chunk_step(decoder: Decoder, start: int) -> Any:
    """The step of a chunk of prefill from position `start` on, for the sequences from `first_row` on."""
    context = replace(decoder.context, n_cached=start)

    def step(weights: Any, tokens: Any, cache: Any, first_row: Any) -> Any:
        chunk = replace(decoder, first_row=first_row, context=context)
        return chunk.step(weights, tokens, cache, start)

    return step


def _weight_formats(specs: "ArgumentSpecs", mesh: Mesh) -> Any:
    """Shardings of the weights, with a memory layout for those that are read row by row.

    If the last dimension of a matrix does not fill tiles, a TPU by default stores another one
    contiguously, and every step would transpose the matrix.
    """

    def placed(spec: P, shape: tuple[int, ...], is_row_major: bool) -> Any:  # noqa: FBT001
        sharding = NamedSharding(mesh, spec)
        return (
            Format(MemoryLayout(tuple(range(len(shape)))), sharding) if is_row_major else sharding
        )

    return jax.tree.map(
        placed, specs.weights, specs.weight_shapes, specs.row_major_weights, is_leaf=_is_spec
    )


def _has_auto_cache_layout(experiment: Experiment, phase: Phase) -> bool:
    """Whether the compiler chooses the memory layout of the cache.

    Serving engines let it choose in decode. With the default layout, a decode step on a TPU transposes
    the whole cache at its beginning and end, and so does a step of several sequences on a GPU.
    """
    return phase is Phase.DECODE and experiment.topology.chip.kind is not ChipKind.CPU


def _pipeline(experiment: Experiment, decoder: Decoder, layout: ShardLayout) -> PipelineProgram:
    n_stages = experiment.plan.pp
    return PipelineProgram(
        decoder=decoder,
        layout=layout,
        n_stages=n_stages,
        runs=stage_runs(experiment.model.layers, n_stages),
        n_microbatches=experiment.n_microbatches(decoder.phase),
        is_scanned=experiment.is_scanned,
    )


def _decoder(experiment: Experiment, phase: Phase, layout: ShardLayout, mesh: Mesh) -> Decoder:
    model, plan = experiment.model.for_context(experiment.workload.context), experiment.plan
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    collectives = (
        ShardMapCollectives(plan=plan, layout=layout)
        if is_manual
        else GspmdCollectives(layout=layout, mesh=mesh)
    )
    mixture: Mixture | None = None
    if model.moe is not None:
        arguments: dict[str, Any] = {
            "moe": model.moe,
            "plan": plan,
            "layout": layout,
            "collectives": collectives,
            "form": experiment.dispatch_form,
            "capacity_factor": experiment.capacity_factor,
            "has_kernel": experiment.kernels.has_expert_kernel,
        }
        mixture = (
            ManualMixture(**arguments, grouped_kernel=_grouped_kernel(experiment))
            if is_manual
            else AutoMixture(**arguments, mesh=mesh)
        )
    repeats = repeats_of if experiment.is_scanned else unrolled
    residual: Residual = SINGLE_STREAM
    if model.hyper is not None:
        residual = HyperStreams(hyper=model.hyper, norm_eps=model.norm_eps)
    return Decoder(
        model=model,
        phase=phase,
        collectives=collectives,
        mixture=mixture,
        context=Context(
            size=plan.cp,
            form=experiment.context_form,
            phase=phase,
            n_prompt=experiment.workload.prompt,
            n_chunk=experiment.n_positions(Phase.PREFILL) if experiment.has_cut_prompts else None,
        ),
        residual=residual,
        specs=_weight_specs(experiment),
        repeats=repeats(model.layers),
        n_stages=plan.pp,
        activation_dtype=JAX_DTYPES[experiment.workload.activation_dtype],
        attention_kernel=_attention_kernel(experiment, layout, None if is_manual else mesh),
        min_rows=GPU_MIN_ROWS if experiment.topology.chip.kind is ChipKind.GPU else 1,
        kernel_dtypes=_kernel_dtypes(experiment),
        weight_dtype=experiment.workload.weight_dtype,
        narrow_dtype=_narrow_dtype(experiment),
    )


def _narrow_dtype(experiment: Experiment) -> Any:
    dtype = activation_dtype_of(experiment.workload.weight_dtype)
    return None if dtype is None else JAX_DTYPES[dtype]


def _kernel_dtypes(experiment: Experiment) -> tuple[Any, ...]:
    if not experiment.kernels.has_expert_kernel:
        return ()
    names = compiler_facts(experiment.topology.chip.name).ragged_dot_dtypes.value
    if _grouped_kernel(experiment) is not None:
        dtype = experiment.workload.weight_dtype
        names = {w.stored_dtype(dtype) for w in expert_weights(experiment.model) if w.inputs}
    return tuple(JAX_DTYPES[name] for name in names)


def _grouped_kernel(experiment: Experiment) -> GroupedKernel | None:
    choice = experiment.kernels.experts
    if choice is None or choice.kernel is not Kernel.GROUPED:
        return None
    quantization = experts_quantization(experiment.workload.weight_dtype)
    assert quantization is not None
    return GroupedKernel(
        block=quantization.square_block,
        has_codes=quantization.codes_dtype is not None,
        has_bf16=experiment.topology.chip.has_bf16_vectors,
    )


def _attention_kernel(
    experiment: Experiment, layout: ShardLayout, mesh: Mesh | None
) -> PrefillKernel | DecodeKernel | None:
    if layout.phase is Phase.DECODE:
        if experiment.kernels.decode_attention.kernel is None:
            return None
        mean_context = experiment.workload.mean_context / experiment.plan.cp
        return DecodeKernel(layout=layout, mean_context=mean_context, mesh=mesh)
    kernel = experiment.kernels.prefill_attention.kernel
    return None if kernel is None else PrefillKernel(layout=layout, kernel=kernel, mesh=mesh)


def _named(function: Any, name: str) -> Any:
    def step(weights: Any, tokens: Any, cache: Any, position: Any) -> Any:
        return function(weights, tokens, cache, position)

    step.__name__ = step.__qualname__ = name
    return step


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)


def _weight_specs(experiment: Experiment) -> dict[str, dict[str, Weight]]:
    """The weight declarations by kind of layer and name; "" is for weights outside the layers."""
    model, plan = experiment.model, experiment.plan
    by_kind = {layer.name: layer_weights(model, plan, layer) for layer in set(model.layers)}
    by_kind[""] = outer_weights(model, plan)
    return {kind: {w.name: w for w in weights} for kind, weights in by_kind.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpecs:
    """Shapes, dtypes and partition specs of the arguments and results of a step.

    Layers are a list, or stacked by kind: a mapping from the kind to arrays with a leading layer
    dim, in which the layers of each pipeline stage are contiguous (see `stage_slots`).
    """

    experiment: Experiment
    layout: ShardLayout
    is_stacked: bool

    def _by_layer(self, of_layer: Callable[[Layer, tuple[int, ...]], Any]) -> Any:
        """`of_layer(layer, leading dims)` for each layer, or for each kind."""
        layers = self.experiment.model.layers
        if not self.is_stacked:
            return [of_layer(layer, ()) for layer in layers]
        n_stages = self.experiment.plan.pp
        return {
            layer.name: of_layer(layer, (len(stage_slots(layers, layer, n_stages)),))
            for layer in dict.fromkeys(layers)
        }

    def _of_weights(self, value: Callable[[Weight, tuple[int, ...]], Any]) -> dict[str, Any]:
        """`value(weight, leading dims)` of all weights and their scales, as the pytree of weights."""
        model, plan = self.experiment.model, self.experiment.plan

        def of(weights: Iterable[Weight], lead: tuple[int, ...]) -> dict[str, Any]:
            stored = stored_arrays(weights, self.experiment.workload.weight_dtype)
            return {weight.name: value(weight, lead) for weight in stored}

        layers = self._by_layer(lambda layer, lead: of(layer_weights(model, plan, layer), lead))
        return of(outer_weights(model, plan), ()) | {"layers": layers}

    def _of_caches(self, value: Callable[[CacheArray, tuple[int, ...]], Any]) -> Any:
        """`value(array, leading dims)` of all cache arrays, as the pytree of the cache."""
        model, plan = self.experiment.model, self.experiment.plan
        n_tokens = self.experiment.workload.decode_tokens

        def of_layer(layer: Layer, lead: tuple[int, ...]) -> dict[str, Any]:
            arrays = layer_cache(model, plan, layer, n_tokens=n_tokens)
            if self.experiment.kernels.decode_attention.kernel is not None:
                arrays = joined_narrow_heads(arrays)
            return {array.name: value(array, lead) for array in arrays}

        return self._by_layer(of_layer)

    @property
    def weights(self) -> dict[str, Any]:
        """Partition specs of the weights."""
        return self._of_weights(
            lambda weight, lead: self.layout.weight_spec(weight, is_stacked=bool(lead))
        )

    @property
    def weight_shapes(self) -> dict[str, Any]:
        """Global shapes of the weights."""
        return self._of_weights(lambda weight, lead: lead + weight.shape)

    @property
    def weight_dtypes(self) -> dict[str, Any]:
        """XLA's names of the weights' dtypes."""
        default = self.experiment.workload.weight_dtype
        return self._of_weights(lambda weight, _: weight.stored_dtype(default))

    @property
    def row_major_weights(self) -> dict[str, Any]:
        """Whether rows are contiguous in the memory layout of the weights."""
        return self._of_weights(lambda weight, _: weight.is_row_major)

    @property
    def cache(self) -> Any:
        """Partition specs of the cache."""
        return self._of_caches(
            lambda array, lead: self.layout.cache_spec(array, is_stacked=bool(lead))
        )

    @property
    def cache_shapes(self) -> Any:
        """Global shapes of the cache."""
        plan, workload = self.experiment.plan, self.experiment.workload
        n_slots = cache_slots(plan, workload)

        def shape(array: CacheArray, lead: tuple[int, ...]) -> tuple[int, ...]:
            *heads, width = array.shape
            return (*lead, workload.batch, *heads, plan.cp * array.n_slots(n_slots), width)

        return self._of_caches(shape)

    @property
    def cache_dtypes(self) -> Any:
        """XLA's names of the dtypes of the cache."""
        default = self.experiment.workload.cache_dtype
        return self._of_caches(lambda array, _: array.dtype or default)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Partition specs of (weights, tokens, cache, position); a draft has hidden states beside the tokens."""
        tokens: Any = self.layout.tokens_spec
        if self.experiment.model.draft_head is not None:
            tokens = {"tokens": tokens, "hidden": self.layout.gathered_spec}
        return (self.weights, tokens, self.cache, P())

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Partition specs of (next tokens, logits, cache)."""
        tokens: Any = self.layout.next_tokens_spec
        if self.experiment.model.draft_head is not None:
            tokens = {"tokens": tokens, "hidden": self.layout.rows_spec}
        return (tokens, self.layout.out_logits_spec, self.cache)


def _abstract(specs: ArgumentSpecs, mesh: Mesh, phase: Phase) -> tuple[Any, ...]:
    experiment = specs.experiment

    def array(shape: tuple[int, ...], spec: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec) if _is_spec(spec) else spec
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def arrays(shapes: Any, tree: Any, dtypes: Any) -> Any:
        return jax.tree.map(
            lambda spec, shape, dtype: array(shape, spec, JAX_DTYPES[dtype]),
            tree,
            shapes,
            dtypes,
            is_leaf=_is_spec,
        )

    n_sequences = experiment.n_sequences(phase) * experiment.plan.data_size
    tokens: Any = array(
        (n_sequences, experiment.n_positions(phase)), specs.layout.tokens_spec, jnp.int32
    )
    if experiment.model.draft_head is not None:
        shape = (n_sequences, 1, experiment.model.hidden)
        dtype = JAX_DTYPES[experiment.workload.activation_dtype]
        tokens = {"tokens": tokens, "hidden": array(shape, specs.layout.gathered_spec, dtype)}
    return (
        arrays(specs.weight_shapes, _weight_formats(specs, mesh), specs.weight_dtypes),
        tokens,
        arrays(specs.cache_shapes, specs.cache, specs.cache_dtypes),
        array((), P(), jnp.int32),
    )
