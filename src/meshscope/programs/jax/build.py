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
from meshscope.model.arrays import Dim, Weight, stored_arrays
from meshscope.model.layers import Layer, unrolled
from meshscope.model.quantization import activation_dtype_of, experts_quantization
from meshscope.plans.caches import cache_slots, joined_narrow_heads, layer_cache
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.plan import Tables
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
from meshscope.programs.jax.decoder import TOKENS, Decoder
from meshscope.programs.jax.experts import Experts
from meshscope.programs.jax.grouped_matmul import GroupedKernel
from meshscope.programs.jax.mixture import Mixture
from meshscope.programs.jax.pipeline import PipelineProgram
from meshscope.programs.jax.residual import Residual
from meshscope.programs.jax.state import LayerWeights

FOUR_BITS = "f4e2m1fn"  # of arrays of caches
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
    FOUR_BITS: jnp.uint8,  # two in a byte
}

# XLA for GPUs rewrites the dot of one row with a matrix below 10,000,000 elements as a multiply and a
# reduce with an intermediate array in memory: three passes over the matrix
# (IsMatrixMultiplicationTooSmallForRewriting; seen in JAX 0.11.2's program of Qwen3-8B's keys and
# values). Eight rows, the minimum of a tensor core, keep the dot.
GPU_MIN_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProgram:
    """The step function of one phase, or of a chunk of prefill, and its abstract arguments."""

    phase: Phase
    step: Any
    arguments: tuple[
        Any, ...
    ]  # weights, tokens, cache; position, or first local sequence of a chunk
    is_stacked: bool  # layers by kind, as in every pipeline
    is_pipeline: bool

    def lower(self) -> Any:
        """Lowers the program to StableHLO without allocating memory."""
        return self.step.lower(*self.arguments)

    def logits(self, out: Any) -> Any:
        """The logits [B, V], or [B*S, V] of several tokens, in the result of a step; in a pipeline, the last stage's."""
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
    """The program of one phase of an experiment over these devices; `chunk` is a split prompt's chunk index."""
    program = experiment.programs(phase)[chunk]
    mesh = device_mesh(experiment, devices)
    layout = layout_of(experiment.plan, experiment.workload, phase)
    arrays = ProgramArrays(experiment=experiment, layout=layout, mesh=mesh)
    decoder = _decoder(experiment, layout, mesh)
    run, is_pipeline = decoder.step, experiment.plan.pp > 1
    if is_pipeline:
        run = PipelineProgram(
            decoder=decoder,
            layout=layout,
            n_stages=experiment.plan.pp,
            runs=stage_runs(experiment.model.layers, experiment.plan.pp, experiment.model.tables),
            n_microbatches=experiment.n_microbatches(phase),
            is_scanned=experiment.is_scanned,
        ).step
    if experiment.n_chunks(phase) > 1:
        run = _chunk_step(decoder, program.start)
    arguments, out_specs = arrays.arguments(), arrays.out_specs()
    if experiment.program.partitioner is Partitioner.MANUAL:
        in_specs = jax.tree.map(lambda array: array.sharding.spec, arguments)
        run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def step(weights: Any, tokens: Any, cache: Any, position: Any) -> Any:
        return run(weights, tokens, cache, position)

    step.__name__ = step.__qualname__ = program.name  # the HLO names a program after its function
    in_shardings: Any = jax.tree.map(
        lambda array: array.sharding if array.format.layout is None else array.format, arguments
    )
    out_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    if compiler_lays_out_cache(experiment, phase):
        weights, tokens, cache, position = in_shardings
        cache = jax.tree.map(lambda sharding: Format(MemoryLayout.AUTO, sharding), cache)
        in_shardings = (weights, tokens, cache, position)
        out_shardings = (*out_shardings[:2], cache)
    return BuiltProgram(
        phase=phase,
        step=jax.jit(
            step, donate_argnums=(2,), in_shardings=in_shardings, out_shardings=out_shardings
        ),
        arguments=arguments,
        is_stacked=arrays.is_stacked,
        is_pipeline=is_pipeline,
    )


def compiler_lays_out_cache(experiment: Experiment, phase: Phase) -> bool:
    """Whether the compiler chooses the memory layout of the cache, as serving engines let it in decode.

    With the default layout, a step on a TPU, or of several sequences on a GPU, transposes the whole cache twice.
    """
    return phase is Phase.DECODE and experiment.topology.chip.kind is not ChipKind.CPU


def _chunk_step(decoder: Decoder, start: int) -> Any:
    context = replace(decoder.context, n_cached=start)

    def step(weights: Any, tokens: Any, cache: Any, first_row: Any) -> Any:
        chunk = replace(decoder, first_row=first_row, context=context)
        return chunk.step(weights, tokens, cache, start)

    return step


def _decoder(experiment: Experiment, layout: ShardLayout, mesh: Mesh) -> Decoder:
    model, plan = experiment.model.for_context(experiment.workload.context), experiment.plan
    phase, weight_dtype = layout.phase, experiment.workload.weight_dtype
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    collectives = (
        ShardMapCollectives(plan=plan, layout=layout)
        if is_manual
        else GspmdCollectives(layout=layout, mesh=mesh)
    )
    mixture, grouped_kernel, kernel_dtypes = None, None, ()
    kernels, quantization = experiment.kernels, experts_quantization(weight_dtype)
    of_experts = None if kernels.experts is None else kernels.experts.kernel
    if of_experts is Kernel.GROUPED and quantization is not None:
        grouped_kernel = GroupedKernel(
            block=quantization.square_block,
            has_codes=quantization.codes_dtype is not None,
            has_bf16=experiment.topology.chip.has_bf16_vectors,
        )
    if kernels.has_expert_kernel:
        kernel_dtypes = compiler_facts(experiment.topology.chip.name).ragged_dot_dtypes
        if grouped_kernel is not None:
            matrices = (w for w in expert_weights(experiment.model) if w.inputs)
            kernel_dtypes = {w.stored_dtype(weight_dtype) for w in matrices}
    narrow = activation_dtype_of(weight_dtype)
    weights = LayerWeights(  # of no layer yet
        arrays={},
        specs={},
        collectives=collectives,
        dtype=JAX_DTYPES[experiment.workload.activation_dtype],
        stored_as=weight_dtype,
        min_rows=GPU_MIN_ROWS if experiment.topology.chip.kind is ChipKind.GPU else 1,
        kernel_dtypes=tuple(JAX_DTYPES[name] for name in kernel_dtypes),
        narrow_dtype=None if narrow is None else JAX_DTYPES[narrow],
    )
    if model.moe is not None:
        mixture = Mixture(
            experts=Experts(
                moe=model.moe,
                weights=weights,
                has_kernel=kernels.has_expert_kernel,
                grouped_kernel=grouped_kernel if is_manual else None,
            ),
            plan=plan,
            layout=layout,
            collectives=collectives,
            form=experiment.dispatch_form,
            capacity_factor=experiment.capacity_factor,
        )
    specs = {
        layer.name: layer_weights(experiment.model, plan, layer) for layer in set(model.layers)
    }
    specs[""] = outer_weights(experiment.model, replace(plan, tables=Tables.ALL))
    is_alike = model.attention.has_whole_caches and phase is Phase.DECODE
    attention_kernel: PrefillKernel | DecodeKernel | None = None
    of_all = None if is_manual else mesh
    if phase is Phase.PREFILL and (kernel := kernels.prefill_attention.kernel) is not None:
        attention_kernel = PrefillKernel(layout=layout, kernel=kernel, mesh=of_all)
    elif phase is Phase.DECODE and kernels.decode_attention.kernel is not None:
        mean_context = experiment.workload.mean_context / plan.cp
        attention_kernel = DecodeKernel(layout=layout, mean_context=mean_context, mesh=of_all)
    return Decoder(
        model=model,
        phase=phase,
        collectives=collectives,
        weights=weights,
        mixture=mixture,
        context=Context(
            size=1 if is_alike else plan.cp,
            form=experiment.context_form,
            phase=phase,
            n_prompt=experiment.workload.prompt,
            n_chunk=experiment.n_positions(Phase.PREFILL)
            if experiment.prefill_chunks.is_cut
            else None,
        ),
        residual=Residual(
            hyper=model.hyper,
            norm_eps=model.norm_eps,
            norm_offset=model.norm_offset,
            scale=model.residual_scale,
        ),
        specs={kind: {w.name: w for w in weights} for kind, weights in specs.items()},
        repeats=model.repeats() if experiment.is_scanned else unrolled(model.layers),
        n_stages=plan.pp,
        attention_kernel=attention_kernel,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramArrays:
    """Shapes, dtypes and shardings of the arguments and results of a step.

    Layers are a list, or stacked by kind, where the layers of each pipeline stage are contiguous (see `stage_slots`).
    """

    experiment: Experiment
    layout: ShardLayout
    mesh: Mesh

    @property
    def is_stacked(self) -> bool:
        """Whether layers are stacked by kind, as in every pipeline."""
        return self.experiment.is_scanned or self.experiment.plan.pp > 1

    def arguments(self) -> tuple[Any, ...]:
        """Weights, tokens, cache and position; a draft also has hidden states."""
        experiment, layout = self.experiment, self.layout
        model, plan = experiment.model, experiment.plan
        weights = self._weights(outer_weights(model, plan), ())
        weights["layers"] = self._by_layer(
            lambda layer, lead: self._weights(layer_weights(model, plan, layer), lead)
        )
        n_sequences = experiment.n_sequences(layout.phase) * plan.data_size
        shape = (n_sequences, experiment.n_positions(layout.phase))
        spec = P(layout.data, layout.context if layout.phase is Phase.PREFILL else None)
        tokens: Any = self._array(shape, jnp.int32, spec)
        if model.draft_head is not None:
            dtype = JAX_DTYPES[experiment.workload.activation_dtype]
            shape = (n_sequences, 1, model.hidden)
            tokens = {"tokens": tokens, "hidden": self._array(shape, dtype, layout.gathered_spec)}
        if plan.tables is Tables.HOST and model.tables:
            tokens = {"tokens": tokens, **self._host_rows(n_sequences)}
        return weights, tokens, self._caches(), self._array((), jnp.int32, P())

    def out_specs(self) -> tuple[Any, ...]:
        """Partition specs of next tokens, logits and cache; a draft also has hidden states."""
        layout = self.layout
        tokens: Any = P(layout.data)
        if self.experiment.model.draft_head is not None:
            tokens = {"tokens": tokens, "hidden": layout.rows_spec}
        # The stages of a pipeline have logits each, [P, B, V].
        logits = P("pp", *layout.rows_spec) if layout.axis("pp") else layout.rows_spec
        cache = jax.tree.map(lambda array: array.sharding.spec, self._caches())
        return tokens, logits, cache

    def _caches(self) -> Any:
        """The cache of the layers, and the last ids of each sequence if hashes of n-grams read them."""
        caches, engram = self._by_layer(self._cache), self.experiment.model.engram
        if engram is None or self.experiment.plan.tables is Tables.HOST:
            return caches
        shape = (self.experiment.workload.batch, engram.n_orders)
        ids = {TOKENS: self._array(shape, jnp.int32, P(self.layout.data, None))}
        return {**caches, TOKENS: ids} if self.is_stacked else [*caches, ids]

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

    def _array(self, shape: tuple[int, ...], dtype: Any, spec: P, **layout: Any) -> Any:
        sharding = NamedSharding(self.mesh, spec)
        placed = Format(MemoryLayout(**layout), sharding) if layout else sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    def _host_rows(self, n_sequences: int) -> dict[str, Any]:
        """The rows [B, S, R, W] of tables of n-grams, and their scales, which a host sends in the form of the tables."""
        experiment, layout, engram = self.experiment, self.layout, self.experiment.model.engram
        assert engram is not None
        of_positions = layout.context if layout.phase is Phase.PREFILL else None
        batch, positions = ([layout.data], [of_positions])
        if layout.split_dim is not None:
            (batch, positions)[layout.split_dim].append("tp")
        spec = P(*(tuple(filter(None, axes)) or None for axes in (batch, positions)), None, None)
        shape = (n_sequences, experiment.n_positions(layout.phase), engram.n_read)
        every = outer_weights(experiment.model, replace(experiment.plan, tables=Tables.ALL))
        dtype = experiment.workload.weight_dtype
        rows = (replace(w, shape=(1, w.shape[1])) for w in every if Dim.TABLE in w.dims)
        return {
            array.name: self._array(
                (*shape, array.shape[1]), JAX_DTYPES[array.stored_dtype(dtype)], spec
            )
            for array in stored_arrays(rows, dtype)
        }

    def _weights(self, weights: Iterable[Weight], lead: tuple[int, ...]) -> dict[str, Any]:
        """All weights and their scales; those that are read row by row have a layout, which every step would transpose."""
        default, arrays = self.experiment.workload.weight_dtype, dict[str, Any]()
        for weight in stored_arrays(weights, default):
            shape, dtype = lead + weight.shape, JAX_DTYPES[weight.stored_dtype(default)]
            spec = self.layout.spec(weight.dims, is_stacked=bool(lead))
            order = {"major_to_minor": tuple(range(len(shape)))} if weight.is_row_major else {}
            arrays[weight.name] = self._array(shape, dtype, spec, **order)
        return arrays

    def _cache(self, layer: Layer, lead: tuple[int, ...]) -> dict[str, Any]:
        experiment, layout = self.experiment, self.layout
        plan, workload = experiment.plan, experiment.workload
        arrays = layer_cache(experiment.model, plan, layer, n_tokens=workload.decode_tokens)
        if experiment.kernels.decode_attention.kernel is not None:
            arrays = joined_narrow_heads(arrays)
        n_slots, cache = cache_slots(plan, workload, experiment.model), dict[str, Any]()
        are_whole = experiment.model.attention.has_whole_caches
        for array in arrays:
            *heads, width = array.shape
            if array.dtype == FOUR_BITS:  # two in a byte
                width //= 2
            is_whole = are_whole or array.n_fixed_slots is not None
            n_devices, context = (1, None) if is_whole else (plan.cp, layout.context)
            shape = (*lead, workload.batch, *heads, n_devices * array.n_slots(n_slots), width)
            dims = (layout.data, *array.dims[:-1], context, array.dims[-1])
            spec = layout.spec(dims, is_stacked=bool(lead))
            cache[array.name] = self._array(
                shape, JAX_DTYPES[array.dtype or workload.cache_dtype], spec
            )
        return cache
