"""Runs a traced program with torch_xla's runtime on virtual CPU devices, fed with the weights of a transformers model."""

import re

import numpy as np

from meshscope.events.enums import Phase
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import TracedProgram, build_program
from meshscope.programs.torchxla.session import (
    forget_traces,
    host_array,
    live_program,
    order_of_collectives,
)


class Running:
    """One phase, compiled, with its weights in place."""

    def __init__(
        self, experiment: Experiment, phase: Phase, weights: dict[str, np.ndarray]
    ) -> None:
        self.program: TracedProgram = build_program(experiment, phase, [])
        self.live = live_program(self.program)
        forget_traces()
        held = values_of(self.program, weights)
        self.held = {name: self.live.placed(name, value) for name, value in held.items()}
        self.held[ORDER] = order_of_collectives()

    def step(self, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The whole results of one step: next tokens, logits, cache."""
        placed = {name: self.live.placed(name, np.asarray(value)) for name, value in given.items()}
        tokens, position = placed.pop("tokens"), placed.pop("position")
        next_tokens, logits, cache = self.live(self.held, tokens, placed, position)
        return [host_array(x) for x in (next_tokens, logits, *cache.values())]


def values_of(program: TracedProgram, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arguments that are weights or constants."""
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
    is_alternating = ".experts." in name and f"{name.removesuffix('_bias')}_bias" in weights
    return _of_alternating(name, weights[name]) if is_alternating else weights[name]


def _of_alternating(name: str, value: np.ndarray) -> np.ndarray:
    """An array of gpt-oss' experts, whose gates and ups alternate in the last dimension, as others store it."""
    outputs_first = np.moveaxis(value, -1, 1)
    if "gate_up_proj" not in name:
        return outputs_first
    return np.stack([outputs_first[:, ::2], outputs_first[:, 1::2]], axis=1)
