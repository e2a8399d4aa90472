"""Caches of the layers of a pipeline: one array for the same layer of all stages, and micro-batches of it.

Shapes: P stages, B batch, b one device's share of the batch, K key and value heads, T slots, H width.
"""

# pyright: reportMissingImports=false
from typing import Any

import torch
import torch_xla
from transformers.cache_utils import StaticLayer

from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import Tensors

ARRAYS = ("keys", "values")
STAGES = ("pp",)


class StageLayer(StaticLayer):
    """Keys and values [P, B, K, T, H], of which a device has [b, ...] in the manual region of the pipeline.

    cp splits slots as in `ContextLayer`. `new` are the keys and values that the last step wrote, and `seen` those that
    its queries attend to.
    """

    local: dict[str, Any]
    rows: Any
    new: tuple[Any, ...]
    seen: tuple[Any, ...]

    def __init__(
        self, n_slots: int, spec: Spec, experiment: Experiment, *, is_prompt: bool
    ) -> None:
        super().__init__(max_cache_len=n_slots)
        self.arrays: dict[str, Any] = {}
        self.spec = spec
        self.experiment, self.is_prompt = experiment, is_prompt

    def enter(self, tensors: Tensors) -> None:
        """Enter the manual region with this device's shard of the arrays and the position of this step."""
        self.local = {
            name: tensors.entered(array, (STAGES, *self.spec))[0]
            for name, array in self.arrays.items()
        }
        self.cumulative_length = tensors.entered(tensors.position, ())
        self.rank = tensors.rank("cp") if self.experiment.plan.cp > 1 else None

    def leave(self, tensors: Tensors) -> None:
        """Leave the manual region with the whole arrays."""
        self.arrays = {
            name: tensors.left(array[None], (STAGES, *self.spec))
            for name, array in self.local.items()
        }

    def start(self, rows: Any) -> None:
        """Start a layer for the sequences `rows` [m] of the device's batch."""
        self.rows = rows

    def get_seq_length(self) -> Any:
        """The position of the first token of this step on this device."""
        if self.rank is None or not self.is_prompt:
            return self.cumulative_length
        n_local = self.experiment.workload.prompt // self.experiment.plan.cp
        return self.cumulative_length + self.rank * n_local

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The keys and values of the micro-batch that queries attend to, including those of this step."""
        self.new = (key_states, value_states)
        self.seen = tuple(self._written(name, x) for name, x in zip(ARRAYS, self.new, strict=True))
        return self.seen[0], self.seen[1]

    def _written(self, name: str, x: Any) -> Any:
        """Write x [m, K, S, H] at the positions of this step; returns the cached array, or x if cp splits a prompt."""
        held, n_new = self.local[name], x.shape[2]
        now = held.index_select(0, self.rows)
        places = torch.arange(n_new, device=torch_xla.device())
        new = x.to(held.dtype)
        if self.rank is None:
            places = places + self.cumulative_length
        elif not self.is_prompt:
            places, is_here = self._slot()
            new = torch.where(is_here, new, now.index_select(2, places))
        now = now.index_copy(2, places, new)
        self.local[name] = held.index_copy(0, self.rows, now)
        return x if self.rank is not None and self.is_prompt else now

    def _slot(self) -> tuple[Any, Any]:
        """The slot [1] of the token of a decode step, and whether this device of cp writes it."""
        size, n_prompt = self.experiment.plan.cp, self.experiment.workload.prompt
        number = (self.cumulative_length - n_prompt).reshape(1)
        return n_prompt // size + number // size, number % size == self.rank
