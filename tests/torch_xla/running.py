"""Runs a traced program on virtual CPU devices, fed with the weights of a golden file.

By XLA's client in JAX (`Running`), or by torch_xla's own runtime (`RunningItself`), as `run` does.
"""

import re
from typing import Any

import jax
import numpy as np

from meshscope.events.enums import Phase
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.layouts import module_name
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import TracedProgram, build_program
from meshscope.programs.torchxla.session import (
    forget_traces,
    host_array,
    live_program,
    order_of_collectives,
)

jax.config.update("jax_enable_x64", True)  # token ids are int64 in torch

DTYPES = {"f32": np.float32, "s64": np.int64, "s32": np.int32}


class Running:
    """One phase, compiled for CPU devices, with the weights in place."""

    def __init__(
        self, experiment: Experiment, phase: Phase, weights: dict[str, np.ndarray]
    ) -> None:
        self.devices = jax.devices()[: experiment.plan.n_devices]
        self.program: TracedProgram = build_program(experiment, phase, self.devices)
        lowered = self.program.lower()
        self.executable = lowered.load()
        self.layouts = self.program.layouts
        held = values_of(self.program, named(weights, experiment))
        self.held = {name: self._shards(name, value) for name, value in held.items()}

    def step(self, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The whole results of one step: next tokens, logits, cache."""
        shards = self.held | {name: self._shards(name, value) for name, value in given.items()}
        arguments = []
        for number, name in enumerate(self.program.traced.parameters):
            del number
            if name == ORDER:
                arguments.append([np.zeros((), np.float32)] * len(self.devices))
            else:
                arguments.append(shards[name])
        placed = [
            _array(parts, self.devices, name, self)
            for parts, name in zip(arguments, self.program.traced.parameters, strict=True)
        ]
        results = self.executable.execute_sharded(placed)
        return [
            self._whole(parts, spec)
            for parts, spec in zip(
                results.disassemble_into_single_device_arrays(),
                self.program.result_specs,
                strict=True,
            )
        ]

    def _shards(self, name: str, value: np.ndarray) -> list[np.ndarray]:
        """One device's part for each device; the last part of an uneven split is padded."""
        argument = self.program.arguments[name]
        value = np.asarray(value, DTYPES[argument.dtype]).reshape(argument.shape)
        return [self._part(value, argument.spec, device) for device in range(len(self.devices))]

    def _index(self, shape: tuple[int, ...], spec: Any, device: int) -> tuple[slice, ...]:
        mesh = self.layouts.mesh
        at = dict(zip(mesh.names, mesh.coordinates(device), strict=True))
        slices = []
        for size, axes in zip(shape, spec, strict=True):
            part, n_parts = 0, 1
            for axis in axes:
                part, n_parts = part * mesh.size(axis) + at[axis], n_parts * mesh.size(axis)
            local = -(-size // n_parts)
            slices.append(slice(part * local, (part + 1) * local))
        return tuple(slices)

    def _part(self, value: np.ndarray, spec: Any, device: int) -> np.ndarray:
        if not value.shape:
            return value
        index = self._index(value.shape, spec, device)
        part = value[index]
        full = [s.stop - s.start for s in index]
        padding = [(0, want - have) for want, have in zip(full, part.shape, strict=True)]
        return np.ascontiguousarray(np.pad(part, padding))

    def _whole(self, parts: list[Any], spec: Any) -> np.ndarray:
        parts = [np.asarray(part) for part in parts]
        mesh = self.layouts.mesh
        sizes = [
            local * int(np.prod([mesh.size(axis) for axis in axes], dtype=int))
            for local, axes in zip(parts[0].shape, spec, strict=True)
        ]
        whole = np.zeros(sizes, parts[0].dtype)
        for device, part in enumerate(parts):
            whole[self._index(tuple(sizes), spec, device)] = part
        return whole


class RunningItself:
    """The same by torch_xla: one phase, its weights in place."""

    def __init__(
        self, experiment: Experiment, phase: Phase, weights: dict[str, np.ndarray]
    ) -> None:
        self.program: TracedProgram = build_program(experiment, phase, [])
        self.live = live_program(self.program)
        forget_traces()
        held = values_of(self.program, named(weights, experiment))
        self.held = {name: self.live.placed(name, value) for name, value in held.items()}
        self.held[ORDER] = order_of_collectives()

    def step(self, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The whole results of one step: next tokens, logits, cache."""
        placed = {name: self.live.placed(name, np.asarray(value)) for name, value in given.items()}
        tokens, position = placed.pop("tokens"), placed.pop("position")
        next_tokens, logits, cache = self.live(self.held, tokens, placed, position)
        return [host_array(x) for x in (next_tokens, logits, *cache.values())]


def _array(parts: list[np.ndarray], devices: list[Any], name: str | None, running: Running) -> Any:
    """The parts as one array for the executable."""
    del name, running
    n = len(devices)
    whole = np.stack(parts)
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    singles = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    if not parts[0].shape:
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_single_device_arrays((), replicated, singles)
    shape = (parts[0].shape[0] * n, *parts[0].shape[1:])
    del whole
    return jax.make_array_from_single_device_arrays(shape, sharding, singles)


def named(weights: dict[str, np.ndarray], experiment: Experiment) -> dict[str, np.ndarray]:
    """The weights by their names in transformers."""
    family = experiment.model.family
    return {module_name(name, family): value for name, value in weights.items()}


def values_of(program: TracedProgram, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arguments that are weights or constants: experts stacked as transformers stores them."""
    values: dict[str, np.ndarray] = dict(program.constants)
    for name in program.arguments:
        if name in values or name.startswith("cache.") or name in {"tokens", "position"}:
            continue
        values[name] = _of_stages(name, program, weights)
    return values


def _of_stages(name: str, program: TracedProgram, weights: dict[str, np.ndarray]) -> np.ndarray:
    """A weight, or those of the same layer of all stages."""
    layers = program.arguments[name].layers
    if not layers:
        return _weight(name, weights)
    start, rest = re.fullmatch(r"(model\.layers\.)\d+(\..*)", name).groups()
    arrays = [None if x is None else _weight(f"{start}{x}{rest}", weights) for x in layers]
    empty = np.zeros_like(next(x for x in arrays if x is not None))
    return np.stack([empty if x is None else x for x in arrays])


def _weight(name: str, weights: dict[str, np.ndarray]) -> np.ndarray:
    if name.partition(".experts.")[2] and f"{name.removesuffix('_bias')}_bias" in weights:
        return _of_alternating(name, weights[name])
    if name in weights:
        return weights[name]
    return _of_experts(name, weights)


def _of_experts(name: str, weights: dict[str, np.ndarray]) -> np.ndarray:
    """The stack of the tensors of all experts."""
    layer = name.split(".mlp.experts.", maxsplit=1)[0]
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        base = f"{layer}.mlp.experts."
        n_experts = sum(key.startswith(base) and key.endswith(f"{gate}.weight") for key in weights)
        if not n_experts:
            continue

        def stacked(role: str, base: str = base, n_experts: int = n_experts) -> np.ndarray:
            return np.stack([weights[f"{base}{e}.{role}.weight"] for e in range(n_experts)])

        if name.endswith("gate_up_proj"):
            return np.stack([stacked(gate), stacked(up)], axis=1)
        return stacked(down)
    raise KeyError(name)


def _of_alternating(name: str, value: np.ndarray) -> np.ndarray:
    """An array of gpt-oss' experts, whose gates and ups alternate in the last dimension, as others store it."""
    outputs_first = np.moveaxis(value, -1, 1)
    if "gate_up_proj" not in name:
        return outputs_first
    return np.stack([outputs_first[:, ::2], outputs_first[:, 1::2]], axis=1)
