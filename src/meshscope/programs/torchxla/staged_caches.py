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

ARRAYS = ("keys", "values")
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
    """Keys and values [P, B, K, T, H]."""

    def __init__(self, n_slots: int, spec: Spec) -> None:
        StaticLayer.__init__(self, max_cache_len=n_slots)
        self.arrays, self.specs = {}, dict.fromkeys(ARRAYS, spec)

    def enter(self, tensors: Tensors) -> None:
        """Enter the manual region, with the position of this step."""
        super().enter(tensors)
        self.cumulative_length = tensors.entered(tensors.position, ())

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The cached keys and values of the micro-batch, including those of this step."""
        new = torch.arange(key_states.shape[2], device=torch_xla.device())
        places, seen = self.cumulative_length + new, list[Any]()
        for name, x in zip(ARRAYS, (key_states, value_states), strict=True):
            held = self.local[name]
            now = held.index_select(0, self.rows).index_copy(2, places, x)
            self.local[name] = held.index_copy(0, self.rows, now)
            seen.append(now)
        return seen[0], seen[1]


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
