"""A traced program on live devices, executed by JAX's runtime.

torch_xla traces the collectives of manual regions for replicas, which its own runtime cannot run in an SPMD program,
and torch_xla 2.9 has no collectives between processes on CPU devices. JAX's runtime takes the program that
`lowering.py` prepares, compiled as `compile` does, with the interface of programs of JAX, so one session runs both.
"""

# pyright: reportMissingImports=false
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.events.enums import Phase
from meshscope.model.arrays import Dim, Weight
from meshscope.model.quantization import FP8_BLOCKS
from meshscope.plans.experiment import Experiment
from meshscope.programs.jax.build import JAX_DTYPES
from meshscope.programs.jax.stablehlo import CompiledStableHlo
from meshscope.programs.jax.values import ReadTensor, read_weight, stored_values
from meshscope.programs.torchxla.layouts import Rule, Spec, partition, rules_of
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import POSITION, TOKENS, TracedProgram, build_program
from meshscope.programs.torchxla.tensors import SCALES

DEVIATION = 0.02  # standard deviation of random weights, as in transformers
TABLE = "tid2eid"  # the experts of each token in layers that look them up
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgram:
    """A traced program, lowered for the devices of all processes. `arguments` are weights, tokens, cache and position."""

    traced: TracedProgram
    mesh: Mesh
    arguments: tuple[Any, ...]

    @property
    def phase(self) -> Phase:
        """The phase that was traced."""
        return self.traced.phase

    def lower(self) -> "LiveProgram":
        """Itself: `compile` lowers it, too."""
        return self

    def compile(self) -> "LoadedProgram":
        """Compiles the program for its devices, and loads it on the devices of this process."""
        compiled = self.traced.lower().compile(is_loaded=True)
        return LoadedProgram(program=self, compiled=compiled)

    def whole(self, shards: list[Any], spec: Spec) -> Any:
        """The array of these shards, one on each device of this process."""
        n_parts = map(self.traced.layouts.n_parts, spec)
        shape = tuple(size * n for size, n in zip(shards[0].shape, n_parts, strict=True))
        sharding = _sharding(self.mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProgram:
    """A compiled program that is callable on arrays of JAX, with what a session reads of `jax.stages.Compiled`.

    Prefill leaves the cache as decode takes it, so their formats are equal.
    """

    program: LiveProgram
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
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Runs one step: next tokens [B], logits [B, 1, V], and the new cache by name, in the memory of the old one."""
        traced = self.program.traced
        ids, at = tokens.astype(np.int64), position.astype(np.int64)
        given = {**weights, **cache, TOKENS: ids, POSITION: at}
        arrays = [given[name] for name in traced.parameters if name is not None]
        results = self.compiled.executable.execute_sharded(arrays)
        parts = zip(
            results.disassemble_into_single_device_arrays(), traced.result_specs, strict=True
        )
        next_tokens, logits, *kept = [self.program.whole(shards, spec) for shards, spec in parts]
        return next_tokens, logits, dict(zip(traced.cache, kept, strict=True))


def live_program(
    experiment: Experiment, phase: Phase, devices: list[Any], *, chunk: int = -1
) -> LiveProgram:
    """Traces one phase for the devices of all processes; prompts are whole, so there is one `chunk`.

    Arrays that the plan splits into unequal parts are padded, as XLA pads them.
    """
    del chunk
    jax.config.update("jax_enable_x64", True)  # torch has 64-bit token ids
    traced = build_program(experiment, phase, devices)
    sizes = traced.layouts.mesh
    mesh = Mesh(np.array(devices, dtype=object).reshape(sizes.sizes), sizes.names)
    arrays: dict[str, Any] = {}
    for name, one in traced.arguments.items():
        n_parts = map(traced.layouts.n_parts, one.spec)
        shape = tuple(-(-size // n) * n for size, n in zip(one.shape, n_parts, strict=True))
        dtype = np.int64 if one.dtype == "s64" else JAX_DTYPES[one.dtype]
        arrays[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(mesh, one.spec))
    tokens, position = arrays.pop(TOKENS), arrays.pop(POSITION)
    cache = {name: arrays.pop(name) for name in traced.cache}
    arrays[ORDER] = jax.ShapeDtypeStruct((), np.float32, sharding=_sharding(mesh, ()))
    return LiveProgram(traced=traced, mesh=mesh, arguments=(arrays, tokens, cache, position))


def live_weights(
    program: LiveProgram, *, experiment: Experiment, seed: int, read: ReadTensor | None
) -> dict[str, Any]:
    """The weights on the devices of this process, read from a checkpoint or random."""
    likes = program.arguments[0]
    values = weight_values(program.traced, experiment, seed=seed, read=read)
    return {ORDER: placed(0, likes[ORDER])} | {
        name: placed(np.reshape(value, program.traced.arguments[name].shape), likes[name])
        for name, value in values
    }


def weight_values(
    program: TracedProgram, experiment: Experiment, *, seed: int, read: ReadTensor | None
) -> Iterator[tuple[str, Any]]:
    """The weights and constants of a program by name.

    `read` returns a tensor of a checkpoint; without it, matrices are random, norms one and biases zero.
    """
    model, rules = (
        experiment.model,
        rules_of(experiment.model, experiment.plan, experiment.workload.weight_dtype),
    )
    given = {TOKENS, POSITION, *program.cache}
    for number, (name, argument) in enumerate(program.arguments.items()):
        shape = argument.shape
        if name in given or name.endswith(SCALES):  # scales come with their weight
            continue
        if name in program.constants:
            value = program.constants[name]
        elif read is not None and argument.layers:  # a stage without this layer has zeros
            arrays = [
                np.zeros(shape[1:], np.float32)
                if at is None
                else _stored(rules[name], at, read).reshape(shape[1:])
                for at in argument.layers
            ]
            value = np.stack(arrays)
        elif read is not None:
            layer = _LAYER.search(name)
            value = _stored(rules[name], None if layer is None else int(layer[1]), read)
        elif name.endswith(TABLE):
            assert model.moe is not None
            value = np.random.default_rng(seed + number).integers(model.moe.n_experts, size=shape)
        elif "norm" in name or name.endswith("bias"):
            value = torch.ones(shape) if "norm" in name else torch.zeros(shape)
        else:
            random = torch.Generator().manual_seed(seed + number)
            value = DEVIATION * torch.randn(shape, generator=random)
        yield from stored_arrays(name, value, argument.dtype)


def stored_arrays(name: str, value: Any, dtype: str) -> Iterator[tuple[str, Any]]:
    """The arguments that store a parameter: [..., out, in], and in fp8 the scales [..., out blocks, in blocks]."""
    if dtype != "f8e4m3fn":
        yield name, value
        return
    *others, n_out, n_in = value.shape
    matrices = np.asarray(value).reshape(-1, n_out, n_in)
    # Blocks are square, so outputs may stand for inputs.
    alike = Weight(
        name=name,
        dims=(Dim.EXPERT, Dim.NORM, Dim.NORM),
        shape=matrices.shape,
        checkpoint=name,
        inputs=(1,),
    )
    arrays = (array for _, array in stored_values(alike, matrices, FP8_BLOCKS))
    for one, array in zip((name, name + SCALES), arrays, strict=True):
        yield one, array.reshape(*others, *array.shape[1:])


def _stored(rule: Rule, layer: int | None, read: ReadTensor) -> np.ndarray:
    """The value of a parameter, in the order of transformers: experts stack gate and up, [E, 2, F, D]."""
    if rule.dims[0] is not Dim.EXPERT:
        (weight,) = rule.weights
        value = read(weight.checkpoint.format(layer=layer))
    else:
        parts = [read_weight(weight, layer, read) for weight in rule.weights]
        parts = [np.swapaxes(part, 1, 2) if part.ndim > 2 else part for part in parts]
        value = parts[0] if rule.n_stacked == 1 else np.stack(parts, axis=1)
    return value if np.issubdtype(value.dtype, np.integer) else value.astype(np.float32)


def placed(value: Any, like: Any) -> Any:
    """The value on the devices, padded with zeros to the shape of `like`."""
    padded = np.zeros(like.shape, like.dtype)
    padded[tuple(map(slice, np.shape(value)))] = value
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: padded[index])


def _sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*partition(spec)))
