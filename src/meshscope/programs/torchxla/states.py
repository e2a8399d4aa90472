"""Arrays of a layer's cache other than the keys and values of all positions.

Shapes: B batch, S positions of this step, T slots; n devices of cp.
"""

# pyright: reportMissingImports=false
from dataclasses import dataclass
from typing import Any

import torch

from meshscope.events.collective import Groups
from meshscope.events.enums import Phase
from meshscope.programs.torchxla.tensors import all_gather


@dataclass
class States:
    """The arrays by name, which a layer replaces in each step."""

    arrays: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a sequence over cp, of which this device has the one of its `rank` [1], in a manual region."""

    groups: Groups
    rank: Any

    @property
    def size(self) -> int:
        """The number of blocks."""
        return len(self.groups[0])

    def gathered(self, x: Any) -> Any:
        """All blocks, [B, S, ...] -> [B, n * S, ...]."""
        return all_gather(x, 1, self.groups)

    def interleaved(self, x: Any) -> Any:
        """Every n-th entry of x [B, T, width] from the rank on, padded."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % self.size))
        rounds = padded.reshape(x.shape[0], -1, self.size, x.shape[2])
        return rounds.index_select(2, self.rank)[:, :, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Reads and writes arrays [B, T, width] of a layer at the positions [S] of one step.

    With `blocks`, they are those of one device.
    """

    states: States
    phase: Phase
    positions: Any
    blocks: Blocks | None = None

    @property
    def split_prompt(self) -> Blocks | None:
        """The blocks of the step's positions if it is a prompt that cp splits."""
        return self.blocks if self.phase is Phase.PREFILL else None

    @property
    def split_entries(self) -> Blocks | None:
        """The blocks in decode, where cp splits the entries so far."""
        return self.blocks if self.phase is Phase.DECODE else None

    def read(self, name: str, dtype: Any) -> Any:
        """The whole array."""
        return self.states.arrays[name].to(dtype)

    def write(self, name: str, new: Any, slots: Any) -> None:
        """Write `new` [B, n, width] to the slots [n]."""
        array = self.states.arrays[name]
        self.states.arrays[name] = array.index_copy(1, slots, new.to(array.dtype))

    def write_entry(self, name: str, new: Any, number: Any) -> None:
        """Write the entry `new` [B, 1, width] with this number [1], which cp gives to one device."""
        if self.blocks is None:
            self.write(name, new, number)
            return
        slot = number // self.blocks.size
        is_here = number % self.blocks.size == self.blocks.rank
        old = self.read(name, new.dtype).index_select(1, slot)
        self.write(name, torch.where(is_here, new, old), slot)

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
