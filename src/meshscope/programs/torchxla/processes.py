"""A traced program on the devices of several processes, executed by JAX's runtime.

torch_xla 2.9 has no collectives between processes on CPU devices, and JAX's runtime has. It takes the program that
`lowering.py` prepares, with the interface of programs of JAX, so the same session runs it on several hosts.
"""

# pyright: reportMissingImports=false
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.plans.experiment import Experiment
from meshscope.programs.jax.build import JAX_DTYPES
from meshscope.programs.jax.stablehlo import CompiledStableHlo
from meshscope.programs.jax.values import ReadTensor
from meshscope.programs.torchxla.layouts import Spec, partition
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import POSITION, TOKENS, TracedProgram, build_program
from meshscope.programs.torchxla.values import weight_values


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProgram:
    """A traced program, lowered for the devices of all processes. `arguments` are weights, tokens, cache and position."""

    traced: TracedProgram
    mesh: Mesh
    arguments: tuple[Any, ...]

    @property
    def phase(self) -> Phase:
        """The phase that was traced."""
        return self.traced.phase

    def lower(self) -> "SharedProgram":
        """Itself: `compile` lowers it, too."""
        return self

    def compile(self) -> "LoadedProgram":
        """Compiles the program for its devices, and loads it on those of this process."""
        compiled = self.traced.lower().compile(is_loaded=True)
        return LoadedProgram(program=self, compiled=compiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProgram:
    """A compiled program that is callable on arrays of JAX, with what a session reads of `jax.stages.Compiled`.

    Prefill leaves the cache as decode takes it, so their formats are equal.
    """

    program: SharedProgram
    compiled: CompiledStableHlo
    input_formats: tuple[tuple[None, ...], ...] = ((None,) * 4,)
    output_formats: tuple[None, ...] = (None,) * 3

    def as_text(self) -> str:
        """Optimized HLO text."""
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        """The compiler's memory statistics of one device."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> dict[str, float]:
        """The compiler's FLOPs and bytes of one device."""
        return self.compiled.executable.cost_analysis()

    def __call__(
        self, weights: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any], position: Any
    ) -> tuple[Any, None, dict[str, Any]]:
        """Runs one step: next tokens [B], no logits, and the new cache by name, in the memory of the old one."""
        traced = self.program.traced
        ids, at = tokens.astype(np.int64), position.astype(np.int64)
        given = {**weights, **cache, TOKENS: ids, POSITION: at}
        arrays = [given[name] for name in traced.parameters if name is not None]
        results = self.compiled.executable.execute_sharded(arrays)
        parts = results.disassemble_into_single_device_arrays()
        shapes = [tokens.shape[:1], None, *(cache[name].shape for name in traced.cache)]
        next_tokens, _, *kept = [
            shape
            and jax.make_array_from_single_device_arrays(
                shape, _sharding(self.program.mesh, spec), part
            )
            for shape, spec, part in zip(shapes, traced.result_specs, parts, strict=True)
        ]
        return next_tokens, None, dict(zip(traced.cache, kept, strict=True))


def shared_program(
    experiment: Experiment, phase: Phase, devices: list[Any], *, chunk: int = -1
) -> SharedProgram:
    """Traces one phase for the devices of all processes; prompts are whole, so there is one `chunk`.

    SpecError for an array that the plan splits into unequal parts, which XLA pads and JAX's arrays cannot be.
    """
    del chunk
    jax.config.update("jax_enable_x64", True)  # torch has 64-bit token ids
    traced = build_program(experiment, phase, devices)
    sizes = traced.layouts.mesh
    mesh = Mesh(np.array(devices, dtype=object).reshape(sizes.sizes), sizes.names)
    for name, one in traced.arguments.items():
        for size, axes in zip(one.shape, one.spec, strict=True):
            if size % (n_parts := traced.layouts.n_parts(axes)):
                raise SpecError(
                    f"in several processes, '{name}' cannot be split: {n_parts} devices do not divide {size}. "
                    "Use a plan that divides it, or one process."
                )
    arrays = {
        name: jax.ShapeDtypeStruct(
            one.shape,
            np.int64 if one.dtype == "s64" else JAX_DTYPES[one.dtype],
            sharding=_sharding(mesh, one.spec),
        )
        for name, one in traced.arguments.items()
    }
    tokens, position = arrays.pop(TOKENS), arrays.pop(POSITION)
    cache = {name: arrays.pop(name) for name in traced.cache}
    arrays[ORDER] = jax.ShapeDtypeStruct((), np.float32, sharding=_sharding(mesh, ()))
    return SharedProgram(traced=traced, mesh=mesh, arguments=(arrays, tokens, cache, position))


def shared_weights(
    program: SharedProgram, *, experiment: Experiment, seed: int, read: ReadTensor | None
) -> dict[str, Any]:
    """The weights on the devices of this process, read from a checkpoint or random."""

    def placed(value: Any, like: Any) -> Any:
        array = np.asarray(value).astype(like.dtype).reshape(like.shape)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])

    likes = program.arguments[0]
    values = weight_values(program.traced, experiment, seed=seed, read=read)
    return {name: placed(value, likes[name]) for name, value in ((ORDER, 0), *values)}


def _sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*partition(spec)))
