"""Arrays of a layer's cache other than the keys and values of all positions."""

# pyright: reportMissingImports=false
from dataclasses import dataclass
from typing import Any

import torch

from meshscope.events.enums import Phase


@dataclass
class States:
    """The arrays by name, which a layer replaces in each step."""

    arrays: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Reads and writes arrays [B, slots, width] of a layer at the positions [S] of one step."""

    states: States
    phase: Phase
    positions: Any

    def read(self, name: str, dtype: Any) -> Any:
        """The whole array."""
        return self.states.arrays[name].to(dtype)

    def write(self, name: str, new: Any, slots: Any) -> None:
        """Write `new` [B, n, width] to the slots [n]."""
        array = self.states.arrays[name]
        self.states.arrays[name] = array.index_copy(1, slots, new.to(array.dtype))

    def write_first(self, name: str, new: Any) -> None:
        """Write `new` [B, n, width] to the first slots."""
        array = self.states.arrays[name]
        parts = [new.to(array.dtype), array[:, new.shape[1] :]]
        self.states.arrays[name] = torch.cat(parts, dim=1)

    def write_latest(self, name: str, new: Any) -> None:
        """Write the latest of `new` [B, S, width] to a ring buffer."""
        n_slots, n_new = self.states.arrays[name].shape[1], new.shape[1]
        if self.phase is Phase.DECODE:
            self.write(name, new, self.positions % n_slots)
            return
        if n_new > n_slots:  # a prompt starts at position 0
            new = torch.roll(new[:, -n_slots:], n_new % n_slots, dims=1)
        self.write_first(name, new)

    def latest(self, name: str, dtype: Any) -> tuple[Any, Any]:
        """A ring buffer [B, T, width] in decode, and the positions [T] in it, negative if there is none."""
        array = self.read(name, dtype)
        slots = torch.arange(array.shape[1], device=array.device)
        return array, self.positions - (self.positions - slots) % array.shape[1]
