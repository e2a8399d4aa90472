"""Runs a traced program on virtual CPU devices, fed with the weights of a transformers model."""

import re

import jax
import numpy as np

from meshscope.events.enums import Phase
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.live import live_program, placed, stored_arrays
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import TracedProgram
from meshscope.programs.torchxla.tensors import SCALES


class Running:
    """One phase, compiled, with its weights in place."""

    def __init__(
        self, experiment: Experiment, phase: Phase, weights: dict[str, np.ndarray]
    ) -> None:
        live = live_program(experiment, phase, jax.devices())
        self.program: TracedProgram = live.traced
        self.likes, self.tokens, self.cache, self.position = live.arguments
        values = {ORDER: 0}
        for name, value in values_of(self.program, weights).items():
            values |= stored_arrays(name, value, self.program.arguments[name].dtype)
        self.held = {
            name: placed(np.reshape(value, self._shape(name)), self.likes[name])
            for name, value in values.items()
        }
        self.loaded = live.compile()

    def _shape(self, name: str) -> tuple[int, ...]:
        return () if name == ORDER else self.program.arguments[name].shape

    def new_cache(self) -> dict[str, object]:
        """An empty cache on the devices."""
        return {name: placed(np.zeros(like.shape), like) for name, like in self.cache.items()}

    def step(
        self, tokens: np.ndarray, cache: dict[str, object], position: int
    ) -> tuple[np.ndarray, np.ndarray, dict[str, object]]:
        """Next tokens and logits of one step, and the cache on the devices."""
        given = placed(tokens, self.tokens), cache, placed(position, self.position)
        next_tokens, logits, cache = self.loaded(self.held, *given)
        return np.asarray(next_tokens), np.asarray(logits), cache


def values_of(program: TracedProgram, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arguments that are weights or constants."""
    values: dict[str, np.ndarray] = dict(program.constants)
    for name in program.arguments:
        is_given = name.startswith("cache.") or name in {"tokens", "position"}
        if name in values or is_given or name.endswith(SCALES):
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
    is_alternating = ".experts." in name and f"{name.removesuffix('_bias')}_bias" in weights
    return _of_alternating(name, weights[name]) if is_alternating else weights[name]


def _of_alternating(name: str, value: np.ndarray) -> np.ndarray:
    """An array of gpt-oss' experts, whose gates and ups alternate in the last dimension, as others store it."""
    outputs_first = np.moveaxis(value, -1, 1)
    if "gate_up_proj" not in name:
        return outputs_first
    return np.stack([outputs_first[:, ::2], outputs_first[:, 1::2]], axis=1)
