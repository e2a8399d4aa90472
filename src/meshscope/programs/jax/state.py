"""What a layer holds: its weights as the layer uses them, and its cache."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshscope.programs.jax.collectives import MeshCollectives
from meshscope.programs.jax.numerics import Array
from meshscope.spec.plan.weights import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer by name; stacked ones are taken at `index`.

    `min_rows` is how many rows a product with a small weight has at least; see `at_least`.
    """

    arrays: Mapping[str, Array]
    specs: Mapping[str, Weight]
    points: MeshCollectives
    dtype: Any
    index: Array | int | None = None
    min_rows: int = 1

    def __contains__(self, name: str) -> bool:
        """Whether the layer has this weight."""
        return name in self.arrays

    def __call__(self, name: str) -> Array:
        """The weight, gathered where the plan splits it, in the dtype of activations or in its own."""
        array, spec = self.arrays[name], self.specs[name]
        if self.index is not None:
            is_alone = array.shape[0] == 1
            array = lax.dynamic_index_in_dim(array, self.index, axis=0, keepdims=False)
            if is_alone and self.points.gathers(spec):
                array = lax.optimization_barrier(array)  # else [1, ...] is what is gathered
        whole = self.points.weight(array, spec)
        return whole if spec.dtype is not None else whole.astype(self.dtype)

    def stacked(self, name: str) -> tuple[Array, Array | int] | None:
        """The weight of all layers [layers * n, ...] of this one's stack, and where its own n begin.

        For what can read a part of an array where it lies: taking it out is a copy, unless the compiler
        fuses it. None without a stack, and where a weight is gathered or converted before it is used.
        """
        array, spec = self.arrays[name], self.specs[name]
        is_converted = spec.dtype is None and array.dtype != jnp.dtype(self.dtype)
        if self.index is None or is_converted or not self.points.is_used_as_held(spec):
            return None
        return array.reshape(-1, *array.shape[2:]), self.index * array.shape[1]

    def at_least(self, x: Array) -> Array:
        """[B, S, D] with zeros after it along S, where the step has fewer than `min_rows` rows."""
        n_batch, n_positions = x.shape[:2]
        n_missing = self.min_rows - n_positions if n_batch * n_positions == 1 else 0
        return x if n_missing <= 0 else jnp.pad(x, ((0, 0), (0, n_missing), (0, 0)))

    def biased(self, x: Array, name: str) -> Array:
        """`x` plus this bias, if the layer has it."""
        return x + self(name) if name in self else x


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """The cache of one layer: arrays [B, T, ...], or [layers, B, T, ...] taken at `index`.

    New entries go to slot `start` of the sequences from `first_row` on, where `is_here` is not false.
    """

    arrays: Mapping[str, Array]
    start: Array | int
    index: Array | int | None = None
    is_here: Array | None = None
    first_row: Array | int = 0

    def written(
        self,
        name: str,
        new: Array,
        *,
        at: Array | int | None = None,
        is_here: Array | None = None,
    ) -> "LayerCache":
        """The cache with `new` [B, S, ...] written from `start` on.

        Or from slot `at`, and then where `is_here`, the argument, is not false.
        """
        array = self.arrays[name]
        new = new.astype(array.dtype)
        first = at
        if first is None:
            first, is_here = self.start, self.is_here
        offsets: list[Array | int] = [self.first_row, first] + [0] * (new.ndim - 2)
        if self.index is not None:
            new, offsets = new[None], [self.index, *offsets]
        if is_here is not None:
            new = jnp.where(is_here, new, lax.dynamic_slice(array, offsets, new.shape))
        updated = lax.dynamic_update_slice(array, new, offsets)
        return replace(self, arrays={**self.arrays, name: updated})

    def read(self, name: str, dtype: Any) -> Array:
        """All positions [B, T, ...], whether written yet or not."""
        array = self.arrays[name]
        if self.index is not None:
            array = lax.dynamic_index_in_dim(array, self.index, axis=0, keepdims=False)
        return array.astype(dtype)
