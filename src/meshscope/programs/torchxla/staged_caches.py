"""Caches of the layers of a pipeline: one array for the same layer of all stages, and micro-batches of it.

Shapes: P stages, B batch, b one device's share of the batch, K key and value heads, T slots, H width.
"""

# pyright: reportMissingImports=false
from collections.abc import Mapping
from typing import Any

import torch
import torch_xla
from transformers.cache_utils import StaticLayer

from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.states import States
from meshscope.programs.torchxla.tensors import Tensors
from meshscope.spec.experiment import Experiment

ARRAYS = ("keys", "values")
INDEX_KEYS = "index_keys"
STAGES = ("pp",)


class StageArrays:
    """Arrays [P, B, ...] of a layer, of which a device has [b, ...] in the manual region of the pipeline."""

    specs: Mapping[str, Spec]
    arrays: dict[str, Any]
    local: dict[str, Any]
    rows: Any

    def enter(self, tensors: Tensors) -> None:
        """Enter the manual region with this device's shard of the arrays."""
        self.local = {
            name: tensors.entered(array, (STAGES, *self.specs[name]))[0]
            for name, array in self.arrays.items()
        }

    def leave(self, tensors: Tensors) -> None:
        """Leave the manual region with the whole arrays."""
        self.arrays = {
            name: tensors.left(array[None], (STAGES, *self.specs[name]))
            for name, array in self.local.items()
        }

    def start(self, rows: Any) -> None:
        """Start a layer for the sequences `rows` [m] of the device's batch."""
        self.rows = rows

    def stop(self) -> None:
        """Stop it."""


class StageLayer(StageArrays, StaticLayer):
    """Keys and values [P, B, K, T, H], and the keys [P, B, T, H] of an indexer; cp splits slots as in `ContextLayer`.

    `new` are the keys and values that the last step wrote, and `seen` those that its queries attend to.
    """

    new: tuple[Any, ...]
    seen: tuple[Any, ...]

    def __init__(
        self, n_slots: int, spec: Spec, experiment: Experiment, *, is_prompt: bool
    ) -> None:
        StaticLayer.__init__(self, max_cache_len=n_slots)
        self.arrays, self.specs = {}, dict.fromkeys(ARRAYS, spec)
        self.experiment, self.is_prompt = experiment, is_prompt

    def add(self, name: str, array: Any, spec: Spec) -> None:
        """Add an array [P, B, ...] to the layer."""
        self.arrays[name] = array
        self.specs = {**self.specs, name: spec}

    def enter(self, tensors: Tensors) -> None:
        """Enter the manual region, with the position of this step."""
        super().enter(tensors)
        self.cumulative_length = tensors.entered(tensors.position, ())
        self.rank = tensors.rank("cp") if self.experiment.plan.cp > 1 else None

    def get_seq_length(self) -> Any:
        """The position of the first token of this step on this device."""
        if self.rank is None or not self.is_prompt:
            return self.cumulative_length
        n_local = self.experiment.workload.prompt // self.experiment.plan.cp
        return self.cumulative_length + self.rank * n_local

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The keys and values of the micro-batch that queries attend to, including those of this step."""
        self.new = (key_states, value_states)
        self.seen = tuple(
            self._written(name, x, dim=2) for name, x in zip(ARRAYS, self.new, strict=True)
        )
        return self.seen[0], self.seen[1]

    def update_indexer(self, indexer_key_states: Any) -> Any:
        """As `update` for the keys [m, S, H] of the indexer."""
        return self._written(INDEX_KEYS, indexer_key_states, dim=1)

    def _written(self, name: str, x: Any, dim: int) -> Any:
        """Write x at the positions `dim` of this step; returns the cached array, or x if cp splits a prompt."""
        held, n_new = self.local[name], x.shape[dim]
        now = held.index_select(0, self.rows)
        places = torch.arange(n_new, device=torch_xla.device())
        new = x.to(held.dtype)
        if self.rank is None:
            places = places + self.cumulative_length
        elif not self.is_prompt:
            places, is_here = self._slot()
            new = torch.where(is_here, new, now.index_select(dim, places))
        now = now.index_copy(dim, places, new)
        self.local[name] = held.index_copy(0, self.rows, now)
        return x if self.rank is not None and self.is_prompt else now

    def _slot(self) -> tuple[Any, Any]:
        """The slot [1] of the token of a decode step, and whether this device of cp writes it."""
        size, n_prompt = self.experiment.plan.cp, self.experiment.workload.prompt
        number = (self.cumulative_length - n_prompt).reshape(1)
        return n_prompt // size + number // size, number % size == self.rank


class StageStates(StageArrays, States):
    """The states of linear attention."""

    def __init__(self, arrays: dict[str, Any], specs: Mapping[str, Spec]) -> None:
        States.__init__(self, arrays)
        self.specs = specs

    def start(self, rows: Any) -> None:
        """Start with the states of the micro-batch."""
        super().start(rows)
        self.arrays = {name: held.index_select(0, rows) for name, held in self.local.items()}

    def stop(self) -> None:
        """Keep the new states of the micro-batch."""
        for name, now in self.arrays.items():
            self.local[name] = self.local[name].index_copy(0, self.rows, now)
