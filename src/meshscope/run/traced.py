"""A session of programs that torch_xla traced: the same requests, marks and profile as for JAX's own.

torch_xla cannot run manual regions on CPU devices, nor can it run what was repaired. So the traced
program is run by the PJRT client that JAX opens on the devices; torch_xla traces, and computes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.plan.experiment import Experiment
from meshscope.run.names import COMPILING, PLACING, stage_words
from meshscope.run.session import Session
from meshscope.table.kinds import Phase
from meshscope.torchxla.layouts import Spec
from meshscope.torchxla.lowering import ORDER
from meshscope.torchxla.program import POSITION, TOKENS, TracedProgram, build_program
from meshscope.torchxla.tensors import Argument

JAX_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "s32": jnp.int32,
    "s64": jnp.int64,
}
DEVIATION = 0.02  # of random weights, as transformers initialises them


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the arrays of a traced program lie; those of an uneven split are padded."""

    program: TracedProgram
    mesh: Mesh

    def sharding(self, spec: Spec) -> NamedSharding:
        """The layout of a spec on the devices."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in spec)))

    def shape(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        """The shape with its padding: as much on every device."""
        local = self.program.layouts.local_shape(shape, spec)
        mesh = self.program.layouts.mesh
        return tuple(
            size * prod(mesh.size(axis) for axis in axes)
            for size, axes in zip(local, spec, strict=True)
        )

    def placed(self, name: str, value: Any) -> Any:
        """The value of an argument on the devices."""
        argument = self.program.arguments[name]
        array = np.asarray(value, JAX_DTYPES[argument.dtype]).reshape(argument.shape)
        full = self.shape(argument.shape, argument.spec)
        padding = [(0, want - have) for want, have in zip(full, array.shape, strict=True)]
        array = np.pad(array, padding) if padding else array
        sharding = self.sharding(argument.spec)
        return jax.make_array_from_callback(full, sharding, lambda index: array[index])

    def made(self, name: str, make: Any) -> Any:
        """An argument that `make(shape, dtype)` makes on the devices."""
        argument = self.program.arguments[name]
        full = self.shape(argument.shape, argument.spec)
        dtype = JAX_DTYPES[argument.dtype]
        return jax.jit(lambda: make(full, dtype), out_shardings=self.sharding(argument.spec))()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A traced program that is called like a compiled step of JAX."""

    placement: Placement
    executable: Any

    def __call__(
        self, weights: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any], position: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Next tokens [B], logits [B, 1, V] and the new cache by name."""
        program = self.placement.program
        given = {**weights, **cache, TOKENS: tokens, POSITION: position}
        arguments = [given[name] for name in program.traced.parameters if name is not None]
        results = self.executable.execute_sharded(arguments)
        arrays = [
            jax.make_array_from_single_device_arrays(
                self._whole_shape(parts[0].shape, spec), self.placement.sharding(spec), parts
            )
            for parts, spec in zip(
                results.disassemble_into_single_device_arrays(), program.result_specs, strict=True
            )
        ]
        next_tokens, logits, *kept = arrays
        return next_tokens, logits, dict(zip(program.cache, kept, strict=True))

    def as_text(self) -> str:
        """Optimised HLO."""
        return self.executable.hlo_modules()[0].to_string()

    def memory_analysis(self) -> Any:
        """The compiler's account of the memory of one device."""
        return self.executable.get_compiled_memory_stats()

    def cost_analysis(self) -> Any:
        """Nothing: what this client says of it was negative for some programs."""
        return None

    def _whole_shape(self, local: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        mesh = self.placement.program.layouts.mesh
        return tuple(
            size * prod(mesh.size(axis) for axis in axes)
            for size, axes in zip(local, spec, strict=True)
        )


def traced_session(
    experiment: Experiment, devices: list[Any], *, seed: int, prompt: np.ndarray, told: Any
) -> Session:
    """Traces and compiles both phases, then puts random weights and the prompt [B, S] on the devices."""
    jax.config.update("jax_enable_x64", True)  # token ids are int64 in torch
    told(stage_words(COMPILING))
    programs = {p: build_program(experiment, p, devices) for p in experiment.phases}
    compiled: dict[Phase, Any] = {}
    for phase, program in programs.items():
        grid = np.array(devices).reshape(program.layouts.mesh.sizes)
        mesh = Mesh(grid, program.layouts.mesh.names)
        compiled[phase] = TracedStep(
            placement=Placement(program=program, mesh=mesh), executable=program.lower().load()
        )
    told(stage_words(PLACING))
    first, last = compiled[Phase.PREFILL].placement, list(compiled.values())[-1].placement
    n_prompt = experiment.workload.prompt
    starts = [0, *range(n_prompt, n_prompt + experiment.workload.n_decode_steps)]
    next_spec = last.program.arguments[TOKENS].spec
    return Session(
        experiment=experiment,
        compiled=compiled,
        weights=_weights(first, seed),
        prompt=first.placed(TOKENS, prompt),
        positions=[first.placed(POSITION, at) for at in starts],
        new_cache=lambda: {name: first.made(name, jnp.zeros) for name in first.program.cache},
        as_input=jax.jit(lambda tokens: tokens[:, None], out_shardings=last.sharding(next_spec)),
    )


def _weights(placement: Placement, seed: int) -> dict[str, Any]:
    """Random matrices, norms of one, constants as they are, and zero for the order of collectives."""
    program, key = placement.program, jax.random.key(seed)
    found: dict[str, Any] = {}
    given = {TOKENS, POSITION, *program.cache}
    for number, (name, argument) in enumerate(program.arguments.items()):
        if name in given:
            continue
        if name in program.constants:
            found[name] = placement.placed(name, program.constants[name])
        else:
            found[name] = placement.made(
                name, _maker(name, argument, jax.random.fold_in(key, number))
            )
    replicated = placement.sharding(())
    found[ORDER] = jax.device_put(np.zeros((), np.float32), replicated)
    return found


def _maker(name: str, argument: Argument, key: Any) -> Any:
    del argument
    if "norm" in name:
        return jnp.ones
    if name.endswith("bias"):
        return jnp.zeros
    return lambda shape, dtype: (DEVIATION * jax.random.normal(key, shape)).astype(dtype)
