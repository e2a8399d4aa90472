"""A program ready to lower: the jitted step of one phase with the shapes and shardings of its arguments."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.plan.experiment import Experiment, Partitioner
from meshscope.plan.weights import Weight, layer_weights, outer_weights, stored_kv_heads
from meshscope.programs.decoder import Decoder
from meshscope.programs.layout import Layout, layout_of
from meshscope.programs.points import AutoPoints, ManualPoints
from meshscope.table.kinds import Phase

JAX_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "s8": jnp.int8,
    "f8e4m3fn": jnp.float8_e4m3fn,
    "f8e5m2": jnp.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProgram:
    """The step function of one phase and its abstract arguments (weights, tokens, cache, position)."""

    phase: Phase
    step: Any
    arguments: tuple[Any, ...]
    is_scanned: bool

    def lower(self) -> Any:
        """The program lowered to StableHLO, nothing allocated."""
        return self.step.lower(*self.arguments)


def device_mesh(experiment: Experiment, devices: list[Any]) -> Mesh:
    """The plan's mesh over these devices in their given order, axis types left to the compiler."""
    mesh = experiment.plan.mesh
    grid = np.array(devices).reshape(mesh.sizes)
    return Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def build_program(experiment: Experiment, phase: Phase, devices: list[Any]) -> BuiltProgram:
    """The program of one phase of an experiment over these devices."""
    mesh = device_mesh(experiment, devices)
    layout = layout_of(experiment.plan, experiment.workload, phase)
    specs = ArgumentSpecs(experiment=experiment, layout=layout, is_stacked=experiment.is_scanned)
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    decoder = Decoder(
        model=experiment.model,
        phase=phase,
        points=ManualPoints(plan=experiment.plan, layout=layout)
        if is_manual
        else AutoPoints(layout=layout, mesh=mesh),
        specs=_weight_specs(experiment),
        activation_dtype=JAX_DTYPES[experiment.workload.activation_dtype],
    )
    step = decoder.step
    if is_manual:
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs.inputs, out_specs=specs.outputs, check_vma=False
        )
    # The HLO names a program after its function.
    named = _named(step, phase.value)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs.outputs, is_leaf=_is_spec)
    return BuiltProgram(
        phase=phase,
        step=jax.jit(named, donate_argnums=(2,), out_shardings=shardings),
        arguments=_abstract(specs, mesh, phase),
        is_scanned=specs.is_stacked,
    )


def _named(function: Any, name: str) -> Any:
    def step(weights: Any, tokens: Any, cache: Any, position: Any) -> Any:
        return function(weights, tokens, cache, position)

    step.__name__ = step.__qualname__ = name
    return step


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)


def _weight_specs(experiment: Experiment) -> dict[str, Weight]:
    model, plan = experiment.model, experiment.plan
    return {w.name: w for w in (*outer_weights(model, plan), *layer_weights(model, plan))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpecs:
    """Shapes and partition specs of what goes into a step and what comes out of it."""

    experiment: Experiment
    layout: Layout
    is_stacked: bool

    @property
    def weights(self) -> dict[str, Any]:
        """Partition specs of the weights, in the structure of the weights."""
        model, plan = self.experiment.model, self.experiment.plan
        layer = {
            w.name: self.layout.weight_spec(w, is_stacked=self.is_stacked)
            for w in layer_weights(model, plan)
        }
        outer = {
            w.name: self.layout.weight_spec(w, is_stacked=False) for w in outer_weights(model, plan)
        }
        return outer | {"layers": layer if self.is_stacked else [layer] * model.n_layers}

    @property
    def weight_shapes(self) -> dict[str, Any]:
        """Global shapes of the weights, in the same structure."""
        model, plan = self.experiment.model, self.experiment.plan
        lead = (model.n_layers,) if self.is_stacked else ()
        layer = {w.name: lead + w.shape for w in layer_weights(model, plan)}
        outer = {w.name: w.shape for w in outer_weights(model, plan)}
        return outer | {"layers": layer if self.is_stacked else [layer] * model.n_layers}

    @property
    def cache(self) -> Any:
        """Partition specs of the cache."""
        spec = self.layout.cache_spec(is_stacked=self.is_stacked)
        pair = (spec, spec)
        return pair if self.is_stacked else [pair] * self.experiment.model.n_layers

    @property
    def cache_shapes(self) -> Any:
        """Global shapes of the cache."""
        model, workload = self.experiment.model, self.experiment.workload
        heads = stored_kv_heads(model, self.experiment.plan)
        shape = (workload.batch, workload.context, heads, model.attention.head_dim)
        if self.is_stacked:
            return ((model.n_layers, *shape),) * 2
        return [(shape, shape)] * model.n_layers

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Partition specs of (weights, tokens, cache, position)."""
        return (self.weights, self.layout.tokens_spec, self.cache, P())

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Partition specs of (next tokens, logits, cache)."""
        return (self.layout.next_tokens_spec, self.layout.rows_spec, self.cache)


def _abstract(specs: ArgumentSpecs, mesh: Mesh, phase: Phase) -> tuple[Any, ...]:
    """Shapes, dtypes and shardings of the arguments; no memory is taken."""
    workload = specs.experiment.workload

    def array(shape: tuple[int, ...], spec: P, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def arrays(shapes: Any, tree: Any, dtype: str) -> Any:
        return jax.tree.map(
            lambda spec, shape: array(shape, spec, JAX_DTYPES[dtype]),
            tree,
            shapes,
            is_leaf=_is_spec,
        )

    n_tokens = workload.prompt if phase is Phase.PREFILL else 1
    return (
        arrays(specs.weight_shapes, specs.weights, workload.weight_dtype),
        array((workload.batch, n_tokens), specs.layout.tokens_spec, jnp.int32),
        arrays(specs.cache_shapes, specs.cache, workload.cache_dtype),
        array((), P(), jnp.int32),
    )
