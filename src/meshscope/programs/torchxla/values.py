"""Values of the weights of a traced program, from a checkpoint or random."""

# pyright: reportMissingImports=false
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from meshscope.model.arrays import Dim
from meshscope.plans.experiment import Experiment
from meshscope.programs.jax.values import ReadTensor, read_weight
from meshscope.programs.torchxla.layouts import Rule, rules_of
from meshscope.programs.torchxla.program import POSITION, TOKENS, TracedProgram

DEVIATION = 0.02  # standard deviation of random weights, as in transformers
TABLE = "tid2eid"  # the experts of each token in layers that look them up
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def weight_values(
    program: TracedProgram, experiment: Experiment, *, seed: int, read: ReadTensor | None
) -> Iterator[tuple[str, Any]]:
    """The weights and constants of a program by name.

    `read` returns a tensor of a checkpoint; without it, matrices are random, norms one and biases zero.
    """
    model, rules = experiment.model, rules_of(experiment.model, experiment.plan)
    given = {TOKENS, POSITION, *program.cache}
    for number, (name, argument) in enumerate(program.arguments.items()):
        shape = argument.shape
        if name in given:
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
        yield name, value


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
